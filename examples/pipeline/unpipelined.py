"""The same model as one JAX program on one device: what the pipeline must equal."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.corpus import Corpus
from examples.pipeline import model
from examples.pipeline.config import Settings

_JUDGED_ROWS = 32


@dataclass(frozen=True, slots=True)
class Reference:
    """What training in one piece gave.

    Attributes:
        losses: In nats, by step.
        params: The weights of each layer.
        tokens_per_s: From the second step on.
    """

    losses: list[float]
    params: list[Any]
    tokens_per_s: float


def batch_of(corpus: Corpus, settings: Settings, step: int) -> tuple[Any, Any]:
    """Give inputs and targets `(batch, length) int32` of a step."""
    drawn = corpus.step_batch(step, batch=settings.batch, seed=settings.seed)
    return _as_pair(drawn["context"])


def train(settings: Settings, corpus: Corpus, *, steps: int) -> Reference:
    """Train in one program."""
    params = _untied(settings, model.init(settings))
    adam = model.optimiser(settings)
    state = adam.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step_of(params: Any, state: Any, tokens: Any, target: Any) -> Any:
        loss, gradients = jax.value_and_grad(_loss(settings))(params, tokens, target)
        changes, state = adam.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, loss

    losses, began = [], 0.0
    for step in range(steps):
        params, state, loss = step_of(params, state, *batch_of(corpus, settings, step))
        losses.append(float(loss))
        began = began or time.perf_counter()  # after what compiles
    seconds = time.perf_counter() - began
    tokens = (steps - 1) * settings.batch * settings.length
    return Reference(
        losses,
        [jax.tree.map(np.asarray, each) for each in _whole(settings, params)],
        tokens / seconds if steps > 1 else 0.0,
    )


def bits_per_byte(settings: Settings, params: list[Any], corpus: Corpus) -> float:
    """Judge weights on held-out text."""
    judged = corpus.judged(8 * _JUDGED_ROWS, seed=settings.seed)
    inputs, targets = _as_pair(judged["context"])

    @jax.jit
    def nats(params: Any, tokens: Any, target: Any) -> Any:
        return model.loss_fn(_forward(settings)(params, tokens), target)

    total, count = 0.0, 0
    for start in range(0, len(targets), _JUDGED_ROWS):
        part = slice(start, start + _JUDGED_ROWS)
        nat, counted = nats(params, inputs[part], targets[part])
        total, count = total + float(nat), count + int(counted)
    return total / count / float(np.log(2))


def largest_difference(ours: Any, reference: Any) -> float:
    """Give the largest difference of two trees, relative to each leaf's largest value."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(reference), strict=True)
    return max(
        float(np.abs(np.asarray(got) - expected).max() / np.abs(expected).max())
        for got, expected in pairs
    )


def _forward(settings: Settings) -> Callable[[Any, Any], Any]:
    def forward(params: Any, x: Any) -> Any:
        for layer, weights in zip(model.layers_of(settings), params, strict=True):
            x = layer(weights, x)
        return x

    return forward


def _loss(settings: Settings) -> Callable[[Any, Any, Any], Any]:
    def loss(params: Any, tokens: Any, target: Any) -> Any:
        logits = _forward(settings)(_whole(settings, params), tokens)
        total, count = model.loss_fn(logits, target)
        return total / jnp.maximum(count, 1)

    return loss


def _untied(settings: Settings, params: list[Any]) -> list[Any]:
    """Leave the second use of a shared table out."""
    if not settings.is_tied:
        return params
    return [*params[:-1], {"norm": params[-1]["norm"]}]


def _whole(settings: Settings, params: list[Any]) -> list[Any]:
    if not settings.is_tied:
        return params
    return [*params[:-1], {**params[-1], "table": params[0]["table"]}]


def _as_pair(context: Any) -> tuple[Any, Any]:
    rows = context.astype(np.int32)
    return rows[:, :-1], rows[:, 1:]
