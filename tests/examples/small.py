"""A small model and a small text, for the mixture-of-experts example."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from examples.moe_routing.config import Settings

TINY = Settings(
    num_experts=4,
    layers=1,
    heads=2,
    d_model=16,
    d_ff=24,
    window=8,
    batch=8,
    steps=20,
    warmup_steps=4,
    learning_rate=1e-2,
    data_shards=2,
    expert_shards=2,
)
SIZES = {"window": TINY.window, "train_bytes": 1 << 14, "held_out_bytes": 1 << 12}


def write_words(directory: Path) -> Path:
    """Write a few words, over and over, in twelve files; returns the directory."""
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, 5).astype(np.uint8)) for _ in range(30)]
    for index in range(12):
        text = b" ".join(words[word] for word in rng.integers(0, 30, 120))
        (directory / f"{index}.txt").write_bytes(text)
    return directory
