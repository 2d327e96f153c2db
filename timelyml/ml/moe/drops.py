"""Who keeps a place when an expert has more tokens than capacity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from timelyml.errors import ConfigError
from timelyml.ml.choice import ranked
from timelyml.ml.moe.capacity import Capacity
from timelyml.ml.moe.rules import Choice

Order = Literal["token", "choice", "score", "batch_priority"]
"""Who comes first.

"token": tokens in order, all choices of one before the next (MegaBlocks, MaxText).
"choice": all first choices in token order, then all second ones (GShard, Tutel).
"score": per expert the pairs of the highest score (Megatron, DeepSpeed).
"batch_priority": as "choice", over tokens sorted by their best score (V-MoE).
Equal scores go to the lower token.
"""

_NOBODY = 2**31 - 1
"""The expert of a pair that asks for no place; sorts behind all others."""

_ORDERS = ("token", "choice", "score", "batch_priority")


@dataclass(frozen=True, slots=True)
class Dropping:
    """A limit on the tokens of each expert, and what happens beyond it.

    Attributes:
        capacity: The limit, from the number of tokens in a group.
        order: Who is kept.
        over_survivors: Renormalise the weights of a token over the pairs that were
            kept, if the rule renormalises at all (DeepSpeed); else they stay as they
            were (Megatron, GShard in mesh-tensorflow, Switch).
    """

    capacity: Capacity
    order: Order = "token"
    over_survivors: bool = False

    def __post_init__(self) -> None:
        if self.order not in _ORDERS:
            raise ConfigError(
                f"drop order is unknown; got {self.order!r}; expected one of "
                f"{_ORDERS}; choose who keeps a place",
                option="order",
            )


def places(
    chosen: jax.Array, wanted: jax.Array, order: Order, scores: jax.Array
) -> jax.Array:
    """Number the pairs of each expert in the order in which they are served.

    Args:
        chosen: `(tokens, top_k)` experts.
        wanted: `(tokens, top_k) bool`: pairs that ask for a place.
        order: Who comes first.
        scores: `(tokens, top_k)`; read by "score" and "batch_priority".

    Returns:
        `(tokens, top_k) int32` from 0 in each expert; of no meaning where a pair
        does not ask.
    """
    tokens, top_k = chosen.shape
    num_slots = tokens * top_k
    queue = _queue(tokens, top_k, order, scores)  # slots, first served first
    flat = jnp.where(wanted, chosen, _NOBODY).reshape(-1)
    in_queue = flat[queue]
    by_expert = jnp.argsort(in_queue, stable=True)
    experts = in_queue[by_expert]  # ascending, the queue's order inside
    first = jnp.searchsorted(experts, experts, side="left").astype(jnp.int32)
    place = jnp.arange(num_slots, dtype=jnp.int32) - first
    placed = jnp.zeros(num_slots, jnp.int32).at[queue[by_expert]].set(place)
    return placed.reshape(tokens, top_k)


def drop_beyond(
    choice: Choice, capacity: jax.Array | int, order: Order, scores: jax.Array
) -> Choice:
    """Keep what fits into the capacity of each expert; what was asked for stays."""
    scores = jax.lax.stop_gradient(scores)
    place = places(choice.chosen, choice.kept, order, scores)
    return choice._replace(kept=choice.kept & (place < capacity))


def _queue(tokens: int, top_k: int, order: Order, scores: jax.Array) -> jax.Array:
    """Order all slots `token * top_k + choice` by who is served first."""
    slots = jnp.arange(tokens * top_k, dtype=jnp.int32).reshape(tokens, top_k)
    if order == "token":
        return slots.reshape(-1)
    if order == "choice":
        return slots.T.reshape(-1)
    if order == "score":
        return ranked(scores.reshape(-1))
    by_best = ranked(jnp.max(scores, axis=1))
    return slots[by_best].T.reshape(-1)
