"""From a tape to the program of its gradient: the calls again, and back through them.

A call's derivative runs on the slice of the call, so values that go from slice to slice
on the way there have cotangents that go from slice to slice on the way back. A value
that several calls use has a cotangent from each; whoever takes them adds them up, in
one fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from timelyml.errors import TraceError
from timelyml.ml.functions import JitFunction, TracedCall, applied, recorder
from timelyml.ml.functions.types import dtype_named
from timelyml.ml.gradients.derivatives import Derivative
from timelyml.ml.gradients.making import Maker
from timelyml.ml.gradients.planning import Step, plan, results_of
from timelyml.ml.gradients.tape import Tape
from timelyml.ml.programs import Program, Ref


class Transposer:
    """Records the gradient of a tape into the program that is being traced.

    Args:
        tape: The block.
        program: What the tape recorded.
        loss: The scalar that is differentiated.
        wrt: What gradients are wanted of.
        keeps: Keep residuals; else functions are computed again.
        maker: Makes the functions.
    """

    def __init__(
        self,
        tape: Tape,
        program: Program,
        loss: Ref,
        wrt: Sequence[Ref],
        *,
        keeps: bool,
        maker: Maker,
    ) -> None:
        self._tape = tape
        self._program = program
        self._loss = loss
        self._wrt = tuple(wrt)
        self._maker = maker
        self._steps = plan(tape, program, loss, self._wrt, keeps=keeps)
        self._values: dict[Ref, Any] = {}
        self._saved: dict[int, list[Any]] = {}
        self._read: set[Ref] = set()
        self._parts: dict[Ref, list[Any]] = {}

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        """Record both ways; return the gradients, in the order of `wrt`.

        Args:
            arguments: What the block was given, in the program that is being traced.
        """
        self._values.update((Ref(i), leaf) for i, leaf in enumerate(arguments))
        for index, call in self._tape.calls.items():
            step = self._steps.get(index)
            if step is None:
                self._repeat(index, call)
            else:
                self._go(index, call, step)
        for index in reversed(self._steps):
            if not self._steps[index].is_joint:
                self._return(index, self._tape.calls[index])
        return [self._gradient(ref) for ref in self._wrt]

    def value(self, leaf: Any) -> Any:
        """Return what a value of the block is in the program that is being traced."""
        ref = self._tape.ref_of(leaf)
        return leaf if ref is None else self._values[ref]

    def _repeat(self, index: int, call: TracedCall) -> None:
        """Record a call that no gradient goes through."""
        returned = self._returned(index, call)
        if returned:
            nothing = Derivative(call.flat, (), (), frozenset(), keeps=False)
            forward = self._maker.forward(call, nothing, returned)
            outputs = self._emit(call, forward, *self._operands(call))
        else:
            outputs = self._as_it_was(call)
        self._take_results(index, outputs, returned)

    def _go(self, index: int, call: TracedCall, step: Step) -> None:
        """Record the way there of a call, and its way back if that follows at once."""
        derivative = self._maker.traced(call, step.derivative)
        refs = self._program.nodes[index].operands
        if not step.is_joint:
            self._read |= {refs[position] for position in derivative.operands_read}
            self._read |= {Ref(index, output) for output in derivative.results_read}
        returned = self._returned(index, call)
        if step.is_joint or derivative.keeps or returned:
            make = self._maker.turn if step.is_joint else self._maker.forward
            function = make(call, derivative, returned)
            outputs = self._emit(call, function, *self._operands(call))
        else:
            outputs = self._as_it_was(call)
        rest = self._take_results(index, outputs, returned)
        if step.is_joint:
            self._take_gradients(index, derivative, rest)
        else:
            self._saved[index] = rest

    def _return(self, index: int, call: TracedCall) -> None:
        """Record the way back of a call."""
        derivative = self._maker.traced(call, self._steps[index].derivative)
        results = results_of(self._tape, index)
        parts = [tuple(self._parts.get(results[i], ())) for i in derivative.live]
        operands = self._operands(call)
        gradients = self._emit(
            call,
            self._maker.backward(call, derivative, [len(each) for each in parts]),
            tuple(operands[position] for position in derivative.operands_read),
            tuple(self._values[results[i]] for i in derivative.results_read),
            tuple(self._saved.pop(index)),
            tuple(parts),
        )
        self._take_gradients(index, derivative, gradients)

    def _returned(self, index: int, call: TracedCall) -> tuple[int, ...]:
        """The operands that a call destroys, and that a way back still reads."""
        refs = self._program.nodes[index].operands
        return tuple(i for i in call.computation.donated if refs[i] in self._read)

    def _take_results(
        self, index: int, outputs: Sequence[Any], returned: Sequence[int]
    ) -> list[Any]:
        """Note the results of a call; return its other outputs.

        From now on an operand that is destroyed and returned is what was returned.
        """
        results = results_of(self._tape, index)
        self._values.update(zip(results, outputs, strict=False))
        rest = list(outputs[len(results) :])
        refs = self._program.nodes[index].operands
        for position in returned:
            self._values[refs[position]] = rest.pop(0)
        return rest

    def _take_gradients(
        self, index: int, derivative: Derivative, gradients: Sequence[Any]
    ) -> None:
        refs = self._program.nodes[index].operands
        for position, gradient in zip(derivative.wanted, gradients, strict=True):
            self._parts.setdefault(refs[position], []).append(gradient)

    def _gradient(self, ref: Ref) -> Any:
        """Return the whole gradient of an argument, as the argument lies."""
        value = self._program.value(ref)
        parts = self._parts.get(ref, [])
        slice_ = self._tape.slice_of(value)
        if ref == self._loss:
            parts = [np.ones((), dtype_named(value.type.dtype)), *parts]
        if len(parts) == 1 and self._lies_so(parts[0], slice_, value.spec):
            return parts[0]
        if slice_ is None:
            given = getattr(parts[0], "slice", None) if parts else None
            slice_ = given or self._last_slice()
        if not parts:
            return _only(self._maker.zeros(value, slice_)())
        return _only(self._maker.sum(value, slice_, len(parts))(*parts))

    @staticmethod
    def _lies_so(part: Any, slice_: Any, spec: Any) -> bool:
        """Whether a part is where an argument is; one of the client may be anywhere."""
        there = getattr(part, "slice", None), getattr(part, "spec", None)
        return slice_ is None or there == (slice_, spec)

    def _last_slice(self) -> Any:
        return next(reversed(self._tape.calls.values())).slice

    def _operands(self, call: TracedCall) -> list[Any]:
        return [self.value(each) for each in call.operands]

    def _as_it_was(self, call: TracedCall) -> list[Any]:
        """Record a call as the block made it."""
        again = replace(call, operands=tuple(self._operands(call)))
        return list(_recorder().call(again))

    def _emit(self, call: TracedCall, function: JitFunction, *args: Any) -> list[Any]:
        """Record a call of a function in place of one, for its line and settings."""
        try:
            with applied(call.computation.settings):
                made = replace(function.trace_call(*args), line=call.line)
        except TraceError as error:
            if error.where or error.__cause__ is None:
                raise
            raise _without_gradient(
                function.name, call.line, error
            ) from error.__cause__
        return list(made.results(_recorder().call(made)))


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


def _recorder() -> Any:
    """Return what records the gradient: it is never computed outside of a program."""
    return recorder()


def _only(outputs: Sequence[Any]) -> Any:
    return outputs[0]
