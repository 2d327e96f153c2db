"""Plans: what a host does in every call of a program, worked out when it is registered.

A call then only goes down a list. Which pieces of a move are whose is arithmetic on the
layouts at both ends; when a value is dropped follows from who uses it here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from timelyml.ml.hosts.boxes import Box
from timelyml.ml.programs import Launch, Move, Piece, Receive, Send, Slot
from timelyml.ml.programs.shipped import HostProgram
from timelyml.ml.programs.sparse import SparseMove

Code: TypeAlias = tuple[str, str]
"""Identity of a computation, and the slice that it is compiled for."""


@dataclass(frozen=True, slots=True)
class Step:
    """One launch.

    Attributes:
        gang: Its number in the program.
        code: What is launched, and where.
        copied: Positions of operands whose memory is taken although they are also sent.
        destroyed: The slots whose memory is taken, and their positions.
        outputs: One slot for each output.
        results: Position among the outputs, and number among those of the program.
        freed: Slots that nothing uses after it.
        sent: Moves of what it computes.
        is_waited: Whether its end is looked at; what a later launch of the block takes
            ends before that does.
    """

    gang: int
    code: Code
    operands: tuple[Slot, ...]
    copied: tuple[int, ...]
    destroyed: tuple[tuple[int, Slot], ...]
    outputs: tuple[Slot, ...]
    results: tuple[tuple[int, int], ...]
    freed: tuple[Slot, ...]
    sent: tuple[int, ...]
    is_waited: bool


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """Launches that have one place in the order.

    Attributes:
        inputs: Slots that are inputs of the program, and their numbers.
        arrivals: Slots that a move fills, and its number.
        shared: Slots that other blocks use too.
        inner: Of each step, whether it only takes what is there, and only later
            launches see of it.
    """

    number: int
    slice: str
    steps: tuple[Step, ...]
    inner: tuple[bool, ...]
    inputs: tuple[tuple[Slot, int], ...]
    arrivals: tuple[tuple[Slot, int], ...]
    shared: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Parcel:
    """What of a move goes to one host, or to this one itself."""

    move: int
    peer: int
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A program on one host.

    Attributes:
        program: As it was shipped.
        blocks: Those with launches here, by number.
        parcels: By the move that they are part of; of one of rows, none is known yet.
        sent_inputs: Number of an input, and a move of it.
        senders: By the move that arrives here, the hosts that pieces come from.
        own_outputs: The outputs that lie on this host.
        num_users: How many blocks use each slot that is used by several.
        host: Whose it is.
        quick: Of blocks that were launched, what launches each step quickly, if so.
    """

    program: HostProgram
    blocks: Mapping[int, PlannedBlock]
    parcels: Mapping[int, tuple[Parcel, ...]]
    sent_inputs: tuple[tuple[int, int], ...]
    senders: Mapping[int, tuple[int, ...]]
    own_outputs: tuple[int, ...]
    num_users: Mapping[Slot, int]
    host: str
    quick: dict[int, list[Any]] = field(default_factory=dict)


def plan_for(program: HostProgram, host: int) -> Plan:
    """Work out what a host does of a program."""
    return _Planner(program, str(host)).plan()


class _Planner:
    def __init__(self, program: HostProgram, host: str) -> None:
        self._program = program
        self._host = host
        self._launches = {
            each.gang: each for each in program.instructions if isinstance(each, Launch)
        }
        self._sends = [x.move for x in program.instructions if isinstance(x, Send)]
        self._receives = [
            x.move for x in program.instructions if isinstance(x, Receive)
        ]
        self._inputs = {slot: number for number, slot in enumerate(program.inputs)}
        self._outputs = {slot: number for number, slot in enumerate(program.outputs)}
        self._arrivals = {program.moves[x].target: x for x in self._receives}
        self._sent: dict[Slot, list[int]] = {}
        for move in self._sends:
            self._sent.setdefault(program.moves[move].source, []).append(move)
        self._num_users: Counter[Slot] = Counter()

    def plan(self) -> Plan:
        """Return the plan."""
        own = [
            (number, launches)
            for number, gangs in enumerate(self._program.blocks)
            if (launches := [self._launches[x] for x in gangs if x in self._launches])
        ]
        for _, launches in own:
            self._num_users.update(_operands_of(launches))
        values, slices = self._program.values, self._program.slices
        return Plan(
            program=self._program,
            blocks={number: self._block(number, each) for number, each in own},
            parcels={move: self._parcels(move) for move in self._sends},
            sent_inputs=tuple(
                (self._inputs[source], move)
                for source, moves in self._sent.items()
                if source in self._inputs
                for move in moves
            ),
            senders={move: self._senders(move) for move in self._receives},
            own_outputs=tuple(
                number
                for slot, number in self._outputs.items()
                if values[slot].slice in slices
            ),
            num_users={x: count for x, count in self._num_users.items() if count > 1},
            host=self._host,
        )

    def _block(self, number: int, launches: Sequence[Launch]) -> PlannedBlock:
        used = _operands_of(launches)
        last = {slot: each.gang for each in launches for slot in each.operands}
        steps = tuple(self._step(each, last) for each in launches)
        return PlannedBlock(
            number,
            launches[0].slice,
            steps,
            tuple(
                not (x.destroyed or x.results or x.sent or x.is_waited) for x in steps
            ),
            tuple((x, self._inputs[x]) for x in used if x in self._inputs),
            tuple((x, self._arrivals[x]) for x in used if x in self._arrivals),
            tuple(x for x in used if self._num_users[x] > 1),
        )

    def _step(self, launch: Launch, last: Mapping[Slot, int]) -> Step:
        destroyed = tuple(
            (position, slot)
            for position, slot in enumerate(launch.operands)
            if slot in launch.donated
        )
        over = [
            slot
            for slot in dict.fromkeys(launch.operands)
            if self._num_users[slot] == 1 and last[slot] == launch.gang
        ]
        over += [slot for slot in launch.outputs if not self._num_users[slot]]
        return Step(
            gang=launch.gang,
            code=(self._program.computations[launch.computation], launch.slice),
            operands=launch.operands,
            copied=tuple(i for i, slot in destroyed if slot in self._sent),
            destroyed=destroyed,
            outputs=launch.outputs,
            results=tuple(
                (position, self._outputs[slot])
                for position, slot in enumerate(launch.outputs)
                if slot in self._outputs
            ),
            freed=tuple(over),
            sent=tuple(move for x in launch.outputs for move in self._sent.get(x, ())),
            is_waited=not any(slot in last for slot in launch.outputs),
        )

    def _parcels(self, number: int) -> tuple[Parcel, ...]:
        move = self._program.moves[number].pieces
        if isinstance(move, SparseMove):
            return ()  # each call brings others
        found = [
            Parcel(number, int(peer), _boxes(move, pieces))
            for peer, pieces in move.sends(self._host).items()
        ]
        if own := move.receives(self._host).get(self._host):
            found.append(Parcel(number, int(self._host), _boxes(move, own)))
        return tuple(found)

    def _senders(self, number: int) -> tuple[int, ...]:
        move = self._program.moves[number].pieces
        if isinstance(move, SparseMove):
            return tuple(map(int, move.source_hosts))
        return tuple(map(int, move.receives(self._host)))


def _operands_of(launches: Sequence[Launch]) -> tuple[Slot, ...]:
    return tuple(dict.fromkeys(x for each in launches for x in each.operands))


def _boxes(move: Move, pieces: Sequence[Piece]) -> tuple[Box, ...]:
    """Where in the whole array the pieces are."""
    found = []
    for piece in pieces:
        block = move.source.index(move.source.block_of(piece.source))
        found.append(
            tuple(
                (base + start, base + stop)
                for (base, _), (start, stop) in zip(
                    block, piece.source_index, strict=True
                )
            )
        )
    return tuple(found)
