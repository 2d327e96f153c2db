"""Pickling of what JAX makes of functions, where they travel as code.

JAX's own objects do not come back, or not at all: unpickling a `jax.custom_vjp` makes one
without its function, which its constructor refuses, and a jitted function drags what JAX
has compiled along. Each is made again by the public function that made it.
"""

from __future__ import annotations

from typing import Any

import jax

from timelyml.ml.jax_private import UNSPECIFIED

_JITTED: Any = type(jax.jit(lambda: None))
_OPTIONS = "static_argnums", "static_argnames", "donate_argnums", "donate_argnames"


def reduce(value: Any) -> Any:
    """Return how a value is made again, as `__reduce__` would, or NotImplemented.

    Shardings that a jitted function names itself may hold devices, which do not travel.
    """
    if type(value) is jax.custom_vjp:
        return _custom_vjp, (), dict(vars(value))
    if type(value) is _JITTED:
        info = value._jit_info  # noqa: SLF001 - nothing public tells of the options
        given = {*info.in_shardings_leaves, *info.out_shardings_leaves}
        if info.device is None and given <= {UNSPECIFIED}:
            options = {name: getattr(info, name) for name in _OPTIONS}
            return _jitted, (value.__wrapped__, options)
    return NotImplemented


def _custom_vjp() -> Any:
    """Return one that has nothing yet; what it has follows, as it may refer to itself."""
    return object.__new__(jax.custom_vjp)


def _jitted(fun: Any, options: dict[str, Any]) -> Any:
    return jax.jit(fun, **options)
