"""Mixture-of-experts arithmetic: the expert, dispatch and combine, as pure functions.

Dispatch plans are numpy, for the host decides where rows go; everything that
multiplies is JAX. Moving rows between shards is left to the dataflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

ExpertParams = Mapping[str, Any]
"""`gate_up` `(d_model, 2 * d_ff)` and `down` `(d_ff, d_model)`; gate comes first."""


def expert_forward(params: ExpertParams, rows: jax.Array) -> jax.Array:
    """Apply one gated expert to its rows, `(rows, d_model)` to the same shape.

    Row-wise and without a bias, so zero padding gives zero rows.

    Source:
        Mixtral's expert, weights transposed: `(silu(gate) * up) @ down`.
    """
    hidden = rows @ params["gate_up"]  # (rows, 2 * d_ff)
    gate, up = jnp.split(hidden, 2, axis=-1)
    return jnp.matmul(jax.nn.silu(gate) * up, params["down"])


def expert_backward(
    params: ExpertParams, rows: jax.Array, cotangents: jax.Array
) -> tuple[Any, jax.Array]:
    """Give the gradients of an expert's parameters and of its input rows.

    Recomputes the forward pass; rows and cotangents of padding are zeros and add
    nothing.

    Args:
        params: The parameters that the forward pass used.
        rows: `(rows, d_model)`, the input of the forward pass.
        cotangents: `(rows, d_model)`, gradients of the loss by the output rows.
    """
    _, pull = jax.vjp(expert_forward, params, rows)
    gradients, row_gradients = pull(cotangents)
    return gradients, row_gradients


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """Which (token, choice) pair goes to which expert, and in what order.

    A *slot* numbers a pair: `token * top_k + choice`. The plan lists slots by
    expert, and within an expert in token order; both directions and both passes
    use it.
    """

    slots: NDArray[np.int32]
    """`(tokens * top_k,)`: slots in expert-major order."""
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


def plan_dispatch(chosen: NDArray[np.integer[Any]], num_experts: int) -> DispatchPlan:
    """Sort the chosen pairs by expert, stably.

    Args:
        chosen: `(tokens, top_k)` experts from `choice.choose`.
        num_experts: Number of experts.

    >>> plan = plan_dispatch(np.array([[1, 0], [1, 2]]), 3)
    >>> plan.slots.tolist(), plan.counts.tolist(), plan.tokens.tolist()
    ([1, 0, 2, 3], [1, 2, 1], [0, 0, 1, 1])
    """
    flat = np.asarray(chosen).ravel()
    counts = np.bincount(flat, minlength=num_experts)
    if counts.shape[0] != num_experts:
        raise ValueError(
            f"plan_dispatch: expert out of range; got {int(flat.max())!r}; expected "
            f"below {num_experts}; choose among the experts that exist"
        )
    slots = np.argsort(flat, kind="stable").astype(np.int32)
    return DispatchPlan(slots, counts, int(chosen.shape[1]))


def place_slots(
    slots: NDArray[np.int32], rows: NDArray[Any], num_slots: int
) -> NDArray[Any]:
    """Put rows that came back from experts at their slots; every slot exactly once.

    Rows may come in any order: the slot, not the arrival, decides the place.

    Returns:
        `(num_slots, ...)`, the inverse permutation of the dispatch.
    """
    hits = np.bincount(slots, minlength=num_slots)
    if hits.shape[0] != num_slots or not (hits == 1).all():
        raise ValueError(
            f"place_slots: rows do not cover the slots once; got {slots.shape[0]} rows "
            f"for {num_slots} slots; expected each slot exactly once; a block is "
            "missing or was counted twice"
        )
    placed = np.empty((num_slots, *rows.shape[1:]), rows.dtype)
    placed[slots] = rows
    return placed


def combine(expert_rows: jax.Array, weights: jax.Array) -> jax.Array:
    """Sum each token's expert outputs by its routing weights, in choice order.

    Args:
        expert_rows: `(tokens, top_k, d_model)`, placed by slot.
        weights: `(tokens, top_k)`.

    Returns:
        `(tokens, d_model)`.
    """
    total = expert_rows[:, 0] * weights[:, :1]
    for index in range(1, expert_rows.shape[1]):
        total = total + expert_rows[:, index] * weights[:, index : index + 1]
    return total
