"""Failures that cross processes: an operator's, with the user's own exception.

The error that a user catches is an `OperatorError` and, where Python allows it, an
instance of the type that the user's function raised too, so that `except KeyError`
works as if the function had been called directly. Its `__cause__` is the user's
exception, and the traceback of the worker is text, in `traceback_text` and a note.
"""

from __future__ import annotations

import contextlib
from typing import Any

from timelyml.errors import (
    ConfigError,
    InvariantError,
    OperatorError,
    RunStoppedError,
    TimelyError,
    summary_of,
)
from timelyml.progress import Timestamp
from timelyml.runtime.shipping import dumps, loads
from timelyml.runtime.tracebacks import user_traceback, with_source_lines

MAX_ERROR_BYTES = 16 << 20  # of one error that crosses processes

ROUTING_NOTE = "raised while rows were routed to "  # and a name; the sender fails

# Attributes of the user's exception that must not replace ours or Python's own.
_RESERVED = frozenset({"args", "values", "__notes__"})
_PLAIN = frozenset({int, str, tuple, type(None)})


def operator_failure(
    cause: BaseException,
    *,
    operator: str,
    worker: int,
    shard: int | None,
    time: Timestamp | None,
    what: str = "failed",
) -> OperatorError:
    """Wrap what a user's function raised; call it where the traceback is alive.

    Args:
        cause: What was raised.
        operator: Name of the operator.
        worker: Index of the worker where it was.
        shard: Index of the shard, if it was one.
        time: Timestamp of what was processed, if anything was.
        what: What the operator did, between its name and the place.
    """
    text = user_traceback(cause)
    where = f"worker {worker}"
    if shard is not None:
        where += f", shard {shard}"
    if time is not None:
        where += f", at time {time!r}"
    _, note, rest = text.rpartition(ROUTING_NOTE)  # asking `cause` runs user code
    if note:
        name, _, _ = rest.partition("\n")
        where += f", while rows were routed to {name}"
    msg = f"operator {operator!r} {what} on {where}: {summary_of(cause)}"
    values = {
        "operator": operator,
        "worker": worker,
        "shard": shard,
        "time": time,
        "traceback_text": text,
    }
    return make_operator_error(msg, values, cause)


def own_failure(who: str, error: BaseException) -> TimelyError:
    """Return an error of ours as it is, and any other as a bug of `who`."""
    if isinstance(error, TimelyError):
        return error
    failure = InvariantError(
        f"{who} failed; got {summary_of(error)}; expected only operators to fail; "
        "report it, as this is a bug"
    )
    failure.__cause__ = error
    return failure


def make_operator_error(
    message: str, values: dict[str, Any], cause: BaseException | None
) -> OperatorError:
    """Build an `OperatorError` that is also of the type of `cause`, if possible."""
    if text := values.get("traceback_text"):
        values = {**values, "traceback_text": with_source_lines(text)}
    # An exit is no failure to be caught by type: SystemExit would end the driver.
    if isinstance(cause, Exception):
        with contextlib.suppress(BaseException):  # it cannot be combined, or is odd
            return _told(_instance_of_both(message, values, cause), cause)
    return _told(OperatorFailureError(message, **values), cause)


def _told(error: OperatorError, cause: BaseException | None) -> OperatorError:
    """Let an error say where it comes from."""
    error.__cause__ = cause
    if text := error.values.get("traceback_text"):
        operator, worker = error.values.get("operator"), error.values.get("worker")
        error.add_note(
            f"traceback of operator {operator!r} on worker {worker}:\n{text}"
        )
    return error


def _instance_of_both(
    message: str, values: dict[str, Any], cause: Exception
) -> OperatorError:
    user_type = type(cause)
    names = {"__module__": user_type.__module__, "__qualname__": user_type.__qualname__}
    both: Any = type(user_type.__name__, (OperatorFailureError, user_type), names)
    error: OperatorError = both.__new__(both, message)
    both.__init__(error, message, **values)
    for name, value in vars(cause).items():
        if name not in _RESERVED and name not in values:
            error.__dict__.setdefault(name, value)
    _ = str(error), repr(error)
    return error


class OperatorFailureError(OperatorError):
    """A user's function raised: the base that comes before the user's own type."""

    def __init__(self, message: str, **values: Any) -> None:
        Exception.__init__(self, message)
        self.values = values
        self.__dict__.update(values)

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would quote it

    def __reduce__(self) -> tuple[Any, ...]:
        notes = list(getattr(self, "__notes__", []))
        cause = pack_exception(self.__cause__)
        return _rebuild_failure, (self.args[0], self.values, cause, notes)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return self.__reduce__()  # before one of the user's type


def _rebuild_failure(
    message: str, values: dict[str, Any], cause: bytes | None, notes: list[str]
) -> OperatorError:
    error = make_operator_error(message, values, unpack_exception(cause))
    _give_notes(error, notes)
    return error


def pack_exception(error: BaseException | None) -> bytes | None:
    """Pickle an exception, or return None if it cannot come back from that."""
    if error is None:
        return None
    bare = _BareException(type(error), error.args, dict(vars(error)))
    return _dumps_for_sure(error) or _dumps_for_sure(bare)


def unpack_exception(data: bytes | None) -> BaseException | None:
    """Rebuild what `pack_exception` made; None if this process cannot."""
    if data is None:
        return None
    try:
        error = loads(data)
    except BaseException:  # noqa: BLE001 - a class that exists only in the worker
        return None
    return error if isinstance(error, BaseException) else None


class _BareException:
    """An exception without its constructor, for types that do not pickle."""

    def __init__(
        self, type_: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
    ) -> None:
        self.parts = type_, args, state

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_bare, self.parts


def _rebuild_bare(
    type_: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    error = type_.__new__(type_, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def pack_error(error: TimelyError) -> bytes:
    """Pickle an error for a `Failed` message; always succeeds."""
    notes = list(getattr(error, "__notes__", []))
    data = _dumps_for_sure((error, pack_exception(error.__cause__), notes))
    if data is None or len(data) > MAX_ERROR_BYTES:
        data = dumps((_plain(error), None, notes))
    return data


def placed_error(data: bytes, where: str) -> bytes:
    """Say in a packed error where it came from, without loading what is the user's."""
    return dumps((None, data, where))


def _plain(error: TimelyError) -> TimelyError:
    """Return the error without anything of the user's: only what it says and where."""
    kind = OperatorError if isinstance(error, OperatorError) else InvariantError
    values = {
        name: value for name, value in error.values.items() if type(value) in _PLAIN
    }
    values.setdefault("traceback_text", user_traceback(error))
    return kind(str(error), **values)


def unpack_error(data: bytes) -> TimelyError:
    """Rebuild the error of a `Failed` message; an unreadable one is an error too."""
    try:
        error, cause, notes = loads(data)
        if error is None:  # by `placed_error`
            known = unpack_error(cause)
            known.args = (f"{known}; it was {notes}",)
            return known
    except BaseException as problem:  # noqa: BLE001 - a class that exists only in the worker
        msg = (
            f"a worker's error cannot be read here; got {type(problem).__name__}: "
            f"{problem}; expected classes that the driver can import; see the stderr of "
            "the worker"
        )
        return OperatorError(msg)
    if not isinstance(error, TimelyError):
        return InvariantError(
            f"a worker reported something that is no error of its own; got {error!r}; "
            "expected a TimelyError; report it, as this is a bug"
        )
    if error.__cause__ is None:
        error.__cause__ = unpack_exception(cause)
    _give_notes(error, notes)
    return error


def _give_notes(error: TimelyError, notes: list[str]) -> None:
    """Restore notes; of a traceback, with lines that no file of the worker held."""
    if notes:
        error.__notes__ = [with_source_lines(note) for note in notes]


def _dumps_for_sure(value: object) -> bytes | None:
    """Pickle, but only if it also comes back: some constructors fail only then."""
    try:
        data = dumps(value)
        loads(data)
    except BaseException:  # noqa: BLE001 - whatever a user's __reduce__ raises
        return None
    return data


def closed_error() -> RunStoppedError:
    """Return the error of what goes on while its cluster is closed."""
    return RunStoppedError(
        "the cluster was closed; got no complete result; expected it to stay open until "
        "its runs are over; call result() before it closes"
    )


def deserted_error(who: object) -> ConfigError:
    """Return why a cluster whose workers have all left, or not come, runs nothing."""
    return ConfigError(
        f"{who!r} cannot run a dataflow; got no worker that is there; expected one at "
        "least; start it once a worker has joined"
    )
