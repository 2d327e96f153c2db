"""The part of JAX's configuration that travels with a function."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from timelyml.errors import ConfigError
from timelyml.ml.functions.computation import Settings

_DEBUG = "jax_debug_nans", "jax_debug_infs"


def current_settings() -> Settings:
    """Return the settings of the calling thread.

    Raises:
        ConfigError: JAX is to look for NaNs or infinities itself, which workers do not.

    >>> with jax.enable_x64(True):
    ...     current_settings().x64
    True
    """
    x64, matmul_precision, prng_impl, is_threefry_partitionable, *debug = settings_key()
    for name, is_set in zip(_DEBUG, debug, strict=True):
        if is_set:
            raise ConfigError(
                f"a function cannot be compiled for workers with {name}; got it set; "
                f"expected it off, as nobody waits for what is launched; check in the "
                f"function, by checkify.check(jnp.isfinite(x).all(), ...), whose error "
                f"reaches the handles that depend on it",
                option=name,
            )
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
        config.jax_debug_nans,
        config.jax_debug_infs,
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
