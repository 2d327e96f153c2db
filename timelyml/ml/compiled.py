"""Functions that JAX compiles once per worker, and that can be shipped to it.

The compiled form stays behind when the function travels: a worker compiles its own
copy at the first call, and once per shape after that. Functions that a worker
imports stay compiled for all its later runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from timelyml.errors import ConfigError


class Compiled:
    """A pure function that runs jitted; `compiled(fn)` makes one.

    It is called with arrays or pytrees of arrays and gives JAX arrays, which may
    not be ready yet. An argument at a donated position must not be used again.
    """

    __slots__ = ("_donate", "_jitted", "function", "sizes")

    def __init__(
        self, function: Callable[..., Any], donate: tuple[int, ...] = ()
    ) -> None:
        self.function = function
        self._donate = donate
        self._jitted: Any = None
        self.sizes: set[tuple[int, ...]] = set()
        """Numbers of rows that `on_rows` was called for: each is compiled once."""

    @property
    def name(self) -> str:
        """The name of the function, for traces and errors."""
        inner = getattr(self.function, "func", self.function)  # of a partial
        return str(getattr(inner, "__name__", "function"))

    def __call__(self, *arguments: Any) -> Any:
        """Run the function on the worker's device."""
        if self._jitted is None:
            self._jitted = _jit(self.function, self._donate)
        return self._jitted(*arguments)

    def on_rows(self, sizes: tuple[int, ...], *arguments: Any) -> Any:
        """Run the function on padded rows, if any are, and note how many there are."""
        if sizes:
            self.sizes.add(sizes)
        return self(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel without the compiled form, which belongs to a process."""
        return Compiled, (self.function, self._donate)


def compiled(
    function: Callable[..., Any] | Compiled, *, donate: tuple[int, ...] = ()
) -> Compiled:
    """Wrap a pure function of arrays so that each worker compiles it once.

    Args:
        function: Takes and gives arrays or pytrees of arrays; `functools.partial`
            binds what is not an array. If that can be hashed, copies of the function
            that reach one worker share what is compiled.
        donate: Positions of arguments whose memory the result may reuse, such as
            the state of an optimiser.

    Raises:
        ConfigError: `function` cannot be called.

    >>> double = compiled(lambda x: x * 2)
    >>> float(double(3.0)), compiled(double) is double
    (6.0, True)
    """
    if isinstance(function, Compiled):
        return function
    if not callable(function):
        raise ConfigError(
            f"compiled: not a function; got {function!r}; expected a callable of "
            "arrays; pass the function itself, not its result",
            option="function",
        )
    return Compiled(function, donate)


def _jit(function: Callable[..., Any], donate: tuple[int, ...]) -> Any:
    """Jit a function; what a partial binds becomes static.

    JAX keeps what it compiled by the identity of the function and by the values of
    static arguments. A partial is another object in every copy of a graph, the
    function inside is the same.
    """
    if isinstance(function, functools.partial) and not function.keywords:
        bound = function.args
        try:
            hash(bound)
        except TypeError:
            return jax.jit(function, donate_argnums=donate)
        jitted = jax.jit(
            function.func,
            static_argnums=tuple(range(len(bound))),
            donate_argnums=tuple(len(bound) + position for position in donate),
        )
        return functools.partial(jitted, *bound)
    return jax.jit(function, donate_argnums=donate)
