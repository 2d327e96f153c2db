"""Expert functions, and one pass of many experts over rows sorted by expert.

An expert function takes parameters and rows, `(rows, d_model)` to the same shape,
row by row, and is finite on zero rows: padding is zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from timelyml.ml.buckets import bucket_size, pad_rows

ExpertParams = Mapping[str, Any]
"""`gate_up` `(d_model, 2 * d_ff)` and `down` `(d_ff, d_model)`; gate comes first."""

ExpertFn = Callable[[Any, Any], Any]
"""From parameters and rows to rows."""


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
    return pull_of(expert_forward)(params, rows, cotangents)


def relu_expert_forward(params: ExpertParams, rows: jax.Array) -> jax.Array:
    """Apply one plain expert, `relu(rows @ up) @ down`.

    Source:
        Switch Transformer.
    """
    return jnp.matmul(jax.nn.relu(rows @ params["up"]), params["down"])


def shared_forward(params: ExpertParams, rows: jax.Array) -> jax.Array:
    """Apply the shared expert, which sees every token whatever the router says.

    Args:
        params: Of `expert_forward`; with `gate` `(d_model, 1)` the output of each
            token is scaled by `sigmoid(rows @ gate)`.
        rows: `(tokens, d_model)`.

    Source:
        DeepSeek-V3 (not gated), Qwen2-MoE (gated).
    """
    output = expert_forward(params, rows)
    if "gate" not in params:
        return output
    return jax.nn.sigmoid(rows @ params["gate"]) * output


def pull_of(expert_fn: ExpertFn) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """Give the backward pass of an expert function, from its input and cotangents."""

    def pull(params: Any, rows: Any, cotangents: Any) -> tuple[Any, Any]:
        _, back = jax.vjp(expert_fn, params, rows)
        gradients, row_gradients = back(cotangents)
        return gradients, row_gradients

    return pull


def run_experts(
    expert_fn: ExpertFn,
    params: Sequence[Any],
    rows: NDArray[Any],
    counts: NDArray[np.integer[Any]],
) -> NDArray[Any]:
    """Apply each expert to its own run of rows, padded to a bucket; skip empty ones.

    Args:
        expert_fn: Jitted by the caller, who also counts what it compiles.
        params: One tree per expert.
        rows: `(rows, d_model)`, sorted by expert.
        counts: `(experts,)`: how many rows each expert has.

    Returns:
        `(rows, d_model)`, in the same order.
    """
    results = np.empty_like(rows)
    for expert, here in _runs(rows, counts):
        block = rows[here]
        padded = pad_rows(block, bucket_size(len(block)))
        results[here] = np.asarray(expert_fn(params[expert], padded))[: len(block)]
    return results


def run_experts_backward(
    pull: Callable[[Any, Any, Any], tuple[Any, Any]],
    params: Sequence[Any],
    rows: NDArray[Any],
    cotangents: NDArray[Any],
    counts: NDArray[np.integer[Any]],
) -> tuple[list[Any], NDArray[Any]]:
    """Give every expert's gradients and those of the rows; mirrors `run_experts`.

    Args:
        pull: From `pull_of`, jitted by the caller.
        params: One tree per expert.
        rows: The input of the forward pass, sorted by expert.
        cotangents: Gradients of the loss by the output rows, in the same order.
        counts: `(experts,)`.

    Returns:
        One tree per expert, exactly zero and of full shape where it had no rows;
        and `(rows, d_model)`.
    """
    gradients = [
        jax.tree.map(lambda leaf: np.zeros(np.shape(leaf), leaf.dtype), tree)
        for tree in params
    ]
    row_gradients = np.empty_like(rows)
    for expert, here in _runs(rows, counts):
        size = bucket_size(here.stop - here.start)
        got, back = pull(
            params[expert], pad_rows(rows[here], size), pad_rows(cotangents[here], size)
        )
        gradients[expert] = jax.tree.map(np.asarray, got)
        row_gradients[here] = np.asarray(back)[: here.stop - here.start]
    return gradients, row_gradients


def _runs(
    rows: NDArray[Any], counts: NDArray[np.integer[Any]]
) -> list[tuple[int, slice]]:
    """Give each expert that has rows, and where they stand."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.shape[0] else 0
    if total != rows.shape[0]:
        raise ValueError(
            f"run_experts: counts do not cover the rows; got {total} for "
            f"{rows.shape[0]} rows; expected the same; sort rows by the plan"
        )
    return [
        (expert, slice(int(end - count), int(end)))
        for expert, (end, count) in enumerate(zip(ends, counts, strict=True))
        if count
    ]
