"""Small Transformers to be trained, and their training step as one JAX function.

The model is that of `examples.pipeline`; text is drawn at random, since only the time of
a step is measured here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.pipeline import model
from examples.pipeline.config import Settings

Step = Callable[[Any, Any, Any, Any], Any]


def settings_of(
    *, d_model: int, layers: int, batch: int, length: int = 64, heads: int = 4
) -> Settings:
    """Return the settings of a model and its batch."""
    return Settings(
        stages=1,
        islands=1,
        microbatches=1,
        d_model=d_model,
        layers=layers,
        batch=batch,
        length=length,
        heads=heads,
    )


BY_STEP: dict[str, Settings] = {
    "20": settings_of(d_model=64, layers=4, batch=20, length=32),
    "100": settings_of(d_model=128, layers=4, batch=24),
    "500": settings_of(d_model=256, layers=4, batch=32),
    "tiny": settings_of(d_model=16, layers=1, batch=8, length=8),
}
"""By about how many milliseconds a step takes on two cores; `tiny` is for smoke tests."""

ROWS = 8  # of a microbatch
PIPELINED: dict[int, Settings] = {
    2: settings_of(d_model=16, layers=2, batch=8 * ROWS, length=8),
    4: settings_of(d_model=128, layers=8, batch=16 * ROWS),
    8: settings_of(d_model=128, layers=8, batch=32 * ROWS),
}
"""By the number of stages: four microbatches for each; 2 is for smoke tests."""

ISLANDS = settings_of(d_model=128, layers=4, batch=128)
TINY_ISLANDS = settings_of(d_model=16, layers=2, batch=8, length=8)


def named(name: str) -> Settings:
    """Return settings by what a peer is asked for: a step's length, or "pipe" and S."""
    if name.startswith("pipe"):
        return PIPELINED[int(name.removeprefix("pipe"))]
    return BY_STEP[name]


def batch_of(settings: Settings) -> tuple[Any, Any]:
    """Draw inputs and targets `(batch, length) int32`."""
    rng = np.random.default_rng(settings.seed)
    shape = settings.batch, settings.length + 1
    rows = rng.integers(1, model.BYTES, shape).astype(np.int32)
    return rows[:, :-1], rows[:, 1:]


def step_of(settings: Settings, optimiser: optax.GradientTransformation) -> Step:
    """Return `(params, state, tokens, target) -> (params, state, loss)`."""
    layers = model.layers_of(settings)

    def loss(params: Any, tokens: Any, target: Any) -> Any:
        x = tokens
        for layer, weights in zip(layers, params, strict=True):
            x = layer(weights, x)
        total, count = model.loss_fn(x, target)
        return total / jnp.maximum(count, 1)

    def step(params: Any, state: Any, tokens: Any, target: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens, target)
        changes, state = optimiser.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, value

    return step
