"""The language model in parts, each a pure JAX function with its own weights.

A decoder-only Transformer over bytes: in each layer attention, then experts. `begin` looks
bytes up and attends, `go_on` adds what the experts of one layer gave and attends in the
next, `head_loss` adds the last ones and predicts the next bytes. Between the parts are the
experts. The dense reference composes them in one program; the dataflow puts exchanges
there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.moe_routing.config import Settings

Params = Mapping[str, Any]
BYTES = 256
SEEN = 4
"""Last bytes that are looked up at each place, each in a table of its own."""


def init_all(settings: Settings) -> dict[str, Any]:
    """Draw all weights, the same wherever it is called; experts are stacked."""
    rng = np.random.default_rng([settings.seed, 1])
    d_model = settings.d_model
    return {
        "table": _normal(rng, (SEEN, BYTES, d_model), SEEN**-0.5),
        "layers": [init_layer(settings, index) for index in range(settings.layers)],
        "head": {
            "out": _normal(rng, (d_model, BYTES), 0.5 * d_model**-0.5),
            "bias": np.zeros(BYTES, np.float32),
        },
    }


def init_layer(settings: Settings, index: int) -> dict[str, Any]:
    """Draw the weights of one layer."""
    rng = np.random.default_rng([settings.seed, 2, index])
    d_model, d_ff, experts = settings.d_model, settings.d_ff, settings.num_experts
    scale = d_model**-0.5
    return {
        "attention": {
            "qkv": _normal(rng, (d_model, 3 * d_model), scale),
            "out": _normal(rng, (d_model, d_model), scale),
        },
        "moe": {
            "router": _normal(rng, (d_model, experts), scale),
            "experts": {
                "gate_up": _normal(rng, (experts, d_model, 2 * d_ff), scale),
                "down": _normal(rng, (experts, d_ff, d_model), d_ff**-0.5),
            },
        },
    }


def _normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> Any:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def normalise(rows: jax.Array) -> jax.Array:
    """Scale rows to unit root mean square."""
    return rows * jax.lax.rsqrt(jnp.mean(rows**2, axis=-1, keepdims=True) + 1e-6)


def begin(
    settings: Settings, table: jax.Array, attention: Params, context: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Look the last bytes at each place up, and attend.

    Args:
        settings: Sizes.
        table: `(SEEN, 256, d_model)`.
        attention: Of the first layer.
        context: `(sequences, window) uint8`.

    Returns:
        The residual `(sequences * window, d_model)`, and what experts read of it.
    """
    padded = jnp.pad(context, ((0, 0), (SEEN - 1, 0)))
    found = [
        table[back, padded[:, SEEN - 1 - back : padded.shape[1] - back]]
        for back in range(SEEN)
    ]
    residual = jnp.sum(jnp.stack(found), axis=0)
    return attend(settings, attention, residual.reshape(-1, settings.d_model))


def go_on(
    settings: Settings, attention: Params, residual: jax.Array, mixed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Add what the experts of the layer before gave, and attend; see `begin`."""
    return attend(settings, attention, residual + mixed)


def attend(
    settings: Settings, params: Params, residual: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Add causal attention with rotary positions to the residual, sequence by sequence."""
    heads, window, d_model = settings.heads, settings.window, settings.d_model
    joined = normalise(residual) @ params["qkv"]
    split = joined.reshape(-1, window, 3, heads, d_model // heads)
    # (sequences, heads, window, d_head) each
    query, key, value = (split[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    query, key = _rotated(query), _rotated(key)
    scores = query @ key.transpose(0, 1, 3, 2) * (d_model // heads) ** -0.5
    scores = jnp.where(np.tri(window, dtype=bool), scores, -1e30)
    mixed = (jax.nn.softmax(scores) @ value).transpose(0, 2, 1, 3)
    residual = residual + mixed.reshape(-1, d_model) @ params["out"]
    return residual, normalise(residual)


def _rotated(rows: jax.Array) -> jax.Array:
    """Turn pairs of features by the position; `(.., window, d_head)`."""
    window, half = rows.shape[-2], rows.shape[-1] // 2
    rates = 10_000.0 ** (-np.arange(half) / half)
    angles = (np.arange(window)[:, None] * rates).astype(np.float32)
    cosine, sine = np.cos(angles), np.sin(angles)
    first, second = rows[..., :half], rows[..., half:]
    return jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )


def logits_of(params: Params, residual: jax.Array, mixed: jax.Array) -> jax.Array:
    """Score the next byte after each; `(rows, 256)`."""
    scores: jax.Array = normalise(residual + mixed) @ params["out"] + params["bias"]
    return scores


def head_loss(
    settings: Settings,
    params: Params,
    residual: jax.Array,
    mixed: jax.Array,
    target: jax.Array,
) -> jax.Array:
    """Give this shard's part of the batch's mean cross-entropy, in nats, `(1,)`.

    Args:
        settings: The whole batch is the denominator, so parts add up to the mean.
        params: Of the head.
        residual: `(sequences * window, d_model)`.
        mixed: Of the same shape, what the last experts gave.
        target: `(sequences, window) uint8`.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits_of(params, residual, mixed), target.reshape(-1).astype(jnp.int32)
    )
    return (jnp.sum(losses) / settings.tokens)[None]


def optimiser(settings: Settings) -> optax.GradientTransformation:
    """Give Adam with a warm-up and a cosine decay over the run's steps."""
    schedule = optax.warmup_cosine_decay_schedule(
        settings.learning_rate / settings.warmup_steps,
        settings.learning_rate,
        settings.warmup_steps,
        max(settings.steps, settings.warmup_steps + 1),
        settings.learning_rate * 0.05,
    )
    return optax.adam(schedule, b2=0.99, eps=1e-6)
