"""The options of a compiled function, and which of its arguments are arrays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from timelyml.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """Options as `jax.jit` takes them.

    Shardings are trees of `PartitionSpec`, of shardings that have one, or of None,
    which leaves them open; a tree may stand for all below it.
    """

    in_shardings: Any = None
    out_shardings: Any = None
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of a call: those that are traced, and those that are fixed.

    Attributes:
        args: The traced ones that are given by position.
        kwargs: The traced ones that are given by name.
        static_args: Each fixed one with its position.
        static_kwargs: Each fixed one with its name.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    static_args: tuple[tuple[int, Any], ...]
    static_kwargs: tuple[tuple[str, Any], ...]

    @property
    def fixed(self) -> Arguments:
        """The fixed ones alone."""
        return Arguments((), {}, self.static_args, self.static_kwargs)

    def merge(
        self, args: Iterable[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return all arguments, with others in the place of those that are traced."""
        merged = list(args)
        for position, value in self.static_args:  # ascending, so none moves another
            merged.insert(position, value)
        return merged, {**kwargs, **dict(self.static_kwargs)}


class Splitter:
    """Tells traced arguments from fixed ones, as `jax.jit` does.

    >>> split = Splitter(lambda x, n: x, Options(static_argnames=("n",)))
    >>> split((1.0, 3), {})
    Arguments(args=(1.0,), kwargs={}, static_args=((1, 3),), static_kwargs=())
    """

    __slots__ = ("_names", "_nums")

    def __init__(self, fun: Callable[..., Any], options: Options) -> None:
        nums, names = set(options.static_argnums), set(options.static_argnames)
        positions = _positions_by_name(fun)
        nums |= {positions[name] for name in names if name in positions}
        names |= {name for name, position in positions.items() if position in nums}
        self._nums, self._names = nums, names

    @property
    def has_static(self) -> bool:
        """Whether any argument may be fixed."""
        return bool(self._nums or self._names)

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Split the arguments of a call."""
        if not self.has_static:
            return Arguments(args, dict(kwargs), (), ())
        fixed = {
            each % len(args) for each in self._nums if -len(args) <= each < len(args)
        }
        return Arguments(
            tuple(each for i, each in enumerate(args) if i not in fixed),
            {name: each for name, each in kwargs.items() if name not in self._names},
            tuple((i, args[i]) for i in sorted(fixed)),
            tuple((n, each) for n, each in sorted(kwargs.items()) if n in self._names),
        )


def as_options(
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Iterable[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    deadline_s: float | None = None,
) -> Options:
    """Return options from what `jax.jit` accepts for them.

    Raises:
        ConfigError: A position is no int, a name no string, or a deadline no time.
    """
    is_time = isinstance(deadline_s, int | float) and deadline_s > 0
    if deadline_s is not None and not is_time:
        raise ConfigError(
            f"deadline_s cannot be kept; got {deadline_s!r}; expected seconds above 0, or "
            f"None for as long as it takes",
            option="deadline_s",
        )
    return Options(
        in_shardings,
        out_shardings,
        _several("static_argnums", static_argnums, int),
        _several("static_argnames", static_argnames, str),
        _several("donate_argnums", donate_argnums, int),
        _several("donate_argnames", donate_argnames, str),
        deadline_s,
    )


def _several(option: str, given: Any, kind: type) -> tuple[Any, ...]:
    if given is None:
        return ()
    found = (given,) if isinstance(given, (int, str)) else tuple(given)
    if any(not isinstance(each, kind) for each in found):
        raise ConfigError(
            f"{option} cannot be used; got {given!r}; expected {kind.__name__} values; "
            f"give one or a tuple of them",
            option=option,
        )
    return found


def _positions_by_name(fun: Callable[..., Any]) -> dict[str, int]:
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # some builtins have none
        return {}
    both = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return {each.name: i for i, each in enumerate(parameters) if each.kind == both}
