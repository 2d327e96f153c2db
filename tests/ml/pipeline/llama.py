"""The language model of the golden files, in stages: plain JAX, none of our code."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

GOLDEN = Path(__file__).parents[2] / "golden"
NUM_LAYERS, HEADS, KEY_HEADS, HEAD_DIM = 4, 4, 2, 6


def golden(name):
    with np.load(GOLDEN / f"llama_untied_{name}.npz") as file:
        return {key: file[key] for key in file.files}


def norm(weight, x):
    return weight * x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def rotate(x):
    """Rotary embedding in halves, base 10,000; `x` is (batch, heads, length, dim)."""
    length, dim = x.shape[-2:]
    rates = 10_000.0 ** (-np.arange(0, dim, 2) / dim)
    angles = np.outer(np.arange(length), np.concatenate([rates, rates]))
    cos, sin = np.float32(np.cos(angles)), np.float32(np.sin(angles))
    first, second = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-second, first], -1) * sin


def attention(w, x):
    batch, length, _ = x.shape

    def heads(name, count):
        flat = x @ w[f"self_attn.{name}_proj.weight"].T
        return flat.reshape(batch, length, count, HEAD_DIM).transpose(0, 2, 1, 3)

    query, key = rotate(heads("q", HEADS)), rotate(heads("k", KEY_HEADS))
    groups = HEADS // KEY_HEADS
    key = jnp.repeat(key, groups, 1)
    value = jnp.repeat(heads("v", KEY_HEADS), groups, 1)
    scores = query @ key.transpose(0, 1, 3, 2) / HEAD_DIM**0.5
    causal = np.tril(np.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), -1)
    joined = (weights @ value).transpose(0, 2, 1, 3).reshape(batch, length, -1)
    return joined @ w["self_attn.o_proj.weight"].T


def block(w, x):
    x = x + attention(w, norm(w["input_layernorm.weight"], x))
    h = norm(w["post_attention_layernorm.weight"], x)
    gate = jax.nn.silu(h @ w["mlp.gate_proj.weight"].T)
    return x + (gate * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


def stage(params, x):
    """Layers `params["layers"]`, after the embedding and before the head if it has them."""
    if "embed" in params:
        x = params["embed"][x]
    for layer in params["layers"]:
        x = block(layer, x)
    if "head" in params:
        x = norm(params["norm"], x) @ params["head"].T
    return x


def loss_fn(logits, labels):
    """Cross-entropy of the next token, summed; labels below 0 do not count."""
    target, logits = labels[:, 1:], logits[:, :-1]
    counts = target >= 0
    chosen = jnp.take_along_axis(
        jax.nn.log_softmax(logits), jnp.maximum(target, 0)[..., None], -1
    )
    return -jnp.sum(jnp.where(counts, chosen[..., 0], 0.0)), jnp.sum(counts)


def stages_of(weights, num_stages, prefix="w_"):
    """Return the weights of each of so many stages of equal length."""
    each = NUM_LAYERS // num_stages
    cut = []
    for index in range(num_stages):
        layers = []
        for layer in range(index * each, (index + 1) * each):
            start = f"{prefix}model.layers.{layer}."
            layers.append(
                {k[len(start) :]: v for k, v in weights.items() if k.startswith(start)}
            )
        cut.append({"layers": layers})
    cut[0]["embed"] = weights[f"{prefix}model.embed_tokens.weight"]
    cut[-1]["norm"] = weights[f"{prefix}model.norm.weight"]
    cut[-1]["head"] = weights[f"{prefix}lm_head.weight"]
    return cut


def whole_loss(params, tokens, labels):
    """The loss of the model in one piece."""
    x = tokens
    for each in params:
        x = stage(each, x)
    total, count = loss_fn(x, labels)
    return total / count
