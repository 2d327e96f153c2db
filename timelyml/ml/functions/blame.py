"""Errors of traced and of running functions, with the line of the user's that is at fault."""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import jax

from timelyml.errors import ComputationError, TraceError

_NOT_THE_USERS = tuple(
    str(path)
    for path in (
        Path(jax.__file__).parent,
        Path(__file__).resolve().parents[2],
        Path(sysconfig.get_path("stdlib")),
    )
)
_EXPECTED = {
    "function": "JAX code that depends on the shapes of arrays, not on their values",
    "program": "calls of functions that ml.jit compiled, and Python between them",
}
_INSTALLED = str(Path(sysconfig.get_path("purelib")))
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')


def name_of(fun: Callable[..., Any]) -> str:
    """Return the name of a function, for people; also of a partial one.

    >>> name_of(len)
    'len'
    """
    inner = getattr(fun, "func", fun)
    return str(getattr(inner, "__name__", type(inner).__name__))


def trace_error(function: str, error: Exception, kind: str = "function") -> TraceError:
    """Return the error of what cannot be traced, to be raised from `error`."""
    where = _user_line(error.__traceback__)
    reason = f"{type(error).__name__}: {_first_line(error)}"
    return TraceError(
        f"{kind} {function!r} cannot be traced{_at(where)}; got {reason}; expected "
        f"{_EXPECTED[kind]}; see the error this one came from",
        function=function,
        where=where,
    )


def compile_error(
    function: str, error: BaseException, where: str = "", host: str = ""
) -> TraceError:
    """Return the error of a function that XLA refuses, to be raised from `error`.

    Args:
        function: Its name.
        error: What XLA says.
        where: The line that called it.
        host: Which host was to run it.
    """
    who = f"function {function!r}" + (f", called at {where}," if where else "")
    on = f" on host {host}" if host else ""
    return TraceError(
        f"{who} cannot be compiled{on}; got {type(error).__name__}: "
        f"{_first_line(error)}; expected what the devices of its slice can run; see "
        f"the error this one came from",
        function=function,
        where=where,
        host=host,
    )


def check_failure(function: str, message: str, where: str) -> ComputationError:
    """Return the error of a check that did not hold on the device."""
    return ComputationError(
        f"a check in function {function!r} failed{_at(where)}; got {message}",
        function=function,
        where=where,
    )


def callback_failure(function: str, error: BaseException) -> ComputationError:
    """Return the error of a host callback that raised."""
    where = _user_line(error.__traceback__)
    return ComputationError(
        f"function {function!r} failed while it ran{_at(where)}; got "
        f"{type(error).__name__}: {_first_line(error)}",
        function=function,
        where=where,
        traceback_text="".join(traceback.format_exception(error)),
    )


def run_failure(function: str, error: Exception) -> ComputationError:
    """Return the error of a computation that raised while it ran.

    What a host callback raised reaches JAX as text, its traceback included.
    """
    text = str(error)
    frames = [each for each in _FRAME.finditer(text) if _is_users(each["file"])]
    where = _line(*frames[-1].group("file", "line", "name")) if frames else ""
    last = [line for line in text.splitlines() if line and not line.startswith(" ")]
    reason = last[-1] if last and _TRACEBACK in text else _first_line(error)
    return ComputationError(
        f"function {function!r} failed while it ran{_at(where)}; got {reason}",
        function=function,
        where=where,
        traceback_text=text,
    )


def line_text(file: str, line: int, name: str) -> str:
    """Return a line of code for people: `train.py:12 in step`."""
    return _line(file, str(line), name)


def calling_line() -> str:
    """Return the user's line that led to the caller: the innermost on the stack."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - inspect.stack reads files
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return _line(
                frame.f_code.co_filename, str(frame.f_lineno), frame.f_code.co_name
            )
        frame = frame.f_back
    return ""


def _user_line(traceback: TracebackType | None) -> str:
    """The innermost line outside of JAX, this package and the standard library."""
    found = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if _is_users(code.co_filename):
            found = _line(code.co_filename, str(traceback.tb_lineno), code.co_name)
        traceback = traceback.tb_next
    return found


def _is_users(file: str) -> bool:
    if file.startswith(_INSTALLED):
        return not file.startswith(_NOT_THE_USERS[0])
    return not file.startswith(_NOT_THE_USERS) and not file.startswith("<frozen")


def _line(file: str, line: str, name: str) -> str:
    source = linecache.getline(file, int(line)).strip()
    return f"{file}:{line} in {name}" + (f": {source}" if source else "")


def _at(where: str) -> str:
    return f" at {where}" if where else ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
