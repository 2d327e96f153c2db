"""The language model in three parts, each a pure JAX function with its own weights.

`embed` reads a window of bytes and chooses experts, an expert transforms the rows
it is sent, `head` combines and predicts the next byte. The dense reference composes
them in one program; the dataflow puts exchanges between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.moe_routing.config import Settings
from timelyml.ml.choice import balance_loss, choose, count_choices, routing_weights
from timelyml.ml.moe import combine

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


def embed(settings: Settings, params: Params, context: jax.Array) -> dict[str, Any]:
    """Embed and route one shard's tokens: the forward pass before the experts."""
    residual, rows = hidden_of(params, context)
    logits = rows @ params["router"]
    chosen = choose(logits, settings.top_k)
    return {
        "residual": residual,
        "rows": rows,
        "chosen": chosen,
        "weights": weights_of(settings, logits, chosen),
        "counts": count_choices(chosen, settings.num_experts),
        "probability_sums": jnp.sum(jax.nn.softmax(logits), axis=0),
    }


def weights_of(settings: Settings, logits: jax.Array, chosen: jax.Array) -> jax.Array:
    """Weigh chosen experts; a single one keeps its probability, or nothing learns."""
    return routing_weights(logits, chosen, renormalise=settings.top_k > 1)


def embed_outputs(
    settings: Settings, params: Params, context: jax.Array, chosen: jax.Array
) -> tuple[jax.Array, ...]:
    """Give the differentiable outputs of `embed`, replaying a choice once made."""
    residual, rows = hidden_of(params, context)
    logits = rows @ params["router"]
    weights = weights_of(settings, logits, chosen)
    return residual, rows, weights, jnp.sum(jax.nn.softmax(logits), axis=0)


def head_loss(
    settings: Settings,
    params: Params,
    routed: Mapping[str, Any],
    expert_rows: jax.Array,
    target: jax.Array,
) -> jax.Array:
    """Give this shard's part of the batch's mean cross-entropy, in nats.

    Args:
        settings: The whole batch is the denominator, so parts add up to the mean.
        params: Weights of `init_head`.
        routed: `residual` `(tokens, d_model)` and `weights` `(tokens, top_k)`.
        expert_rows: `(tokens, top_k, d_model)`, in choice order.
        target: `(tokens,) uint8`.
    """
    hidden = normalise(routed["residual"] + combine(expert_rows, routed["weights"]))
    logits = hidden @ params["out"] + params["bias"]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, target.astype(jnp.int32)
    )
    return jnp.sum(losses) / settings.batch


def balance_of(
    settings: Settings, counts: jax.Array, probability_sums: jax.Array
) -> jax.Array:
    """Give the weighted load-balance loss from sums over the whole batch."""
    loss = balance_loss(counts, probability_sums, settings.batch)
    return settings.balance * loss / settings.top_k


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
