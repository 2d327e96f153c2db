"""A Mixtral language model trained as a dataflow agrees with transformers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.ml.mixtral import LAYERS, attend, normalise
from tests.ml.moe_cases import GRADIENT_TOLERANCE, LOSS_TOLERANCE, load
from tests.ml.moe_flows import collected, source_of, train
from timelyml import Cluster, Dataflow
from timelyml.ml import MoE, rows, sharded
from timelyml.ml.moe import RouterSums, add_sums

SHARDS = 2
MOE = MoE(num_experts=4, top_k=2)
GOLDEN = load("mixtral_lm_train")
EXPERTS = {"gate_up": "gate_up_proj", "down": "down_proj"}


def layer_of(index):
    """A layer's own weights, and those of its experts in the layout of `MoE`."""
    prefix = f"w_model.layers.{index}."
    own = {
        key.removeprefix(prefix): GOLDEN[key]
        for key in GOLDEN.files
        if key.startswith(prefix) and ".mlp." not in key
    }
    moe = {
        "router": GOLDEN[f"{prefix}mlp.gate.weight"].T,
        "experts": {
            name: GOLDEN[f"{prefix}mlp.experts.{theirs}"].transpose(0, 2, 1)
            for name, theirs in EXPERTS.items()
        },
    }
    return {"own": own, "moe": moe}


def first_params():
    return {
        "embed": GOLDEN["w_model.embed_tokens.weight"],
        "layers": [layer_of(index) for index in range(LAYERS)],
        "norm": GOLDEN["w_model.norm.weight"],
        "head": GOLDEN["w_lm_head.weight"],
    }


def begin(embed, weights, tokens):
    return go_on(weights, embed[tokens].reshape(-1, embed.shape[1]), 0.0, tokens)


def go_on(weights, residual, given, tokens):
    """Add what experts gave, and attend; give the residual, and what experts read."""
    residual = (residual + given).reshape(*tokens.shape, -1)
    before = normalise(residual, weights["input_layernorm.weight"])
    residual = residual + attend(weights, before)
    normal = normalise(residual, weights["post_attention_layernorm.weight"])
    return tuple(each.reshape(-1, each.shape[-1]) for each in (residual, normal))


def entropy(num_targets, weights, residual, given, tokens):
    norm, head = weights
    last = normalise(residual + given, norm).reshape(*tokens.shape, -1)
    logits = jax.nn.log_softmax(last @ head.T)[:, :-1]
    found = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)
    return -jnp.sum(found)[None] / num_targets


def loss_of(coefficient, num_targets, params, batch):
    tokens = batch["tokens"]
    first, second = params["layers"]
    residual, normal = sharded.call(begin, params["embed"], first["own"], tokens)
    given, routing = MOE(first["moe"], normal)
    residual, normal = sharded.call(go_on, second["own"], residual, given, tokens)
    given, other = MOE(second["moe"], normal)
    pooled = sharded.call(add_sums, routing.sums, other.sums)
    aux = MOE.losses(other._replace(sums=RouterSums(*pooled)), balance=coefficient)
    parts = (params["norm"], params["head"]), residual, given, tokens
    counts = [routing.sums.counts, other.sums.counts]
    loss = sharded.call(functools.partial(entropy, num_targets), *parts)
    return (loss, aux), (aux, counts)


def trained(cluster, steps):
    tokens = GOLDEN["tokens"].astype(np.int32)[:steps]
    blocks = [[{"tokens": part} for part in np.split(each, SHARDS)] for each in tokens]
    num_targets = tokens[0][:, 1:].size
    loss = functools.partial(loss_of, float(GOLDEN["aux_coef"]), num_targets)
    return train(loss, first_params(), optax.sgd(float(GOLDEN["lr"])), blocks, cluster)


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_five_steps_agree_with_transformers_on_any_number_of_workers(num_workers):
    with Cluster(workers=num_workers, mode="threads") as cluster:
        losses, aux, _ = trained(cluster, 5)

    np.testing.assert_allclose(losses, GOLDEN["total_loss"], atol=1e-5)
    for step, (share, counts) in enumerate(aux):
        ours = np.sum(share) / float(GOLDEN["aux_coef"])
        np.testing.assert_allclose(ours, GOLDEN["aux_loss"][step], rtol=LOSS_TOLERANCE)
        summed = [np.sum(np.reshape(each, (SHARDS, -1)), axis=0) for each in counts]
        assert (np.stack(summed) == GOLDEN["counts"][step]).all()


def test_the_first_gradients_agree_with_transformers():
    with Cluster(workers=2, mode="threads") as cluster:
        _, _, weights = trained(cluster, 1)

    rate = float(GOLDEN["lr"])
    moved = jax.tree.map(lambda a, b: (a - b) / rate, first_params(), weights)
    expected = {
        "embed": GOLDEN["grad0_model.embed_tokens.weight"],
        "norm": GOLDEN["grad0_model.norm.weight"],
        "head": GOLDEN["grad0_lm_head.weight"],
    }
    for index, layer in enumerate(moved.pop("layers")):
        prefix = f"grad0_model.layers.{index}."
        ours = layer["own"] | {"mlp.gate.weight": layer["moe"]["router"].T}
        for name, theirs in EXPERTS.items():
            part = layer["moe"]["experts"][name].transpose(0, 2, 1)
            ours[f"mlp.experts.{theirs}"] = part
        for name, gradient in ours.items():
            expected[prefix + name] = GOLDEN[prefix + name]
            moved[prefix + name] = gradient
    assert set(moved) == set(expected)
    for name, gradient in moved.items():
        np.testing.assert_allclose(gradient, expected[name], atol=GRADIENT_TOLERANCE)


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_the_balance_of_two_layers_is_pooled_or_not_as_transformers_has_it(num_workers):
    golden = load("aux_two_layers")
    moe = MoE(num_experts=8, top_k=2, d_ff=2, num_shards=4)
    logits = {name: golden[f"logits{name}"] for name in "01"}
    params = moe.init(jax.random.key(0), logits["0"])
    params["router"] = np.eye(8, dtype=np.float32)  # so that rows are their own logits

    def losses(params, batch):
        routings = [moe(params, batch[name])[1] for name in "01"]
        pooled = sharded.call(add_sums, *(each.sums for each in routings))
        pooled = routings[0]._replace(sums=RouterSums(*pooled))
        return [moe.losses(each, balance=1.0) for each in (pooled, *routings)]

    flow = Dataflow("losses")
    parts = zip(*(np.split(each, SHARDS) for each in logits.values()), strict=True)
    blocks = [[dict(zip("01", part, strict=True)) for part in parts]]
    batch = rows(source_of(flow, blocks), blocks[0][0])
    read = collected(sharded.flow(losses)(params, batch))
    with Cluster(workers=num_workers, mode="threads") as cluster:
        found = read(cluster.run(flow.build(), timeout_s=100))

    pooled, *each = [np.sum(shares) for shares in found]
    close = {"rtol": LOSS_TOLERANCE}
    np.testing.assert_allclose(pooled, golden["aux_hf_pooled"], **close)
    np.testing.assert_allclose(each, golden["aux_per_layer"], **close)
