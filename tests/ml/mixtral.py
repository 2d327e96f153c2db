"""The parts of a small Mixtral language model that are not its experts."""

import jax
import jax.numpy as jnp

LAYERS, HEADS, KEY_HEADS, WIDTH = 2, 2, 1, 8
EPSILON, THETA = 1e-5, 1e6


def normalise(rows, weight):
    mean = jnp.mean(rows**2, axis=-1, keepdims=True)
    return rows * jax.lax.rsqrt(mean + EPSILON) * weight


def rotate(heads):
    """Rotary positions over `(batch, length, heads, width)`, in halves."""
    half = WIDTH // 2
    rates = THETA ** (-jnp.arange(half) / half)
    angles = jnp.arange(heads.shape[1])[:, None] * rates
    cos, sin = (jnp.tile(f(angles), 2)[:, None] for f in (jnp.cos, jnp.sin))
    turned = jnp.concatenate([-heads[..., half:], heads[..., :half]], axis=-1)
    return heads * cos + turned * sin


def attend(weights, rows):
    batch, length, _ = rows.shape

    def project(name, heads):
        flat = rows @ weights[f"self_attn.{name}_proj.weight"].T
        return flat.reshape(batch, length, heads, WIDTH)

    queries, keys = rotate(project("q", HEADS)), rotate(project("k", KEY_HEADS))
    values = project("v", KEY_HEADS)
    keys, values = (jnp.repeat(a, HEADS // KEY_HEADS, axis=2) for a in (keys, values))
    scores = jnp.einsum("bqhw,bkhw->bhqk", queries, keys) * WIDTH**-0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    shares = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("bhqk,bkhw->bqhw", shares, values)
    return mixed.reshape(rows.shape) @ weights["self_attn.o_proj.weight"].T
