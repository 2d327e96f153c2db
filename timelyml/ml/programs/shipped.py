"""What of a lowered program goes to a host, once, so that a call of it is a few numbers.

A call brings its *inputs* as buffers: operands that lie on slices, and what the client
puts there of host arrays, constants included. It names buffers for its *outputs*, the
results that it computes; everything else is the program's own and has no name outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from timelyml.ml.programs.blocks import Block
from timelyml.ml.programs.ir import Program
from timelyml.ml.programs.lowered import (
    Instruction,
    Launch,
    LoweredProgram,
    MoveNode,
    Put,
    Receive,
    Send,
    Slot,
)
from timelyml.ml.programs.nodes import Arg, Constant, Ref, Route, Transfer, Value


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a program.

    Attributes:
        source: Where it comes from: an operand of the call, or a constant.
        value: What it has to be, and on which slice.
        is_put: Whether the client puts it there, of a host array.
        is_destroyed: Whether the program takes its memory.
    """

    source: Arg | Constant
    value: Value
    is_put: bool
    is_destroyed: bool

    @property
    def position(self) -> int:
        """Its place among the operands of a call; -1 of a constant."""
        return self.source.position if isinstance(self.source, Arg) else -1


def inputs_of(program: Program) -> list[Input]:
    """Return the inputs of a program with its transfers: operands, then what is put."""
    donated = {ref for _, call in program.calls() for ref in call.donated}
    operands: dict[int, Input] = {}
    puts = []
    for index, node in enumerate(program.nodes):
        is_destroyed = Ref(index) in donated
        if isinstance(node, Arg) and node.value.slice is not None:
            found = Input(node, node.value, False, is_destroyed)
            operands[node.position] = found
        elif isinstance(node, Transfer) and node.route is Route.PUT:
            origin = program.nodes[node.operand.node]
            if isinstance(origin, Arg | Constant):
                puts.append(Input(origin, node.value, True, is_destroyed))
    return [*(operands[each] for each in sorted(operands)), *puts]


def outputs_of(program: Program) -> list[Ref]:
    """Return the results that a program computes, each once."""
    return [
        ref
        for ref in dict.fromkeys(program.results)
        if not isinstance(program.nodes[ref.node], Arg | Constant)
    ]


def input_slots(lowered: LoweredProgram) -> tuple[Slot, ...]:
    """Return the slots of the inputs, in the order of `inputs_of`."""
    operands = [slot for slot in lowered.args if lowered.values[slot].slice is not None]
    puts = [each.target for each in lowered.instructions if isinstance(each, Put)]
    return (*operands, *puts)


def output_slots(lowered: LoweredProgram) -> tuple[Slot, ...]:
    """Return the slots of the outputs, in the order of `outputs_of`."""
    outside = {*lowered.args, *lowered.constants}
    return tuple(slot for slot in dict.fromkeys(lowered.results) if slot not in outside)


@dataclass(frozen=True, slots=True)
class HostProgram:
    """A program as a host has it.

    Attributes:
        instructions: What this host does.
        computations: The identity of each, in the order in which launches name them.
        slices: On which this host has devices.
        values: What is in each slot.
        moves: Those that this host sends or receives, by number.
        origins: The block that computes what each of them moves, unless it is an input.
        inputs: Their slots.
        outputs: Their slots.
        blocks: The gangs of each block of the whole program.
    """

    instructions: tuple[Instruction, ...]
    computations: tuple[str, ...]
    slices: tuple[str, ...]
    values: tuple[Value, ...]
    moves: Mapping[int, MoveNode]
    origins: Mapping[int, int]
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    blocks: tuple[tuple[int, ...], ...]


def for_host(
    lowered: LoweredProgram, blocks: Sequence[Block], host: str
) -> HostProgram:
    """Return what a host needs of a program; the same for hosts of the same slices."""
    instructions = lowered.for_host(host)
    moves = {
        each.move: lowered.moves[each.move]
        for each in instructions
        if isinstance(each, Send | Receive)
    }
    block_of = {gang: i for i, block in enumerate(blocks) for gang in block.gangs}
    made = {
        slot: block_of[each.gang]
        for each in lowered.instructions
        if isinstance(each, Launch)
        for slot in each.outputs
    }
    return HostProgram(
        instructions=instructions,
        computations=tuple(each.identity for each in lowered.computations),
        slices=tuple(
            name
            for name, place in lowered.places.items()
            if host in place.shards_by_host
        ),
        values=lowered.values,
        moves=moves,
        origins={x: made[m.source] for x, m in moves.items() if m.source in made},
        inputs=input_slots(lowered),
        outputs=output_slots(lowered),
        blocks=tuple(tuple(each.gangs) for each in blocks),
    )
