"""Both ways through the regions of branches and loops.

On the way there a region keeps, run by run, what its way back reads of it. That is
found out by recording the way back, so the branch or loop of the way there is amended
once its way back is known. What both ways are given from around them is not kept: it
lies there all along.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from timelyml.ml.functions import recording
from timelyml.ml.gradients.emitting import current
from timelyml.ml.gradients.passages import Back, Passage, strong
from timelyml.ml.gradients.planning import ControlStep, Plan, args_of
from timelyml.ml.gradients.tape import Tape
from timelyml.ml.programs import (
    Branch,
    Call,
    Loop,
    Ref,
    Region,
    Value,
)
from timelyml.ml.programs.nodes import Exchange, replayed


class Nesting(Passage):
    """A passage with branches and loops in it."""

    def control(self, index: int, step: ControlStep) -> tuple[list[Any], Back]:
        """Record the way there of a branch or a loop; return its results."""
        node = self.node(index)
        assert isinstance(node, Branch | Loop)  # noqa: S101 - for the type
        make = _BackLoop if isinstance(node, Loop) else _BackBranch
        back = make(self, self.tapes(index), node, step)
        return back.results, back


class _Inside(Nesting):
    """Both ways through a region.

    Args:
        outer: Through what is around it.
        tape: What recorded the region.
        region: As it was recorded.
        steps: Through which gradients go.
        outside: What of its operands lies outside on the way back too, by position.
        is_checkpointed: Whether calls are computed again rather than their results kept.
    """

    def __init__(
        self,
        outer: Passage,
        tape: Tape,
        region: Region,
        steps: Plan,
        outside: Mapping[int, Ref],
        *,
        is_checkpointed: bool,
    ) -> None:
        self.args = args_of(region)
        self.there = current().inside(tape.name)
        self._region = region
        self._outer = outer
        self._outside = {
            self.args[i]: ref for i, ref in outside.items() if i in self.args
        }
        values = {
            ref: self.there.stand_in(tape.value(ref), f"given {position}", position)
            for position, ref in self.args.items()
        }
        super().__init__(tape, region.nodes, steps, outer.maker, values)
        self._lying = {values[ref].ref: around for ref, around in self._outside.items()}
        self._is_checkpointed = is_checkpointed
        self._computed: dict[Ref, Any] = {}
        self._kept: dict[Ref, Any] = {}
        with recording(self.there):
            self.go()
        returned = [self.value(ref) for ref in region.results]
        self._results = self.there.region(returned).results

    def begin_back(self, cotangents: Sequence[Value], live: Sequence[int]) -> None:
        """Record the way back, to go on until it is over.

        Args:
            cotangents: What is given of each live result.
            live: Which these are.
        """
        self.again = current().inside(self._tape.name)
        for i, value in zip(live, cotangents, strict=True):
            stands = self.again.stand_in(value, f"cotangent {i}")
            self.parts.setdefault(self._region.results[i], []).append(stands)
        with recording(self.again):
            if self.is_checkpointed:
                self._compute_again()
            self.back()

    @property
    def is_checkpointed(self) -> bool:
        """Whether what the way back reads is computed again rather than kept."""
        return self._is_checkpointed

    def region_there(self) -> Region:
        """Return the region of the way there, which keeps what is read on the way back."""
        return Region(self.there.nodes, (*self._results, *self._kept))

    def recall(self, ref: Ref) -> Any:
        """Return what an output is on the way back."""
        if ref in self._outside:
            return self._outer.recall(self._outside[ref])
        return super().recall(ref)

    def recalled(self, value: Any) -> Any:
        """Return what a value of the way there is on the way back: it is kept."""
        return self._recalled(value.ref)

    def _recalled(self, ref: Ref) -> Any:
        if ref in self._lying:
            return self._outer.recall(self._lying[ref])
        if ref in self._computed:
            return self._computed[ref]
        if ref not in self._kept:
            number = len(self._kept)
            self._kept[ref] = self.again.recalled(number, self.there.value(ref))
        return self._kept[ref]

    def _compute_again(self) -> None:
        """Record the calls of the way there once more, whose results the way back reads.

        In their order, as some destroy what others read before them. Rows are sent once
        more too, by the counts that were kept: where they go is not decided again.
        """
        nodes = self.there.nodes
        routings = {
            ref for node in nodes if isinstance(node, Exchange) for ref in node.matrix
        }
        needed: dict[int, Call | Exchange] = {}
        left = [value.ref for value in self.reads() if value.ref not in routings]
        while left:
            index = left.pop().node
            node = nodes[index]
            if index in needed:
                continue
            if isinstance(node, Exchange):
                needed[index] = node
                left += node.rows
            elif isinstance(node, Call) and self._may_repeat(node):
                needed[index] = node
                left += node.operands
        for index, node in sorted(needed.items()):
            refs = [Ref(index, output) for output in range(len(node.outputs))]
            found = zip(refs, self._again_of(node), strict=True)
            self._computed.update((ref, x) for ref, x in found if ref not in routings)

    def _again_of(self, node: Call | Exchange) -> list[Any]:
        """Record a call or an exchange of the way there once more."""
        name = node.computation.name if isinstance(node, Call) else node.kind
        operands = [
            self.again.operand(self._recalled(ref), name) for ref in node.operands
        ]
        if isinstance(node, Call):
            return list(self.again.repeat(node, operands))
        return list(self.again.control(replace(node, operands=tuple(operands))))

    def _may_repeat(self, node: Call) -> bool:
        """Whether a call does no more than compute, and destroys nothing of others."""
        return not node.has_effects and not any(
            ref in self._lying for ref in node.donated
        )

    def is_outside(self, ref: Ref) -> bool:
        """Whether an output stays there whatever is done to it here."""
        return ref in self._outside

    def parts_of(self, position: int) -> list[Any]:
        """Return the parts of the cotangent of an operand."""
        return self.parts.get(self.args[position], []) if position in self.args else []


class _BackControl(Back):
    """A branch or a loop that was recorded on its way there.

    Args:
        outer: Through what is around it.
        tapes: Of its regions.
        node: As it was recorded.
        step: What of it gradients go through.

    Attributes:
        results: Of the way there.
    """

    def __init__(
        self,
        outer: Passage,
        tapes: Sequence[Tape],
        node: Branch | Loop,
        step: ControlStep,
    ) -> None:
        self._outer = outer
        self._node = node
        self._step = step
        self._recorder = current()
        for each in tapes[0].slices.values():
            self._recorder.use_slice(each)
        operands = [
            self._recorder.operand(outer.value(ref), node.kind) for ref in node.operands
        ]
        self._inner = self._insides(tapes)
        self._there = self._amended(replace(node, operands=tuple(operands)))
        *self.results, self._trail = self._recorder.control(self._there)

    def back(self, cotangents: Sequence[Any]) -> Iterable[tuple[int, Any]]:
        """Record the way back, and amend the way there."""
        step, node = self._step, self._node
        types = [strong(node.values[i]) for i in step.live]
        for each in self._inner:
            each.begin_back(types, step.live)
        regions, values, more = self._ended(types)
        self._recorder.amend(self._trail.ref.node, self._amended(self._there))
        recorder = current()
        captured = list(
            dict.fromkeys(ref for each in self._inner for ref in each.again.entered)
        )
        first = len(cotangents) + len(more)
        placed = []
        for each, region in zip(self._inner, regions, strict=True):
            entered = each.again.entered
            positions = {entered[ref]: first + captured.index(ref) for ref in entered}
            placed.append(region.positioned(positions))
        trail = self._outer.recalled(self._trail)
        given = [
            recorder.operand(each, node.kind) for each in (trail, *cotangents, *more)
        ]
        replay = replayed(node, (*given, *captured), placed, values)
        return self._placed(recorder.control(replay))

    @abstractmethod
    def _insides(self, tapes: Sequence[Tape]) -> list[_Inside]:
        """Record the ways there of the regions that gradients go through."""

    @abstractmethod
    def _amended(self, node: Any) -> Branch | Loop:
        """Return a node with the regions of the way there."""

    @abstractmethod
    def _ended(
        self, types: Sequence[Value]
    ) -> tuple[list[Region], list[Value], list[Any]]:
        """End the ways back.

        Returns:
            Their regions, where their results lie, and what is carried beside
            cotangents.
        """

    @abstractmethod
    def _placed(self, found: Sequence[Any]) -> Iterable[tuple[int, Any]]:
        """Return cotangents with the positions of the operands that they are of."""


class _BackBranch(_BackControl):
    """A branch: its operands lie outside of it, whichever region runs."""

    _node: Branch

    def _insides(self, tapes: Sequence[Tape]) -> list[_Inside]:
        outside = dict(enumerate(self._node.passed))
        rows = zip(tapes, self._node.regions, self._step.plans, strict=True)
        again = self._outer.is_checkpointed
        return [
            _Inside(self._outer, *row, outside, is_checkpointed=again) for row in rows
        ]

    def _amended(self, node: Any) -> Branch | Loop:
        regions = tuple(each.region_there() for each in self._inner)
        return replace(node, regions=regions, is_recorded=True)  # type: ignore[no-any-return]  # of a dataclass

    def _ended(
        self, types: Sequence[Value]
    ) -> tuple[list[Region], list[Value], list[Any]]:
        del types
        values = list(map(self._home, self._step.wanted))
        regions = []
        for inner in self._inner:
            with recording(inner.again):
                rows = zip(self._step.wanted, values, strict=True)
                results = [inner.sums.joined(inner.parts_of(i), x) for i, x in rows]
            regions.append(inner.again.region(results))
        return regions, values, []

    def _home(self, position: int) -> Value:
        """Where the cotangent of an operand is brought: to it, or where it is first."""
        value = strong(self._outer.place(self._node.passed[position]))
        if value.slice is not None:
            return value
        parts = [part for each in self._inner for part in each.parts_of(position)]
        return replace(value, spec=parts[0].spec, slice=parts[0].slice.name)

    def _placed(self, found: Sequence[Any]) -> Iterable[tuple[int, Any]]:
        return zip(self._step.wanted, found, strict=True)


class _BackLoop(_BackControl):
    """A loop: cotangents are carried back, and those of what all runs are given grow."""

    _node: Loop

    def _insides(self, tapes: Sequence[Tape]) -> list[_Inside]:
        node = self._node
        outside = dict(enumerate(node.passed))
        for carried in range(len(node.values)):
            del outside[carried]
        (steps,) = self._step.plans
        inside = _Inside(
            self._outer,
            tapes[-1],
            node.body,
            steps,
            outside,
            is_checkpointed=node.is_checkpointed or self._outer.is_checkpointed,
        )
        return [inside]

    def _amended(self, node: Any) -> Branch | Loop:
        body = self._inner[0].region_there()
        return replace(node, body=body, is_recorded=True)  # type: ignore[no-any-return]  # of a dataclass

    def _ended(
        self, types: Sequence[Value]
    ) -> tuple[list[Region], list[Value], list[Any]]:
        (inner,) = self._inner
        values = list(types)
        with recording(inner.again):
            results = [
                inner.sums.joined(inner.parts_of(i), value)
                for i, value in zip(self._step.live, types, strict=True)
            ]
            for position in self._step.wanted:
                parts = inner.parts_of(position)
                value = strong(self._outer.place(self._node.passed[position]))
                here = replace(value, spec=parts[0].spec, slice=parts[0].slice.name)
                so_far = inner.again.stand_in(here, f"sum {position}", len(values))
                results.append(inner.sums.total([so_far, *parts], here))
                values.append(here)
        zeros = [self._outer.sums.total([], each) for each in values[len(types) :]]
        return [inner.again.region(results)], values, zeros

    def _placed(self, found: Sequence[Any]) -> Iterable[tuple[int, Any]]:
        return zip((*self._step.live, *self._step.wanted), found, strict=True)
