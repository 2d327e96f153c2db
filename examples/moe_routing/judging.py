"""What a trained model is worth: bits per byte on held-out text, and text of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from examples.corpus import Corpus
from examples.moe_routing import dense
from examples.moe_routing.config import Settings
from examples.moe_routing.inputs import joined
from examples.moe_routing.ngram import OrderTwo

_JUDGED_ROWS = 32


def judged_windows(
    settings: Settings, corpus: Corpus, num_bytes: int
) -> NDArray[np.uint8]:
    """Draw held-out windows of which the second half is judged.

    Gives `(windows, window + 1)`, fewer where there is less text. In each of them what
    is judged, and the two bytes before it, are of one file.
    """
    half = settings.window // 2
    text = corpus.held_out
    last = np.arange(half + 1, text.num_bytes, half)  # their halves do not overlap
    files = np.searchsorted(text.firsts, [last - half - 1, last], side="right")
    last = last[files[0] == files[1]]
    rng = np.random.default_rng([settings.seed, 2**32])
    wanted = min(len(last), num_bytes // half)
    return joined(text.batch(rng.choice(last, wanted, replace=False)))


def bits_per_byte(settings: Settings, params: Any, windows: NDArray[np.uint8]) -> float:
    """Judge weights on the second halves of windows, in bits."""
    half = settings.window // 2

    @jax.jit
    def nats(params: Any, tokens: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(dense.logits(settings, params, tokens[:, :-1]))
        target = tokens[:, 1:].astype(jnp.int32)
        found = jnp.take_along_axis(scores, target[..., None], axis=-1)
        return -jnp.sum(found[:, -half:], axis=(1, 2))

    padded = np.concatenate([windows, np.zeros_like(windows[:_JUDGED_ROWS])])
    parts = [
        np.asarray(nats(params, padded[start : start + _JUDGED_ROWS]))
        for start in range(0, len(windows), _JUDGED_ROWS)
    ]
    total = float(np.concatenate(parts)[: len(windows)].sum())
    return total / (len(windows) * half) / float(np.log(2))


def rival_bits_per_byte(
    settings: Settings, corpus: Corpus, windows: NDArray[np.uint8]
) -> float:
    """Judge the order-2 model on the very same bytes."""
    half = settings.window // 2
    rows = np.lib.stride_tricks.sliding_window_view(windows, 3, axis=1)[:, -half:]
    flat = rows.reshape(-1, 3)
    return OrderTwo(corpus.train).bits_per_byte(flat[:, :2], flat[:, 2])


def generate(
    settings: Settings,
    params: Any,
    prompt: bytes,
    *,
    num_bytes: int,
    temperature: float = 0.8,
) -> bytes:
    """Continue a text byte by byte; the same bytes for the same seed.

    Args:
        settings: Of the model.
        params: Its weights.
        prompt: What to continue; the model sees its last `window` bytes.
        num_bytes: How many to add.
        temperature: 0 takes the likeliest byte, 1 draws as the model predicts.
    """

    @jax.jit
    def last_scores(params: Any, context: jax.Array) -> jax.Array:
        return dense.logits(settings, params, context[None])[0, -1]

    rng = np.random.default_rng([settings.seed, 2**32 + 1])
    text = bytearray(prompt)
    for _ in range(num_bytes):
        seen = bytes(settings.window) + bytes(text)  # zeros stand for a beginning
        context = np.frombuffer(seen, np.uint8)[-settings.window :]
        scores = np.asarray(last_scores(params, context), np.float64)
        if temperature > 0:
            scores = scores / temperature + rng.gumbel(size=len(scores))
        text.append(int(scores.argmax()))
    return bytes(text[len(prompt) :])
