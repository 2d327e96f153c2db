"""What the controller knows of a program that is registered: where it stands, its blocks.

Blocks are as long as a few milliseconds allow, by what launches of the program were
measured to take; how a program is cut changes nothing but when others may run.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from timelyml.ml.controller.code import Code
from timelyml.ml.controller.records import SliceRecord
from timelyml.ml.hosts import NO_NEEDS
from timelyml.ml.programs import (
    Instruction,
    Launch,
    LoweredProgram,
    Program,
    Put,
    Release,
    Slot,
    Value,
    scratch_bytes,
)
from timelyml.ml.programs.blocks import BLOCK_NS as ESTIMATED_NS
from timelyml.ml.programs.blocks import (
    MAX_BLOCK_LAUNCHES,
    MAX_SINGLE_LAUNCHES,
    cut,
)
from timelyml.ml.programs.shipped import (
    Input,
    for_host,
    input_slots,
    inputs_of,
    output_slots,
    outputs_of,
)
from timelyml.ml.scheduling import (
    DEFAULT_WINDOW_NS,
    WINDOW_ALONE_NS,
    Dispatch,
    PlacedGang,
    SpreadGraph,
)

BLOCK_NS = DEFAULT_WINDOW_NS * 9 // 10
"""What a block should take, as it was measured: then another is ready when it ends."""

BLOCK_ALONE_NS = WINDOW_ALONE_NS * 3 // 4
"""The same while no other client has wanted the devices: the fewer blocks, the less of the
cores goes to ordering them and to telling their ends."""

SHORT_LAUNCH_NS = DEFAULT_WINDOW_NS // 2
MIN_SHORT_LAUNCHES = 4
"""Blocks of launches that are shorter have at least so many, or their number would cost
more than it brings."""


Stand: TypeAlias = tuple[tuple[tuple[int, int], ...], int]
"""The devices of a slice, and how often it went elsewhere."""


class Cut:
    """A lowered program in blocks of at most so many launches.

    Attributes:
        number: What hosts call it.
        blocks: In an order in which they could run.
    """

    def __init__(
        self, number: int, lowered: LoweredProgram, dispatch: Dispatch, most: int
    ) -> None:
        self.number = number
        self._lowered = lowered
        self._dispatch = dispatch
        self._label = f"{lowered.identity}/{most}"
        leaving = {
            each.gang
            for each in lowered.instructions
            if isinstance(each, Launch)
            for slot in each.outputs
            if slot in _moved(lowered)
        }
        timed = {
            each.gang
            for each in _launches(lowered)
            if lowered.computations[each.computation].deadline_s is not None
        }
        if timed:  # each a block of its own, or it would be given the time of others
            most = 1
        # Longer ones are asked for once launches were measured, which is worth more.
        max_ns = ESTIMATED_NS if most <= MAX_BLOCK_LAUNCHES else BLOCK_NS * most
        self.blocks = cut(lowered.gangs, leaving, most, max_ns)
        self._graphs: dict[int, SpreadGraph] = {}

    @cached_property
    def limits(self) -> dict[int, tuple[float, str]]:
        """How long blocks may run all of whose computations state that."""
        computations = self._lowered.computations
        of_gang = {
            x.gang: computations[x.computation] for x in _launches(self._lowered)
        }
        found = {}
        for number, block in enumerate(self.blocks):
            parts = [of_gang[gang] for gang in block.gangs]
            limits = [x.deadline_s for x in parts if x.deadline_s is not None]
            if len(limits) == len(parts):
                names = ", ".join(dict.fromkeys(repr(each.name) for each in parts))
                found[number] = sum(limits), f"computation {names}"
        return found

    @cached_property
    def made(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Of each block, the names of its computations and the outputs it makes."""
        launch_of = {each.gang: each for each in _launches(self._lowered)}
        number_of = {x: number for number, x in enumerate(output_slots(self._lowered))}
        found = []
        for block in self.blocks:
            launches = [launch_of[gang] for gang in block.gangs]
            computations = [self._lowered.computations[x.computation] for x in launches]
            name = " ".join(dict.fromkeys(each.name for each in computations))
            slots = [slot for each in launches for slot in each.outputs]
            outputs = tuple(number_of[slot] for slot in slots if slot in number_of)
            found.append((name, outputs))
        return tuple(found)

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        """The hosts that take part."""
        return tuple(map(int, self._lowered.hosts))

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """The inputs that are moved."""
        moved = _moved(self._lowered)
        slots = enumerate(input_slots(self._lowered))
        return tuple(number for number, slot in slots if slot in moved)

    @cached_property
    def first_hosts(self) -> tuple[int, ...]:
        """The hosts that have something to do before any block is ordered."""
        slots = input_slots(self._lowered)
        names = {str(self._lowered.values[slots[each]].slice) for each in self.sent}
        places = [self._lowered.places[name] for name in names]
        return tuple({int(host) for place in places for host in place.shards_by_host})

    @cached_property
    def roots(self) -> list[tuple[int, int]]:
        """The blocks that need no other, as those that wait for other work do so there.

        Each with the input that it counts first.
        """
        return [
            (number, 0) for number, block in enumerate(self.blocks) if not block.needs
        ]

    def graph(self, num_waits: int = 0) -> SpreadGraph:
        """Return the blocks as gangs, which wait for so much other work first."""
        graph = self._graphs.get(num_waits)
        if graph is None:
            graph = self._graphs[num_waits] = self._make_graph(num_waits)
        return graph

    def pickled(self) -> Iterator[tuple[int, bytes]]:
        """Return what each host has to know."""
        known: dict[tuple[str, ...], bytes] = {}
        for host in self._lowered.hosts:
            program = for_host(self._lowered, self.blocks, host)
            if program.slices not in known:
                known[program.slices] = pickle.dumps(program)
            yield int(host), known[program.slices]

    def _make_graph(self, num_waits: int) -> SpreadGraph:
        gangs = [
            PlacedGang(
                block.island,
                f"{self._label}/{number}",
                block.slice,
                tuple(sorted(block.needs)),
                num_external=0 if block.needs else num_waits,
                estimate_ns=block.estimate_ns,
            )
            for number, block in enumerate(self.blocks)
        ]
        return SpreadGraph(gangs, self._dispatch)


@dataclass(slots=True)
class RegisteredProgram:
    """A program that a client registered.

    Attributes:
        program: With its transfers.
        given: Those of its inputs that a call gives away.
        is_collected: Whether it is calls that have nothing else in common.
        slices: All that it uses.
        inputs: What a call has to bring.
        outputs: What it computes.
        destroyed: Those of its inputs whose memory it takes.
        codes: Its computations, and where they run.
        placements: The devices of each of its slices when it was lowered.
        lowered: For those.
        launch_ns: What a launch was measured to take, on average.
    """

    program: Program
    dispatch: Dispatch
    given: tuple[int, ...]
    is_collected: bool = False
    slices: tuple[str, ...] = ()
    inputs: list[Input] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    destroyed: tuple[int, ...] = ()
    codes: tuple[tuple[str, str], ...] = ()
    placements: tuple[Stand, ...] = ()
    lowered: LoweredProgram | None = None
    cuts: dict[int, Cut] = field(default_factory=dict)
    launch_ns: float = 0.0
    most: int = MAX_BLOCK_LAUNCHES
    _longest: int = MAX_BLOCK_LAUNCHES
    _scratch: dict[str, int] | None = None

    def __post_init__(self) -> None:
        program = self.program
        self.slices = tuple(each.name for each in program.slices)
        self.inputs = inputs_of(program)
        self.outputs = [program.value(ref) for ref in outputs_of(program)]
        self.destroyed = tuple(
            number for number, each in enumerate(self.inputs) if each.is_destroyed
        )
        codes = ((call.computation.identity, call.slice) for _, call in program.calls())
        self.codes = tuple(dict.fromkeys(codes))
        if self.dispatch is Dispatch.SEQUENTIAL:
            self.most = 1

    @property
    def name(self) -> str:
        """What people call it."""
        return self.program.name

    @property
    def taken(self) -> list[Value]:
        """What each of its inputs has to be."""
        return [each.value for each in self.inputs]

    def place(self, lowered: LoweredProgram, placements: tuple[Stand, ...]) -> None:
        """Take note of what the program is where its slices stand now."""
        self.lowered, self.placements = lowered, placements
        self.cuts.clear()
        is_single = all(len(devices) == 1 for devices, _ in placements)
        self._longest = MAX_SINGLE_LAUNCHES if is_single else MAX_BLOCK_LAUNCHES
        self.most = min(self.most, self._longest)

    def scratch(self, code: Code, slices: Mapping[str, SliceRecord]) -> dict[str, int]:
        """Return what a call takes on each device, by slice, beyond its results.

        Args:
            code: Has all needs of the program's computations by now.
            slices: All slices.
        """
        if self._scratch is None and self.lowered is not None:
            needs = {
                identity: code.needs(identity, slices[name]) or NO_NEEDS
                for identity, name in self.codes
            }
            self._scratch = scratch_bytes(
                _without_puts(self.lowered),
                lambda computation: needs[computation.identity],
            )
        return self._scratch or {}

    def measured(self, device_ns: int, num_launches: int, *, is_alone: bool) -> None:
        """Learn from a block; cut shorter, or longer, where that is far from right.

        Args:
            device_ns: What it took.
            num_launches: How many it has.
            is_alone: Whether no other client has wanted its devices.
        """
        mean = device_ns / num_launches
        self.launch_ns += (mean - (self.launch_ns or mean)) / 8
        self.launch_ns = self.launch_ns or mean
        if self.dispatch is Dispatch.SEQUENTIAL:
            return
        block_ns = BLOCK_ALONE_NS if is_alone else BLOCK_NS
        wanted = block_ns / max(self.launch_ns, 1)
        least = MIN_SHORT_LAUNCHES if self.launch_ns < SHORT_LAUNCH_NS else 1
        if wanted < self.most and self.most > least:
            self.most //= 2
        elif wanted > self.most * 4 and self.most < self._longest:
            self.most *= 2


class Ancestry:
    """What each output of a program depends on; only looked at when something failed."""

    def __init__(self, lowered: LoweredProgram) -> None:
        self._inputs = {slot: i for i, slot in enumerate(input_slots(lowered))}
        self._outputs = output_slots(lowered)
        self._origin = {each.target: each.source for each in lowered.moves}
        self._maker = {
            slot: each for each in _launches(lowered) for slot in each.outputs
        }

    def maker(self, output: int) -> int | None:
        """Return the gang that makes an output; None of one that is an input."""
        slot = self._outputs[output]
        launch = self._maker.get(self._origin.get(slot, slot))
        return None if launch is None else launch.gang

    def of(self, output: int) -> tuple[set[int], list[int]]:
        """Return the inputs, and the gangs in their order, that an output depends on."""
        inputs: set[int] = set()
        gangs: set[int] = set()
        pending = [self._outputs[output]]
        while pending:
            slot = pending.pop()
            slot = self._origin.get(slot, slot)
            if slot in self._inputs:
                inputs.add(self._inputs[slot])
                continue
            launch = self._maker[slot]
            if launch.gang not in gangs:
                gangs.add(launch.gang)
                pending += launch.operands
        return inputs, sorted(gangs)


def _without_puts(lowered: LoweredProgram) -> LoweredProgram:
    """Leave out what is put for a call and stays: that has memory of its own."""
    donated = {x for each in _launches(lowered) for x in each.donated}
    puts = {
        each.target
        for each in lowered.instructions
        if isinstance(each, Put) and each.target not in donated
    }
    kept: list[Instruction] = []
    for each in lowered.instructions:
        if isinstance(each, Release):
            slots = tuple(slot for slot in each.slots if slot not in puts)
            kept += [Release(slots)] if slots else []
        elif not (isinstance(each, Put) and each.target in puts):
            kept.append(each)
    return replace(lowered, instructions=tuple(kept))


def _launches(lowered: LoweredProgram) -> list[Launch]:
    return [each for each in lowered.instructions if isinstance(each, Launch)]


def _moved(lowered: LoweredProgram) -> set[Slot]:
    return {each.source for each in lowered.moves}
