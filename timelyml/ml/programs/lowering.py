"""Lowering: from a traced program and the places of its slices to what hosts do."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from timelyml.errors import InvariantError, ProgramError
from timelyml.ml.functions import Computation
from timelyml.ml.programs.estimates import estimate_ns
from timelyml.ml.programs.fusion import fuse
from timelyml.ml.programs.ir import Program
from timelyml.ml.programs.layout import Layout, Move
from timelyml.ml.programs.lowered import (
    Instruction,
    Launch,
    LoweredProgram,
    MoveNode,
    Put,
    Receive,
    Release,
    Send,
    Slot,
)
from timelyml.ml.programs.nodes import Arg, Call, Constant, Ref, Route, Transfer
from timelyml.ml.programs.passes import drop_dead_calls, place, place_again
from timelyml.ml.programs.places import Place, SliceNode
from timelyml.ml.programs.rotation import rotate_loops
from timelyml.ml.programs.sparse import SparseMove
from timelyml.ml.programs.transfers import insert_transfers
from timelyml.ml.scheduling import Dispatch, PlacedGang, SpreadGraph

Pass: TypeAlias = tuple[str, Callable[[Program], Program]]


def lower(
    program: Program,
    places: Mapping[str, Place],
    *,
    dispatch: Dispatch = Dispatch.PARALLEL,
) -> LoweredProgram:
    """Lower a program for the places of its slices.

    Args:
        program: As it was traced.
        places: Of each slice, by its name; others are ignored.
        dispatch: Whether hosts prepare and launch before predecessors are over.

    Raises:
        PlacementError: A slice has no place, or one with another number of devices.
        ProgramError: It has branches or loops: `split` cuts it into parts without.
    """
    passed = run_passes(program, places)
    if not program.is_regular:
        raise ProgramError(
            f"program {program.name!r} cannot be lowered as one; got branches or loops "
            f"by values; expected none; split what run_passes returns, and lower its "
            f"parts",
            program=program.name,
        )
    return instruct(
        passed.program,
        identity=program.identity,
        donated_args=program.donated_args,
        stages=passed.stages,
        dispatch=dispatch,
    )


@dataclass(frozen=True, slots=True)
class Passed:
    """What the passes made of a program.

    Attributes:
        stages: The name of each pass, and the program after it as text.
    """

    program: Program
    stages: tuple[tuple[str, str], ...]


def run_passes(program: Program, places: Mapping[str, Place]) -> Passed:
    """Place a program, insert its transfers and fuse it; this may trace functions.

    Raises:
        PlacementError: As `lower`.
    """
    passes: list[Pass] = [
        ("place", lambda each: place(each, places)),
        ("drop dead calls", drop_dead_calls),
        ("insert transfers", insert_transfers),
    ]
    if not program.is_regular:
        passes.append(("rotate loops", rotate_loops))
    if program.is_fusible:
        passes.append(("fuse", fuse))
    stages = [("trace", program.ir())]
    for name, transform in passes:
        program = transform(program)
        stages.append((name, program.ir()))
    return Passed(program, tuple(stages))


def lower_again(
    passed: Program,
    places: Mapping[str, Place],
    *,
    dispatch: Dispatch = Dispatch.PARALLEL,
) -> LoweredProgram:
    """Lower a program that went through the passes, for where its slices stand now.

    Raises:
        PlacementError: As `lower`.
    """
    placed = place_again(passed, places)
    return instruct(
        placed,
        identity=passed.identity,
        donated_args=passed.donated_args,
        dispatch=dispatch,
    )


def instruct(
    placed: Program,
    *,
    identity: str,
    donated_args: frozenset[int],
    stages: tuple[tuple[str, str], ...] = (),
    dispatch: Dispatch = Dispatch.PARALLEL,
) -> LoweredProgram:
    """Return the instructions of a program that went through the passes.

    It traces nothing, so this much can be done again for other places at little cost.

    Args:
        placed: As `run_passes` or `place_again` returned it.
        identity: Of the program as it was traced.
        donated_args: Of the program as it was traced.
        stages: To be kept with it.
        dispatch: As of `lower`.
    """
    lowering = _Lowering(placed)
    for index in range(len(placed.nodes)):
        lowering.add(index)
    return LoweredProgram(
        name=placed.name,
        identity=identity_of(identity, placed.slices, dispatch),
        slices=placed.slices,
        computations=tuple(lowering.computations),
        values=tuple(value for node in placed.nodes for value in node.outputs),
        moves=tuple(lowering.moves),
        args=lowering.args(),
        constants=lowering.constants(),
        results=tuple(map(lowering.slot, placed.results)),
        donated_args=donated_args,
        instructions=tuple(lowering.instructions),
        gangs=tuple(lowering.gangs),
        graph=SpreadGraph(lowering.gangs, dispatch),
        stages=stages,
    )


def identity_of(program: str, slices: Sequence[SliceNode], dispatch: Dispatch) -> str:
    """Return a digest of a program, by its own, and the places of its slices."""
    used = repr([(each.name, each.place) for each in slices])
    parts = program, used, dispatch.value
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class _Lowering:
    """The instructions and gangs of a program, node by node."""

    def __init__(self, program: Program) -> None:
        self.instructions: list[Instruction] = []
        self.computations: list[Computation] = []
        self.moves: list[MoveNode] = []
        self.gangs: list[PlacedGang] = []
        self._program = program
        self._slices = {each.name: each for each in program.slices}
        self._first_slot: list[Slot] = []
        self._gangs_of: list[tuple[int, ...]] = []
        self._readers: dict[Ref, set[int]] = {}
        self._numbers: dict[str, int] = {}
        self._last: dict[tuple[str, int], int] = {}  # gangs, by slice and order
        self._last_use = self._last_uses()

    def slot(self, ref: Ref) -> Slot:
        """Return the slot of an output."""
        return self._first_slot[ref.node] + ref.output

    def args(self) -> tuple[Slot, ...]:
        """Return the slots of operands, by position."""
        found = {
            node.position: self.slot(Ref(index))
            for index, node in enumerate(self._program.nodes)
            if isinstance(node, Arg)
        }
        return tuple(found[position] for position in range(len(found)))

    def constants(self) -> dict[Slot, bytes]:
        """Return what is in the slots of constants."""
        return {
            self.slot(Ref(index)): node.data
            for index, node in enumerate(self._program.nodes)
            if isinstance(node, Constant)
        }

    def add(self, index: int) -> None:
        """Lower the next node."""
        node = self._program.nodes[index]
        before = self._program.nodes[index - 1] if index else None
        start = self._first_slot[-1] + len(before.outputs) if before else 0
        self._first_slot.append(start)
        gangs: tuple[int, ...] = ()
        match node:
            case Call():
                gangs = (self._launch(index, node),)
            case Transfer():
                gangs = self._gangs_of[node.operand.node]
                self._transfer(index, node)
        self._gangs_of.append(gangs)
        self._release(index)

    def _launch(self, index: int, node: Call) -> int:
        gang = len(self.gangs)
        computation = node.computation
        needs = {each for ref in node.operands for each in self._gangs_of[ref.node]}
        for ref in node.donated:  # its memory is free once all who read it are ordered
            needs |= self._readers.get(ref, set())
        if node.order:
            needs |= {self._last.get((node.slice, node.order), gang)} - {gang}
            self._last[node.slice, node.order] = gang
        for ref in node.operands:
            self._readers.setdefault(ref, set()).add(gang)
        place_ = self._place(node.slice)
        self.gangs.append(
            PlacedGang(
                place_.island,
                computation.identity,
                node.slice,
                tuple(sorted(needs)),
                estimate_ns=estimate_ns(computation),
            )
        )
        number = self._numbers.setdefault(computation.identity, len(self.computations))
        if number == len(self.computations):
            self.computations.append(computation)
        outputs = range(len(node.outputs))
        self.instructions.append(
            Launch(
                gang,
                number,
                node.slice,
                tuple(map(self.slot, node.operands)),
                tuple(self.slot(Ref(index, output)) for output in outputs),
                tuple(map(self.slot, node.donated)),
            )
        )
        return gang

    def _transfer(self, index: int, node: Transfer) -> None:
        source, target = self.slot(node.operand), self.slot(Ref(index))
        if node.route is Route.PUT:
            self.instructions.append(Put(source, target))
            return
        before = self._program.value(node.operand)
        places = [self._place(str(each.slice)) for each in (before, node.value)]
        layouts = [
            Layout(self._slices[str(each.slice)].mesh, each.spec or (), each.type.shape)
            for each in (before, node.value)
        ]
        ends = layouts[0], places[0], layouts[1], places[1]
        sparse = node.sparse
        move = SparseMove(*ends, sparse.is_back) if sparse else Move(*ends)
        number = len(self.moves)
        self.moves.append(MoveNode(source, target, move))
        self.instructions += [Send(number), Receive(number)]

    def _last_uses(self) -> dict[Ref, int]:
        """The node after which a value is not needed, where the program may drop it."""
        last: dict[Ref, int] = {}
        for index, node in enumerate(self._program.nodes):
            if not isinstance(node, Call | Transfer):
                continue
            for output in range(len(node.outputs)):
                last[Ref(index, output)] = index
            for ref in node.operands:
                if ref in last:
                    last[ref] = index
        donated = {ref for _, call in self._program.calls() for ref in call.donated}
        for ref in (*self._program.results, *donated):
            last.pop(ref, None)
        return last

    def _release(self, index: int) -> None:
        node = self._program.nodes[index]
        outputs = range(len(node.outputs))
        candidates = (*node.operands, *(Ref(index, each) for each in outputs))
        over = [
            ref for ref in dict.fromkeys(candidates) if self._last_use.get(ref) == index
        ]
        by_slice: dict[str | None, list[Slot]] = {}
        for ref in over:
            slice_name = self._program.value(ref).slice
            by_slice.setdefault(slice_name, []).append(self.slot(ref))
        self.instructions += [Release(tuple(slots)) for slots in by_slice.values()]

    def _place(self, slice_name: str) -> Place:
        found: SliceNode = self._slices[slice_name]
        if found.place is None:
            raise InvariantError(
                f"slice {slice_name!r} is lowered without a place; expected it placed"
            )
        return found.place
