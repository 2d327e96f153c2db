"""A decoder-only Transformer over bytes, as a row of layers with weights of their own.

Each layer is a pure function `layer(params, x) -> y`: nothing here knows of stages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.pipeline.config import Settings

Params = Mapping[str, Any]
BYTES = 256


def embed(params: Params, tokens: jax.Array) -> jax.Array:
    """Look bytes up: `(batch, length) -> (batch, length, d_model)`."""
    return jnp.take(jnp.asarray(params["table"]), tokens, axis=0)


def block(heads: int, params: Params, x: jax.Array) -> jax.Array:
    """Attend to what came before, then transform each position."""
    x = x + attention(heads, params, normalise(x) * params["norm_attention"])
    hidden = normalise(x) * params["norm_mlp"]
    gate, up = jnp.split(hidden @ params["gate_up"], 2, axis=-1)
    return x + jnp.dot(jax.nn.silu(gate) * up, params["down"])


def attention(heads: int, params: Params, x: jax.Array) -> jax.Array:
    """Causal attention with rotary positions; `x` is `(batch, length, d_model)`."""
    batch, length, d_model = x.shape
    joined = (x @ params["qkv"]).reshape(batch, length, 3, heads, d_model // heads)
    # (batch, heads, length, d_head) each
    query, key, value = joined.transpose(2, 0, 3, 1, 4)
    scores = rotate(query) @ rotate(key).swapaxes(-1, -2) / (d_model // heads) ** 0.5
    causal = np.tril(np.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    mixed = (weights @ value).transpose(0, 2, 1, 3).reshape(batch, length, d_model)
    return jnp.dot(mixed, params["out"])


def rotate(x: jax.Array) -> jax.Array:
    """Turn pairs of features by angles that grow with the position."""
    length, width = x.shape[-2:]
    rates = 10_000.0 ** (-np.arange(0, width, 2) / width)
    angles = np.outer(np.arange(length), rates)
    cos, sin = np.float32(np.cos(angles)), np.float32(np.sin(angles))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, first * sin + second * cos], axis=-1
    )


def head(params: Params, x: jax.Array) -> jax.Array:
    """Score the next byte: `(batch, length, 256)`."""
    return jnp.dot(normalise(x) * params["norm"], jnp.asarray(params["table"]).T)


def normalise(x: jax.Array) -> jax.Array:
    """Scale rows to unit root mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def loss_fn(logits: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum the cross-entropy in nats over all bytes that count, and count them.

    Bytes of 0 stand for the beginning of a file and do not count, so microbatches count
    unequally much.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    counts = target > 0
    return jnp.sum(jnp.where(counts, losses, 0.0)), jnp.sum(counts)


def layers_of(settings: Settings) -> list[Callable[[Any, Any], Any]]:
    """Give the layers in order; blocks are one function."""
    one = functools.partial(block, settings.heads)
    return [embed, *[one] * settings.layers, head]


def init(settings: Settings) -> list[Params]:
    """Draw the weights of all layers."""
    rng = np.random.default_rng([settings.seed, 1])
    d_model = settings.d_model
    table = _normal(rng, (BYTES, d_model), 0.5)
    top = table if settings.is_tied else _normal(rng, (BYTES, d_model), d_model**-0.5)
    blocks = [_init_block(rng, settings) for _ in range(settings.layers)]
    return [{"table": table}, *blocks, {"norm": _ones(d_model), "table": top}]


def _init_block(rng: np.random.Generator, settings: Settings) -> Params:
    d_model, d_ff = settings.d_model, 2 * settings.d_model
    depth = (2 * settings.layers) ** -0.5  # so that the residual stays of one size
    return {
        "norm_attention": _ones(d_model),
        "norm_mlp": _ones(d_model),
        "qkv": _normal(rng, (d_model, 3 * d_model), d_model**-0.5),
        "out": _normal(rng, (d_model, d_model), d_model**-0.5 * depth),
        "gate_up": _normal(rng, (d_model, 2 * d_ff), d_model**-0.5),
        "down": _normal(rng, (d_ff, d_model), d_ff**-0.5 * depth),
    }


def _normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> Any:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def _ones(size: int) -> Any:
    return np.ones(size, np.float32)


def optimiser(settings: Settings) -> optax.GradientTransformation:
    """Give Adam with a warm-up and a cosine decay over the run's steps."""
    schedule = optax.warmup_cosine_decay_schedule(
        settings.learning_rate / settings.warmup_steps,
        settings.learning_rate,
        settings.warmup_steps,
        max(settings.steps, settings.warmup_steps + 1),
        settings.learning_rate * 0.1,
    )
    return optax.adam(schedule, b2=0.98, eps=1e-6)
