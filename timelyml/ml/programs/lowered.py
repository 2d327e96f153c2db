"""Lowered programs: what each host does, in which order, and what is to be scheduled.

Instructions are few and say nothing of single shards: a launch, a send or a receive is
one instruction for all hosts that take part, and each host works out its own pieces.
So a program is shipped once, and its size does not depend on how many devices it uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from timelyml.ml.functions import Computation
from timelyml.ml.programs.layout import Layout, Move
from timelyml.ml.programs.nodes import Value
from timelyml.ml.programs.places import Place, SliceNode
from timelyml.ml.programs.sparse import SparseMove
from timelyml.ml.scheduling import PlacedGang, SpreadGraph

Slot: TypeAlias = int
"""Names a value of a program: on each host that has part of it, a buffer."""


@dataclass(frozen=True, slots=True)
class Put:
    """Make a value on a slice of one that the client sent, or of a constant.

    Attributes:
        source: The slot of the host array; each host gets the blocks of its shards.
    """

    source: Slot
    target: Slot


@dataclass(frozen=True, slots=True)
class Launch:
    """Run a computation on all devices of its slice, once it is its gang's turn.

    Attributes:
        gang: Its index in the graph that is scheduled.
        computation: Its index among the computations of the program.
        operands: One for each argument, as it has to be sharded.
        outputs: One for each output, those that tell of checks included.
        donated: Those of the operands that are gone afterwards. What was sent of them
            before has to be on its way, or copied.
    """

    gang: int
    computation: int
    slice: str
    operands: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    donated: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """Send the pieces of a move that other hosts need, once the value is there."""

    move: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Take the pieces of a move, from others and from this host; make the value of them."""

    move: int


@dataclass(frozen=True, slots=True)
class Release:
    """Drop values that nothing uses any more, once what uses them is over."""

    slots: tuple[Slot, ...]


Instruction: TypeAlias = Put | Launch | Send | Receive | Release


@dataclass(frozen=True, slots=True)
class MoveNode:
    """A value that goes from one slice to another."""

    source: Slot
    target: Slot
    pieces: Move | SparseMove


@dataclass(frozen=True)  # no slots: what each host does is kept
class LoweredProgram:
    """A program for certain places, to be registered once and run by its identity.

    Attributes:
        identity: Of the program and its places.
        slices: With their places.
        values: What is in each slot.
        args: The slot of each operand of a call, by position.
        constants: The bytes of each slot that is a constant.
        results: The slot of each result. It may be that of an operand, or of a constant.
        donated_args: The positions of operands that are dead after the call.
        instructions: In an order in which one after the other could run.
        gangs: Those of the launches, in their order.
        graph: The gangs for the scheduler.
        stages: The name of each pass, and the program after it as text.
    """

    name: str
    identity: str
    slices: tuple[SliceNode, ...]
    computations: tuple[Computation, ...]
    values: tuple[Value, ...]
    moves: tuple[MoveNode, ...]
    args: tuple[Slot, ...]
    constants: Mapping[Slot, bytes]
    results: tuple[Slot, ...]
    donated_args: frozenset[int]
    instructions: tuple[Instruction, ...]
    gangs: tuple[PlacedGang, ...]
    graph: SpreadGraph
    stages: tuple[tuple[str, str], ...]

    @cached_property
    def places(self) -> Mapping[str, Place]:
        """The place of each slice, by its name."""
        return {each.name: each.place for each in self.slices if each.place is not None}

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that take part, in order of their first device."""
        return tuple(
            dict.fromkeys(
                host for place in self.places.values() for host in place.shards_by_host
            )
        )

    def for_host(self, host: str) -> tuple[Instruction, ...]:
        """Return what a host does; a host that is not in a slice hears nothing of it."""
        return self._by_slices(
            frozenset(
                name
                for name, place in self.places.items()
                if host in place.shards_by_host
            )
        )

    def layout(self, slot: Slot) -> Layout:
        """Return how a value on a slice is cut."""
        value = self.values[slot]
        mesh = next(each.mesh for each in self.slices if each.name == value.slice)
        return Layout(mesh, value.spec or (), value.type.shape)

    def _by_slices(self, names: frozenset[str]) -> tuple[Instruction, ...]:
        """Hosts of the same slices do the same, so their lists are one object."""
        found = self._lists.get(names)
        if found is None:
            kept = (each for each in self.instructions if self._concerns(each, names))
            found = self._lists[names] = tuple(kept)
        return found

    @cached_property
    def _lists(self) -> dict[frozenset[str], tuple[Instruction, ...]]:
        return {}

    def _concerns(self, instruction: Instruction, names: frozenset[str]) -> bool:
        match instruction:
            case Launch():
                return instruction.slice in names
            case Put():
                return self.values[instruction.target].slice in names
            case Send():
                return self.values[self.moves[instruction.move].source].slice in names
            case Receive():
                return self.values[self.moves[instruction.move].target].slice in names
            case Release():
                return self.values[instruction.slots[0]].slice in names
