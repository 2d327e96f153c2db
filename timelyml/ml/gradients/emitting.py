"""Recording calls of the functions of gradients, and adding up cotangents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timelyml.errors import TraceError
from timelyml.ml.functions import JitFunction, TracedCall, applied, recorder
from timelyml.ml.gradients.making import Maker
from timelyml.ml.gradients.tape import Tape
from timelyml.ml.programs import Recorder, Value


def current() -> Recorder:
    """Return what records now: a gradient is never computed outside of a program."""
    found = recorder()
    assert isinstance(found, Recorder)  # noqa: S101 - for the type
    return found


def emit(call: TracedCall, function: JitFunction, *args: Any) -> list[Any]:
    """Record a call of a function in place of one, for its line and settings.

    Raises:
        TraceError: JAX refuses it; it names the line of the call.
    """
    try:
        with applied(call.computation.settings):
            made = function.trace_call(*args)._replace(line=call.line)
    except TraceError as error:
        if error.where or error.__cause__ is None:
            raise
        raise _without_gradient(function.name, call.line, error) from error.__cause__
    return list(made.results(current().call(made)))


class Sums:
    """Adds up the parts of cotangents.

    Args:
        tape: Knows the slices.
        maker: Makes the functions.
    """

    def __init__(self, tape: Tape, maker: Maker) -> None:
        self._tape = tape
        self._maker = maker

    def total(self, parts: Sequence[Any], value: Value) -> Any:
        """Return the sum of parts, in their order, where a value lies.

        A value of the client is given where its first part is, or where the program
        ends if there is none.
        """
        slice_ = self._tape.slice_of(value)
        if len(parts) == 1 and self._lies_so(parts[0], slice_, value):
            return parts[0]
        if slice_ is None:
            given = getattr(parts[0], "slice", None) if parts else None
            slice_ = given or self._last_slice()
        if not parts:
            return _only(self._maker.zeros(value, slice_)())
        return _only(self._maker.sum(value, slice_, len(parts))(*parts))

    def joined(self, parts: Sequence[Any], value: Value) -> Any:
        """Return the sum of parts for what brings it to where the value lies."""
        return parts[0] if len(parts) == 1 else self.total(parts, value)

    @staticmethod
    def _lies_so(part: Any, slice_: Any, value: Value) -> bool:
        """Whether a part is where a value is; one of the client may be anywhere."""
        there = getattr(part, "slice", None), getattr(part, "spec", None)
        return slice_ is None or there == (slice_, value.spec)

    def _last_slice(self) -> Any:
        calls = self._tape.calls.values()
        return next(
            (each.slice for each in reversed(calls)),
            next(reversed(self._tape.slices.values())),
        )


def _without_gradient(name: str, line: str, error: TraceError) -> TraceError:
    """The error of a way back that JAX refuses: no line of the function leads there."""
    cause = error.__cause__
    reason = f"{type(cause).__name__}: {str(cause).splitlines()[0]}"
    return TraceError(
        f"function {name!r} cannot be traced for the gradient of the call at {line}; got "
        f"{reason}; expected what JAX differentiates; see the error this one came from",
        function=name,
        where=line,
    )


def _only(outputs: Sequence[Any]) -> Any:
    return outputs[0]
