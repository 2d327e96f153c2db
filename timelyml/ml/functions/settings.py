"""The part of JAX's configuration that travels with a function."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from timelyml.ml.functions.computation import Settings


def current_settings() -> Settings:
    """Return the settings of the calling thread.

    >>> with jax.enable_x64(True):
    ...     current_settings().x64
    True
    """
    x64, matmul_precision, prng_impl, is_threefry_partitionable = settings_key()
    return Settings(
        bool(x64), matmul_precision, prng_impl, bool(is_threefry_partitionable)
    )


def settings_key() -> tuple[Any, ...]:
    """Return the same as a plain tuple, which costs a third: every call looks it up."""
    config: Any = jax.config
    return (
        config.jax_enable_x64,
        config.jax_default_matmul_precision,
        config.jax_default_prng_impl,
        config.jax_threefry_partitionable,
    )


@contextlib.contextmanager
def applied(settings: Settings) -> Iterator[None]:
    """Have JAX go by these settings, in the calling thread only."""
    with (
        jax.enable_x64(settings.x64),
        jax.default_matmul_precision(settings.matmul_precision),
        jax.default_prng_impl(settings.prng_impl),
        jax.threefry_partitionable(settings.is_threefry_partitionable),
    ):
        yield
