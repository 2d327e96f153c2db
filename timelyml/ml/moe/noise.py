"""Noise in the router, replayable: each token's draw follows from key and position.

The same token gets the same noise in any shard, microbatch or recomputation, as
long as it keeps its position in the whole batch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from timelyml.ml.choice import at_least_float32
from timelyml.ml.moe.rules import Choice


class Noise(NamedTuple):
    """What is drawn in one step; stored with the choice if the pass is recomputed."""

    key: jax.Array
    """A typed key, as `jax.random.key` makes it; a new one each step."""
    positions: jax.Array
    """`(tokens,) int32`: of each token in the whole batch."""
    jitter: jax.Array | float = 0.0
    """Router inputs are multiplied by numbers from 1 - jitter to 1 + jitter."""
    gaussian: jax.Array | float = 0.0
    """This times a normal deviate, divided by the experts, is added to logits."""


def jittered(rows: jax.Array, noise: Noise) -> jax.Array:
    """Multiply router inputs by uniform noise; give a copy that only the router sees.

    Source:
        Switch Transformer, with 1e-2.
    """
    low, high = 1 - noise.jitter, 1 + noise.jitter

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.uniform(key, rows.shape[1:], minval=low, maxval=high)

    factors = jax.vmap(draw)(_keys(noise, 0))
    return at_least_float32(rows) * factors


def with_gaussian(logits: jax.Array, noise: Noise) -> jax.Array:
    """Add normal noise to logits.

    Source:
        Tutel: `gate_noise * randn / experts`.
    """
    num_experts = logits.shape[1]

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (num_experts,))

    return logits + noise.gaussian * jax.vmap(draw)(_keys(noise, 1)) / num_experts


def thinned(choice: Choice, weights: jax.Array, noise: Noise) -> Choice:
    """Keep choices after the first at random, with probability `min(1, 2 * weight)`.

    What is not kept takes no capacity and counts as dropped.

    Source:
        GShard, generalised from its second choice to all later ones.
    """
    draws = jax.vmap(lambda key: jax.random.uniform(key, weights.shape[1:]))(
        _keys(noise, 2)
    )
    lucky = draws < 2 * jax.lax.stop_gradient(weights)
    is_first = jnp.arange(weights.shape[1]) == 0
    return choice._replace(kept=choice.kept & (lucky | is_first))


def _keys(noise: Noise, purpose: int) -> jax.Array:
    """Give one key per token; draws of different purposes are independent."""
    base = jax.random.fold_in(noise.key, purpose)
    return jax.vmap(lambda position: jax.random.fold_in(base, position))(
        noise.positions
    )
