"""A small Mixtral language model trains as in transformers, its layers pooled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.ml.mixtral import LAYERS, attend, normalise
from tests.ml.moe_cases import GRADIENT_TOLERANCE, LOSS_TOLERANCE, load
from timelyml.ml.moe import Router, TokenChoice, add_sums, balance, moe_dense

TOP_2 = Router(TokenChoice(2))


def layer(weights, rows):
    rows = rows + attend(weights, normalise(rows, weights["input_layernorm.weight"]))
    normal = normalise(rows, weights["post_attention_layernorm.weight"])
    params = {
        "router": weights["mlp.gate.weight"].T,
        "experts": {
            "gate_up": weights["mlp.experts.gate_up_proj"].transpose(0, 2, 1),
            "down": weights["mlp.experts.down_proj"].transpose(0, 2, 1),
        },
    }
    out, routed = moe_dense(params, normal.reshape(-1, rows.shape[-1]), TOP_2)
    return rows + out.reshape(rows.shape), routed.sums


def loss_of(params, tokens, coefficient):
    rows = params["model.embed_tokens.weight"][tokens]
    sums = []
    for index in range(LAYERS):
        prefix = f"model.layers.{index}."
        weights = {
            key.removeprefix(prefix): value
            for key, value in params.items()
            if key.startswith(prefix)
        }
        rows, own = layer(weights, rows)
        sums.append(own)
    rows = normalise(rows, params["model.norm.weight"])
    logits = jax.nn.log_softmax(rows @ params["lm_head.weight"].T)
    targets = tokens[:, 1:, None]
    entropy = -jnp.mean(jnp.take_along_axis(logits[:, :-1], targets, axis=-1))
    aux = balance(add_sums(*sums))
    counts = jnp.stack([own.counts for own in sums])
    return entropy + coefficient * aux, (aux, counts)


def test_five_steps_agree_with_transformers():
    golden = load("mixtral_lm_train")
    params = {key[2:]: golden[key] for key in golden.files if key.startswith("w_")}
    step_of = jax.jit(
        functools.partial(
            jax.value_and_grad(loss_of, has_aux=True),
            coefficient=float(golden["aux_coef"]),
        )
    )
    for step, tokens in enumerate(golden["tokens"].astype(np.int32)):
        (loss, (aux, counts)), gradients = step_of(params, tokens)
        assert (np.asarray(counts) == golden["counts"][step]).all()
        np.testing.assert_allclose(loss, golden["total_loss"][step], atol=1e-5)
        np.testing.assert_allclose(aux, golden["aux_loss"][step], rtol=LOSS_TOLERANCE)
        if step == 0:
            for key, gradient in gradients.items():
                np.testing.assert_allclose(
                    gradient, golden[f"grad0_{key}"], atol=GRADIENT_TOLERANCE
                )
        rate = float(golden["lr"])
        params = {
            key: params[key] - rate * np.asarray(gradients[key]) for key in params
        }
