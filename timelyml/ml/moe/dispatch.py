"""Dispatch and combine: where each chosen pair goes, and how its rows come back.

Plans are numpy, for the host decides where rows go; what multiplies is JAX. Moving
rows between shards is left to the dataflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """Which (token, choice) pair goes to which expert, and in what order.

    A *slot* numbers a pair: `token * top_k + choice`. The plan lists slots by
    expert, and within an expert in token order; both directions and both passes
    use it. A dropped pair has no place in it.
    """

    slots: NDArray[np.int32]
    """`(rows,)`: slots in expert-major order."""
    counts: NDArray[np.int64]
    """`(experts,)`: how many of them belong to each expert."""
    top_k: int

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The token of each dispatched row, in the plan's order."""
        return self.slots // np.int32(self.top_k)

    @property
    def experts(self) -> NDArray[np.int64]:
        """The expert of each dispatched row, ascending."""
        return np.repeat(np.arange(self.counts.shape[0]), self.counts)


def plan_dispatch(
    chosen: NDArray[np.integer[Any]],
    num_experts: int,
    *,
    kept: NDArray[np.bool_] | None = None,
) -> DispatchPlan:
    """Sort the chosen pairs by expert, stably.

    Args:
        chosen: `(tokens, top_k)` experts from `choice.choose`.
        num_experts: Number of experts.
        kept: `(tokens, top_k)`: pairs that are sent; all by default. A pair whose
            weight underflowed to zero is still sent: the choice decides.

    >>> plan = plan_dispatch(np.array([[1, 0], [1, 2]]), 3)
    >>> plan.slots.tolist(), plan.counts.tolist(), plan.tokens.tolist()
    ([1, 0, 2, 3], [1, 2, 1], [0, 0, 1, 1])
    """
    flat = np.asarray(chosen).ravel()
    sent = (
        np.arange(flat.shape[0])
        if kept is None
        else np.flatnonzero(np.asarray(kept).ravel())
    )
    experts = flat[sent]
    counts = np.bincount(experts, minlength=num_experts)
    if counts.shape[0] != num_experts:
        raise ValueError(
            f"plan_dispatch: expert out of range; got {int(experts.max())!r}; expected "
            f"below {num_experts}; choose among the experts that exist"
        )
    slots = sent[np.argsort(experts, kind="stable")].astype(np.int32)
    return DispatchPlan(slots, counts, int(np.shape(chosen)[1]))


def place_slots(
    slots: NDArray[np.int32],
    rows: NDArray[Any],
    num_slots: int,
    *,
    kept: NDArray[np.bool_] | None = None,
) -> NDArray[Any]:
    """Put rows that came back from experts at their slots; every slot exactly once.

    Rows may come in any order: the slot, not the arrival, decides the place.

    Args:
        slots: `(rows,)`, the slot of each row.
        rows: `(rows, ...)`.
        num_slots: Tokens times `top_k`.
        kept: `(tokens, top_k)`, as given to `plan_dispatch`. Dropped slots must not
            come back, and hold zeros.

    Returns:
        `(num_slots, ...)`, the inverse of the dispatch.
    """
    hits = np.bincount(slots, minlength=num_slots)
    expected = np.ones(num_slots, bool) if kept is None else np.asarray(kept).ravel()
    if hits.shape[0] != num_slots or not (hits == expected).all():
        raise ValueError(
            f"place_slots: rows do not cover the slots once; got {slots.shape[0]} rows "
            f"for {int(expected.sum())} of {num_slots} slots; expected each slot "
            "exactly once; a block is missing or was counted twice"
        )
    shape = (num_slots, *rows.shape[1:])
    placed = (
        np.empty(shape, rows.dtype) if kept is None else np.zeros(shape, rows.dtype)
    )
    placed[slots] = rows
    return placed


def combine(expert_rows: jax.Array, weights: jax.Array) -> jax.Array:
    """Sum each token's expert outputs by its routing weights, in choice order.

    Args:
        expert_rows: `(tokens, top_k, d_model)`, placed by slot; zeros where dropped.
        weights: `(tokens, top_k)`; zero where dropped.

    Returns:
        `(tokens, d_model)`.
    """
    total = expert_rows[:, 0] * weights[:, :1]
    for index in range(1, expert_rows.shape[1]):
        total = total + expert_rows[:, index] * weights[:, index : index + 1]
    return total
