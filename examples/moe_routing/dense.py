"""The same model as one JAX program on one device: what the dataflow must equal.

Every expert computes every token and a mask picks, so there is no dispatch, no
padding and no exchange that could go wrong.
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
from timelyml.ml.moe import expert_forward

_JUDGED_ROWS = 2048


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


def loss_of(
    settings: Settings, params: Any, batch: Any
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Give the training loss; beside it the cross-entropy in nats and the counts."""
    residual, normal = model.hidden_of(params["embed"], batch["context"])
    weights, chosen, probabilities = routed_by(settings, params["embed"], normal)
    mixed = jnp.zeros_like(normal)
    for index in range(settings.num_experts):
        expert = jax.tree.map(lambda leaf, index=index: leaf[index], params["experts"])
        mixed += weights[:, index : index + 1] * expert_forward(expert, normal)
    head, target = params["head"], batch["target"]
    (entropy,) = model.head_loss(settings, head, residual, mixed, target)
    counts = chosen.sum(axis=0)
    shares = counts / settings.batch * probabilities.sum(axis=0) / settings.batch
    balance = settings.num_experts * shares.sum() / settings.top_k
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
        batch = corpus.step_batch(step, batch=settings.batch, seed=settings.seed)
        params, state, entropy = step_of(params, state, batch)
        losses.append(float(entropy))
        if on_step is not None:
            on_step(step, losses[-1])
    return jax.tree.map(np.asarray, params), losses


def bits_per_byte(settings: Settings, params: Any, judged: Any) -> float:
    """Judge weights on held-out tokens, in bits."""

    @jax.jit
    def nats(params: Any, context: jax.Array, target: jax.Array) -> jax.Array:
        _, (entropy, _) = loss_of(
            settings, params, {"context": context, "target": target}
        )
        return entropy * settings.batch  # head_loss divides by the training batch

    total, rows = 0.0, len(judged["target"])
    for start in range(0, rows, _JUDGED_ROWS):
        part = slice(start, start + _JUDGED_ROWS)
        total += float(nats(params, judged["context"][part], judged["target"][part]))
    return total / rows / float(np.log(2))


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
