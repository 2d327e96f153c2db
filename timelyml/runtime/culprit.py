"""Search for the innermost part of an object that some test refuses.

Used to tell a user which captured variable cannot be pickled; knows how functions,
containers and instances hold their parts, and nothing of pickling.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class Culprit:
    """A refused value: the path to it, its type, and why it was refused."""

    path: str
    type_: type
    reason: str

    @property
    def type_name(self) -> str:
        """Name of the type, with its module unless it is a builtin."""
        module, name = self.type_.__module__, self.type_.__qualname__
        return name if module == "builtins" else f"{module}.{name}"


def find_culprit(
    value: object, why_refused: Callable[[object], str | None]
) -> Culprit | None:
    """Follow refused parts inwards; None if `value` itself is accepted.

    >>> find_culprit({"a": [1, "bad"]}, lambda v: "is bad" if "bad" in str(v) else None)
    Culprit(path="['a'][1]", type_=<class 'str'>, reason='is bad')
    """
    reason = why_refused(value)
    if reason is None:
        return None
    path = ""
    seen = {id(value)}
    for _ in range(MAX_DEPTH):
        for step, part in _parts_of(value):
            if id(part) in seen or (inner := why_refused(part)) is None:
                continue
            seen.add(id(part))
            path, value, reason = path + step, part, inner
            break
        else:
            break
    return Culprit(path.removeprefix("."), type(value), reason)


def _parts_of(value: object) -> Iterator[tuple[str, object]]:
    """Yield each part with the text that leads to it."""
    if isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif isinstance(value, functools.partial):
        yield ".func", value.func
        yield from ((f".args[{i}]", part) for i, part in enumerate(value.args))
        yield from ((f".{name}", part) for name, part in value.keywords.items())
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield f".{field.name}", getattr(value, field.name, None)
    elif not isinstance(value, (type, types.ModuleType)):
        attributes = getattr(value, "__dict__", {})
        yield from ((f".{name}", part) for name, part in attributes.items())


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(
        function.__code__.co_freevars, function.__closure__ or (), strict=True
    ):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # a variable that is not yet bound
            continue
    for name in _names_of(function.__code__):
        if name in function.__globals__:
            yield f".{name}", function.__globals__[name]
    for i, default in enumerate(function.__defaults__ or ()):
        yield f".__defaults__[{i}]", default
    for name, default in (function.__kwdefaults__ or {}).items():
        yield f".{name}", default


def _names_of(code: types.CodeType) -> Iterator[str]:
    """Names that the code and the functions inside it look up in their globals."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_of(constant)
