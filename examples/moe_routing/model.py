"""The language model in three parts, each a pure JAX function with its own weights.

The first reads a window of bytes, experts transform the rows that they are sent, the
head predicts the next byte. The dense reference composes them in one program; the
dataflow puts exchanges between them.
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


def init_embed(settings: Settings) -> Params:
    """Draw the weights of embedding and router, the same wherever it is called."""
    rng = np.random.default_rng([settings.seed, 1])
    joined = settings.window * settings.d_byte
    return {
        "table": _normal(rng, (BYTES, settings.d_byte), 1.0),
        "mix": _normal(rng, (joined, settings.d_model), joined**-0.5),
        "router": _normal(
            rng, (settings.d_model, settings.num_experts), settings.d_model**-0.5
        ),
    }


def init_expert(settings: Settings, expert: int) -> Params:
    """Draw the weights of one expert."""
    rng = np.random.default_rng([settings.seed, 2, expert])
    d_model, d_ff = settings.d_model, settings.d_ff
    return {
        "gate_up": _normal(rng, (d_model, 2 * d_ff), d_model**-0.5),
        "down": _normal(rng, (d_ff, d_model), d_ff**-0.5),
    }


def init_head(settings: Settings) -> Params:
    """Draw the weights of the output head."""
    rng = np.random.default_rng([settings.seed, 3])
    return {
        "out": _normal(rng, (settings.d_model, BYTES), 0.5 * settings.d_model**-0.5),
        "bias": np.zeros(BYTES, np.float32),
    }


def init_all(settings: Settings) -> dict[str, Any]:
    """Draw the weights of all parts; experts are stacked along a leading axis."""
    experts = [init_expert(settings, index) for index in range(settings.num_experts)]
    return {
        "embed": init_embed(settings),
        "experts": jax.tree.map(lambda *leaves: np.stack(leaves), *experts),
        "head": init_head(settings),
    }


def _normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> Any:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def normalise(rows: jax.Array) -> jax.Array:
    """Scale rows to unit root mean square."""
    return rows * jax.lax.rsqrt(jnp.mean(rows**2, axis=-1, keepdims=True) + 1e-6)


def hidden_of(params: Params, context: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Embed windows of bytes.

    Args:
        params: Weights of `init_embed`.
        context: `(tokens, window) uint8`, oldest byte first.

    Returns:
        The residual `(tokens, d_model)` and what experts read, its normalised form.
    """
    embedded = params["table"][context]  # (tokens, window, d_byte)
    joined = embedded.reshape(context.shape[0], -1)
    residual = jax.nn.gelu(joined @ params["mix"])
    return residual, normalise(residual)


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
        params: Weights of `init_head`.
        residual: `(tokens, d_model)`.
        mixed: `(tokens, d_model)`, what the experts gave.
        target: `(tokens,) uint8`.
    """
    hidden = normalise(residual + mixed)
    logits = hidden @ params["out"] + params["bias"]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, target.astype(jnp.int32)
    )
    return (jnp.sum(losses) / settings.batch)[None]


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
