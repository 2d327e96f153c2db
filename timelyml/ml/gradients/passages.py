"""Passages: both ways through the nodes of a tape, recorded into another program.

A call's derivative runs on the slice of the call, so values that go from slice to slice
on the way there have cotangents that go from slice to slice on the way back. A value
that several calls use has a cotangent from each; whoever takes them adds them up, in
one fixed order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from timelyml.ml.functions import TracedCall
from timelyml.ml.gradients.derivatives import Derivative
from timelyml.ml.gradients.emitting import Sums, current, emit
from timelyml.ml.gradients.making import Maker
from timelyml.ml.gradients.planning import (
    ControlStep,
    ExchangeStep,
    Plan,
    Step,
    results_of,
)
from timelyml.ml.gradients.tape import Tape
from timelyml.ml.programs import Branch, Call, Loop, Node, Ref, Value
from timelyml.ml.programs.nodes import CONTROL, Control, Exchange


class Back(ABC):
    """The way back through a branch or a loop, whose way there is recorded."""

    @abstractmethod
    def back(self, cotangents: Sequence[Any]) -> Iterable[tuple[int, Any]]:
        """Record it; return parts of cotangents, with the positions of operands.

        Args:
            cotangents: Of live results, in their order.
        """


class Passage(ABC):
    """Both ways through a program, or a region of one.

    Args:
        tape: What recorded it.
        nodes: Its nodes.
        steps: Through which gradients go.
        maker: Makes the functions.
        values: What its arguments are on the way there.

    Attributes:
        parts: Of what cotangents are added up, by what they belong to.
        maker: As given.
        sums: Adds them up.
    """

    def __init__(
        self,
        tape: Tape,
        nodes: Sequence[Node],
        steps: Plan,
        maker: Maker,
        values: Mapping[Ref, Any],
    ) -> None:
        self.parts: dict[Ref, list[Any]] = {}
        self.maker = maker
        self.sums = Sums(tape, maker)
        self._tape = tape
        self._nodes = nodes
        self._steps = steps
        self._values = dict(values)
        self._saved: dict[int, list[Any]] = {}
        self._backs: dict[int, Back] = {}
        self._read: set[Ref] = set()

    @abstractmethod
    def recalled(self, value: Any) -> Any:
        """Return what a value of the way there is on the way back."""

    @abstractmethod
    def control(self, index: int, step: ControlStep) -> tuple[list[Any], Back]:
        """Record the way there of a branch or a loop; return its results."""

    def recall(self, ref: Ref) -> Any:
        """Return what an output is on the way back."""
        return self.recalled(self.value(ref))

    def value(self, ref: Ref) -> Any:
        """Return what an output is, on the way there."""
        return self._values[ref]

    @property
    def is_checkpointed(self) -> bool:
        """Whether what the way back reads is computed again rather than kept."""
        return False

    def reads(self) -> Iterator[Any]:
        """Return values of the way there that the way back may read."""
        for index, step in self._steps.items():
            node = self._nodes[index]
            if isinstance(node, Branch | Loop):
                carried = len(node.values) if isinstance(node, Loop) else 0
                refs = list(node.passed[carried:])
            elif isinstance(node, Exchange):
                refs = list(node.matrix)
            elif isinstance(step, Step):
                derivative = self.maker.traced(self._tape.calls[index], step.derivative)
                refs = [node.operands[i] for i in derivative.operands_read]
                refs += [Ref(index, i) for i in derivative.results_read]
                yield from self._saved[index]
            yield from (self.value(ref) for ref in refs if not self.is_outside(ref))

    def place(self, ref: Ref) -> Value:
        """Return where an output lies."""
        return self._nodes[ref.node].outputs[ref.output]

    def node(self, index: int) -> Node:
        """Return a node."""
        return self._nodes[index]

    def tapes(self, index: int) -> tuple[Tape, ...]:
        """Return the tapes of the regions of a branch or loop."""
        return self._tape.regions[index]

    def go(self) -> None:
        """Record the way there."""
        for index, node in enumerate(self._nodes):
            step = self._steps.get(index)
            if isinstance(node, CONTROL):
                self._through(index, node, step)
            elif isinstance(node, Call):
                call = self._tape.calls[index]
                if isinstance(step, Step):
                    self._go(index, call, step)
                else:
                    self._repeat(index, call)

    def back(self) -> None:
        """Record the way back."""
        for index in reversed(self._steps):
            step = self._steps[index]
            if isinstance(step, ControlStep):
                self._back_through(index, step)
            elif isinstance(step, ExchangeStep):
                self._send_back(index, step)
            elif not step.is_joint:
                self._return(index, step)

    def is_outside(self, ref: Ref) -> bool:
        """Whether an output stays there whatever is done to it here."""
        del ref
        return False

    def seeded(self, ref: Ref) -> list[Any]:
        """Return the parts of a cotangent."""
        return self.parts.get(ref, [])

    def _through(self, index: int, node: Control, step: Any) -> None:
        """Record the way there of what values decide."""
        if isinstance(node, Exchange) and step is not None:
            self._will_read(node.matrix)
        if isinstance(node, Branch | Loop) and isinstance(step, ControlStep):
            self._will_read(node.passed)
            found, self._backs[index] = self.control(index, step)
        else:
            recorder = current()
            for each in self._tape.slices.values():
                recorder.use_slice(each)
            operands = [
                recorder.operand(self.value(ref), node.kind) for ref in node.operands
            ]
            again = replace(node, operands=tuple(operands))
            found = list(recorder.control(again, self._tape.regions.get(index, ())))
        for output, value in enumerate(found):
            self._values[Ref(index, output)] = value

    def _back_through(self, index: int, step: ControlStep) -> None:
        node = self._nodes[index]
        assert isinstance(node, Branch | Loop)  # noqa: S101 - for the type
        # A branch is given values where they are, a loop brings what it carries.
        add = self.sums.joined if isinstance(node, Loop) else self.sums.total
        cotangents = [
            add(self.seeded(Ref(index, i)), strong(node.values[i])) for i in step.live
        ]
        for position, part in self._backs.pop(index).back(cotangents):
            self.parts.setdefault(node.passed[position], []).append(part)

    def _send_back(self, index: int, step: ExchangeStep) -> None:
        """Record the way back of rows: as many as came, to where they came from.

        What is cut off on the way there, or is padding where it arrives, has no part in
        it, as nothing came of the one and nobody is sent the other.
        """
        node = self._nodes[index]
        assert isinstance(node, Exchange)  # noqa: S101 - for the type
        given = [node.rows[i] for i in step.live]
        homes = [strong(self.place(ref)) for ref in given]
        cotangents = [
            self.sums.total(self.seeded(Ref(index, i)), strong(node.outputs[i]))
            for i in step.live
        ]
        recorder = current()
        operands = [
            recorder.operand(each, node.kind)
            for each in (*map(self.recall, node.matrix), *cotangents)
        ]
        found = recorder.control(node.reversed(operands, homes))
        for ref, part in zip(given, found, strict=True):
            self.parts.setdefault(ref, []).append(part)

    def _repeat(self, index: int, call: TracedCall) -> None:
        """Record a call that no gradient goes through."""
        returned = self._returned(index, call)
        if returned:
            nothing = Derivative(call.flat, (), (), frozenset(), keeps=False)
            forward = self.maker.forward(call, nothing, returned)
            outputs = emit(call, forward, *self._operands(index))
        else:
            outputs = self._as_it_was(index, call)
        self._take_results(index, outputs, returned)

    def _go(self, index: int, call: TracedCall, step: Step) -> None:
        """Record the way there of a call, and its way back if that follows at once."""
        derivative = self.maker.traced(call, step.derivative)
        refs = self._nodes[index].operands
        if not step.is_joint:
            self._will_read(refs[position] for position in derivative.operands_read)
            self._will_read(Ref(index, each) for each in derivative.results_read)
        returned = self._returned(index, call)
        if step.is_joint or derivative.keeps or returned:
            make = self.maker.turn if step.is_joint else self.maker.forward
            function = make(call, derivative, returned)
            outputs = emit(call, function, *self._operands(index))
        else:
            outputs = self._as_it_was(index, call)
        rest = self._take_results(index, outputs, returned)
        if step.is_joint:
            self._take_gradients(index, derivative, rest)
        else:
            self._saved[index] = rest

    def _return(self, index: int, step: Step) -> None:
        """Record the way back of a call."""
        call = self._tape.calls[index]
        derivative = self.maker.traced(call, step.derivative)
        results = results_of(self._tape, index)
        refs = self._nodes[index].operands
        parts = [tuple(self.parts.get(results[i], ())) for i in derivative.live]
        gradients = emit(
            call,
            self.maker.backward(call, derivative, [len(each) for each in parts]),
            tuple(self.recall(refs[position]) for position in derivative.operands_read),
            tuple(self.recall(results[i]) for i in derivative.results_read),
            tuple(map(self.recalled, self._saved.pop(index))),
            tuple(parts),
        )
        self._take_gradients(index, derivative, gradients)

    def _will_read(self, refs: Iterable[Ref]) -> None:
        self._read.update(ref for ref in refs if not self.is_outside(ref))

    def _returned(self, index: int, call: TracedCall) -> tuple[int, ...]:
        """The operands that a call destroys, and that a way back still reads."""
        refs = self._nodes[index].operands
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
        refs = self._nodes[index].operands
        for position in returned:
            self._values[refs[position]] = rest.pop(0)
        return rest

    def _take_gradients(
        self, index: int, derivative: Derivative, gradients: Sequence[Any]
    ) -> None:
        refs = self._nodes[index].operands
        for position, gradient in zip(derivative.wanted, gradients, strict=True):
            self.parts.setdefault(refs[position], []).append(gradient)

    def _operands(self, index: int) -> list[Any]:
        return [self.value(ref) for ref in self._nodes[index].operands]

    def _as_it_was(self, index: int, call: TracedCall) -> list[Any]:
        """Record a call as the block made it."""
        again = call._replace(operands=tuple(self._operands(index)))
        return list(current().call(again))


def strong(value: Value) -> Value:
    """Return a value whose type does not give way in promotion, as cotangents are."""
    return replace(value, type=replace(value.type, is_weak=False))
