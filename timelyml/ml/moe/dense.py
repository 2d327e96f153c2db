"""A layer in one program without dispatch: what every sharded layer must equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from timelyml.ml.choice import count_choices
from timelyml.ml.moe.dispatch import combine
from timelyml.ml.moe.experts import ExpertFn, expert_forward, shared_forward
from timelyml.ml.moe.noise import Noise
from timelyml.ml.moe.router import Routed, Router
from timelyml.ml.moe.rules import Choice


def moe_dense(
    params: Mapping[str, Any],
    rows: jax.Array,
    router: Router,
    *,
    expert_fn: ExpertFn = expert_forward,
    bias: jax.Array | None = None,
    valid: jax.Array | None = None,
    capacity: jax.Array | int | None = None,
    noise: Noise | None = None,
    replay: Choice | None = None,
) -> tuple[jax.Array, Routed]:
    """Apply a mixture-of-experts layer, every expert on every token.

    Differentiable by JAX as it stands. Parameters of an expert without tokens get a
    gradient of exactly zero, even if they hold NaN.

    Args:
        params: `router` and perhaps `router_bias`, see `Router.logits`; `experts`, a
            tree whose leaves have a leading axis of experts; perhaps `shared`, see
            `shared_forward`.
        rows: `(tokens, d_model)`.
        router: How tokens find experts.
        expert_fn: Applied to each expert's parameters and `(tokens, d_model)`.
        bias: See `Router`, as all that follows.
        valid: False for padding.
        capacity: Overrides that of the router.
        noise: Seen by the router only.
        replay: A stored choice.

    Returns:
        `(tokens, d_model)` of the dtype of `rows`, zero for a token that was dropped
        everywhere (a residual is added outside); and what the router gave.
    """
    routed = router(
        params,
        rows,
        bias=bias,
        valid=valid,
        capacity=capacity,
        noise=noise,
        replay=replay,
    )
    output = _mix(params["experts"], rows, router, routed, expert_fn)
    if "shared" in params:
        output = output + shared_forward(params["shared"], rows)
    return output.astype(rows.dtype), routed


def _mix(
    experts: Any, rows: jax.Array, router: Router, routed: Routed, expert_fn: ExpertFn
) -> jax.Array:
    chosen, kept = routed.choice.chosen, routed.choice.kept
    num_experts = routed.sums.counts.shape[0]
    loads = count_choices(chosen, num_experts, where=kept)
    # (experts, tokens, top_k): which pair is whose
    pairs = (chosen == jnp.arange(num_experts)[:, None, None]) & kept
    visits = jnp.any(pairs, axis=2)  # (experts, tokens)
    inputs = jnp.broadcast_to(rows, (num_experts, *rows.shape))
    weights = routed.weights
    if router.rule.weighs_input:
        scales = jnp.sum(jnp.where(pairs, weights, 0), axis=2)
        inputs = inputs * scales[:, :, None].astype(rows.dtype)
        weights = kept.astype(weights.dtype)
    inputs = jnp.where(visits[:, :, None], inputs, 0)
    live = jax.tree.map(lambda leaf: _where_first(loads > 0, leaf), experts)
    outputs = jax.vmap(expert_fn)(live, inputs)  # (experts, tokens, d_model)
    tokens = jnp.arange(rows.shape[0])[:, None]
    picked = jnp.where(kept[:, :, None], outputs[chosen, tokens], 0)
    return combine(picked, weights)  # picked: (tokens, top_k, d_model)


def _where_first(mask: jax.Array, leaf: jax.Array) -> jax.Array:
    """Zero the entries of a leading axis; `where` keeps NaN out of the gradient."""
    return jnp.where(mask.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, 0)
