"""The same model as one JAX program on one device: what the dataflow must equal.

Every expert computes every token and a mask picks, so there is no dispatch, no
padding and no exchange that could go wrong. Trained weights are judged, and text is
generated, by this program too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.corpus import Corpus
from examples.moe_routing import model
from examples.moe_routing.config import Settings
from examples.moe_routing.inputs import batch_of
from timelyml.ml.moe import expert_forward


def routed_by(settings: Settings, params: Any, normal: jax.Array) -> Any:
    """Give `(tokens, experts)` weights, zero where not chosen, and probabilities."""
    logits = normal @ params["router"]
    best = jax.lax.top_k(logits, settings.top_k)[1]  # (tokens, top_k)
    chosen = jax.nn.one_hot(best, settings.num_experts).sum(axis=1)
    probabilities = jax.nn.softmax(logits)
    weights = probabilities * chosen
    if settings.top_k > 1:  # a single one keeps its probability, or nothing learns
        weights /= weights.sum(axis=1, keepdims=True)
    return weights, chosen, probabilities


def experts_of(
    settings: Settings, params: Any, normal: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Give what a layer's experts add, its balance, and the counts of its experts."""
    weights, chosen, probabilities = routed_by(settings, params, normal)
    # (experts, tokens, d_model): every expert, every token
    given = jax.vmap(expert_forward, in_axes=(0, None))(params["experts"], normal)
    mixed = jnp.einsum("te,etd->td", weights, given)
    counts, tokens = chosen.sum(axis=0), len(normal)
    shares = counts / tokens * probabilities.sum(axis=0) / tokens
    balance = settings.num_experts * shares.sum() / settings.top_k
    return mixed, balance, counts


def forward(
    settings: Settings, params: Any, context: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Give the last residual, what its experts add, the mean balance, and the counts."""
    first, *others = params["layers"]
    table = params["table"]
    residual, normal = model.begin(settings, table, first["attention"], context)
    mixed, balance, count = experts_of(settings, first["moe"], normal)
    balances, counts = [balance], [count]
    for layer in others:
        attention = layer["attention"]
        residual, normal = model.go_on(settings, attention, residual, mixed)
        mixed, balance, count = experts_of(settings, layer["moe"], normal)
        balances.append(balance)
        counts.append(count)
    return residual, mixed, jnp.mean(jnp.stack(balances)), jnp.stack(counts)


def loss_of(
    settings: Settings, params: Any, batch: Any
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Give the training loss; beside it the cross-entropy in nats and the counts."""
    residual, mixed, balance, counts = forward(settings, params, batch["context"])
    head, target = params["head"], batch["target"]
    (entropy,) = model.head_loss(settings, head, residual, mixed, target)
    return entropy + settings.balance * balance, (entropy, counts)


def train(
    settings: Settings,
    corpus: Corpus,
    *,
    steps: int | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> tuple[dict[str, Any], list[float]]:
    """Train in one program; give the weights and the cross-entropy of each step."""
    params = jax.tree.map(jnp.asarray, model.init_all(settings))
    adam = model.optimiser(settings)
    state = adam.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step_of(params: Any, state: Any, batch: Any) -> Any:
        gradients, (entropy, _) = jax.grad(
            functools.partial(loss_of, settings), has_aux=True
        )(params, batch)
        updates, state = adam.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, entropy

    losses = []
    for step in range(settings.steps if steps is None else steps):
        params, state, entropy = step_of(
            params, state, batch_of(corpus, settings, step)
        )
        losses.append(float(entropy))
        if on_step is not None:
            on_step(step, losses[-1])
    return jax.tree.map(np.asarray, params), losses


def logits(settings: Settings, params: Any, context: jax.Array) -> jax.Array:
    """Score the byte after each of `(sequences, window)`; `(sequences, window, 256)`."""
    residual, mixed, _, _ = forward(settings, params, context)
    scores = model.logits_of(params["head"], residual, mixed)
    return scores.reshape(*context.shape, model.BYTES)


def largest_difference(ours: Any, reference: Any) -> tuple[float, str]:
    """Give the largest difference of two trees of weights, and the leaf it is in.

    A leaf's differences are relative to its own largest absolute value.
    """
    worst, where = 0.0, ""
    flat, _ = jax.tree_util.tree_flatten_with_path(reference)
    for (path, expected), got in zip(flat, jax.tree.leaves(ours), strict=True):
        scale = float(np.abs(expected).max()) or 1.0
        difference = float(np.abs(np.asarray(got) - expected).max()) / scale
        if difference >= worst:
            worst, where = difference, jax.tree_util.keystr(path)
    return worst, where
