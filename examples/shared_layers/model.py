"""The layers of each task, and those that all tasks share; pure functions of weights.

A task has an embedding before the shared layers and a classifier after them. The shared
layers are blocks of a Transformer, and see the rows of all tasks as one batch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.pipeline.model import BYTES, block

Params = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked about the byte after a piece of text.

    Attributes:
        classes: For each byte, the class that is to be predicted.
    """

    name: str
    classes: tuple[int, ...]

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return max(self.classes) + 1


def kind_of(byte: int) -> int:
    """Tell letters, digits, spaces, line ends and the rest apart."""
    one = bytes([byte])
    if one == b"\n":
        return 3
    return 0 if one.isalpha() else 1 if one.isdigit() else 2 if one.isspace() else 4


TASKS = (
    Task("byte", tuple(range(BYTES))),
    Task("kind", tuple(map(kind_of, range(BYTES)))),
)


def enter(params: Params, tokens: jax.Array) -> jax.Array:
    """Look bytes up: `(rows, length) -> (rows, length, d_model)`."""
    return jnp.take(params["table"], tokens, axis=0)


def shared(
    heads: int, blocks: Sequence[Params], parts: Sequence[jax.Array]
) -> list[jax.Array]:
    """Run the blocks on the rows of all tasks at once; give each task its own."""
    x = jnp.concatenate(parts)
    for params in blocks:
        x = block(heads, params, x)
    ends = np.cumsum([len(part) for part in parts])[:-1]
    return jnp.split(x, ends)


def loss_of(params: Params, hidden: jax.Array, labels: jax.Array) -> jax.Array:
    """Classify by the last position; the mean cross-entropy in nats."""
    scores = hidden[:, -1] @ params["classify"]
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
    return jnp.mean(losses)


def moved(params: Any, gradients: Any, rate: float) -> Any:
    """Take a step of gradient descent."""
    return jax.tree.map(lambda w, g: w - rate * g, params, gradients)


def joint_step(
    heads: int, rate: float, weights: Any, batches: Sequence[tuple[Any, Any]]
) -> tuple[Any, list[jax.Array]]:
    """Train both tasks by one JAX program: what the clients together must equal."""

    def total(weights: Any) -> tuple[jax.Array, list[jax.Array]]:
        blocks, tasks = weights
        parts = [enter(p, x) for p, (x, _) in zip(tasks, batches, strict=True)]
        each = zip(tasks, shared(heads, blocks, parts), batches, strict=True)
        losses = [loss_of(params, hidden, y) for params, hidden, (_, y) in each]
        return sum(losses, jnp.zeros(())), losses

    gradients, losses = jax.grad(total, has_aux=True)(weights)
    return moved(weights, gradients, rate), losses


reference_step = functools.partial(jax.jit, static_argnums=(0, 1))(joint_step)
