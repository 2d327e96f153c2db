"""Fusion: neighbours on one slice become one computation, where the user allows it.

It saves launches, and changes floats in their last bits, since XLA then optimises across
what were borders. What is fused follows from the program alone, so that the results are
the same at every call.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from timelyml.ml.functions import Computation, Options, partition_spec, trace
from timelyml.ml.functions.loading import exported
from timelyml.ml.functions.types import abstract_array
from timelyml.ml.programs.estimates import estimate_ns
from timelyml.ml.programs.ir import Program
from timelyml.ml.programs.nodes import (
    CONTROL,
    Branch,
    Call,
    Loop,
    Ref,
    Region,
    Route,
    Transfer,
    with_regions,
)
from timelyml.ml.programs.rebuild import Rebuilder

BLOCK_NS = 1_000_000
"""How long a fused computation may take, by its estimate: others have to wait for it."""

_INPUT = -1  # stands for a member in a wiring, where the value comes from outside


def fuse(program: Program, *, block_ns: int = BLOCK_NS) -> Program:
    """Join calls on one slice into blocks that take no longer than `block_ns`.

    A call joins the last block of its slice unless the block would take too long. A
    block ends with a value that goes to another slice, which need not wait for more,
    and begins anew for one that comes from there, for which what could run must not
    wait: a pipeline stays one. Calls with callbacks or checks, and calls that were
    traced under other settings, stay apart.

    Args:
        program: One with its transfers, since nothing can be put between members later.
        block_ns: As `estimate_ns` has it. What is longer alone stays alone.
    """
    blocks = _Blocks(program, block_ns)
    for index in range(len(program.nodes)):
        blocks.add(index)
    rebuilder = Rebuilder(program)
    for members in blocks.ordered():
        if len(members) == 1:
            rebuilder.keep(members[0])
            node = rebuilder.nodes[-1]
            if isinstance(node, Branch | Loop):
                rebuilder.nodes[-1] = with_regions(
                    node, lambda region: _fused_region(program, region, block_ns)
                )
        else:
            _join(program, members, rebuilder)
    return rebuilder.program()


def _fused_region(program: Program, region: Region, block_ns: int) -> Region:
    found = fuse(program.inside(region), block_ns=block_ns)
    return Region(found.nodes, found.results)


@dataclass(slots=True)
class _Block:
    """Nodes that become one; most blocks have one member.

    Attributes:
        needs: Blocks that have to come before.
    """

    members: list[int] = field(default_factory=list)
    duration_ns: int = 0
    needs: set[int] = field(default_factory=set)


class _Blocks:
    """The blocks of a program, formed node by node."""

    def __init__(self, program: Program, block_ns: int) -> None:
        self._program = program
        self._block_ns = block_ns
        self._blocks: list[_Block] = []
        self._block_of: dict[int, int] = {}
        self._open: dict[str, int] = {}
        self._readers: dict[Ref, set[int]] = {}
        self._last: dict[tuple[str, int], int] = {}  # by slice and order
        self._leaving = {
            ref.node
            for node in program.nodes
            if isinstance(node, (Transfer, *CONTROL))
            for ref in node.operands
        }

    def add(self, index: int) -> None:
        """Put the next node of the program into a block."""
        node = self._program.nodes[index]
        needs = {self._block_of[ref.node] for ref in node.operands}
        target, duration_ns = len(self._blocks), 0
        if isinstance(node, Call):
            for ref in node.donated:  # it may go only after all that read it
                needs |= self._readers.get(ref, set())
            last = self._last.get((node.slice, node.order)) if node.order else None
            needs |= set() if last is None else {last}
            duration_ns = estimate_ns(node.computation)
            target = self._block_for(node, needs, duration_ns)
            self._last[node.slice, node.order] = target
            self._open[node.slice] = target
            if index in self._leaving or node.has_effects:
                del self._open[node.slice]
        if target == len(self._blocks):
            self._blocks.append(_Block())
        block = self._blocks[target]
        block.members.append(index)
        block.duration_ns += duration_ns
        block.needs |= needs - {target}
        self._block_of[index] = target
        for ref in node.operands:
            self._readers.setdefault(ref, set()).add(target)

    def ordered(self) -> list[list[int]]:
        """Return the members of each block, what a block needs before it."""
        waiting = {number: set(each.needs) for number, each in enumerate(self._blocks)}
        users: dict[int, list[int]] = {}
        for number, needs in waiting.items():
            for needed in needs:
                users.setdefault(needed, []).append(number)
        ready = [number for number, needs in waiting.items() if not needs]
        found = []
        while ready:
            number = heapq.heappop(ready)
            found.append(self._blocks[number].members)
            for user in users.get(number, ()):
                waiting[user].discard(number)
                if not waiting[user]:
                    heapq.heappush(ready, user)
        return found

    def _block_for(self, node: Call, needs: set[int], duration_ns: int) -> int:
        new = len(self._blocks)
        number = self._open.get(node.slice)
        if number is None or node.has_effects:
            return new
        block = self._blocks[number]
        first = self._program.nodes[block.members[0]]
        is_alike = (
            isinstance(first, Call)
            and first.computation.settings == node.computation.settings
            and first.order == node.order
        )
        fits = block.duration_ns + duration_ns <= self._block_ns
        arriving = {each for each in needs if self._arrives(each, node.slice)}
        return number if is_alike and fits and arriving <= block.needs else new

    def _arrives(self, number: int, slice_name: str) -> bool:
        """Whether a block brings what is waited for, on its way from elsewhere."""
        node = self._program.nodes[self._blocks[number].members[0]]
        if isinstance(node, Call):  # earlier on this slice, or on another
            return node.slice != slice_name
        if isinstance(node, Branch | Loop):
            return True
        return isinstance(node, Transfer) and node.route is not Route.PUT


def _join(program: Program, members: Sequence[int], rebuilder: Rebuilder) -> None:
    """Add one call in place of several."""
    place_of = {index: position for position, index in enumerate(members)}
    calls = [node for i in members if isinstance(node := program.nodes[i], Call)]
    inputs: dict[Ref, int] = {}
    wiring = []
    for call in calls:
        wires = []
        for ref in call.operands:
            if ref.node in place_of:
                wires.append((place_of[ref.node], ref.output))
            else:
                wires.append((_INPUT, inputs.setdefault(ref, len(inputs))))
        wiring.append(tuple(wires))
    outputs = _used_outside(program, place_of)
    donated = {ref for call in calls for ref in call.donated}
    fused = _fused(
        tuple(call.computation for call in calls),
        tuple(wiring),
        tuple((place_of[ref.node], ref.output) for ref in outputs),
        tuple(position for ref, position in inputs.items() if ref in donated),
    )
    operands = tuple(map(rebuilder.now, inputs))
    added = rebuilder.add(replace(calls[0], computation=fused, operands=operands))
    for position, ref in enumerate(outputs):
        rebuilder.move(ref, Ref(added, position))


def _used_outside(program: Program, inside: dict[int, int]) -> list[Ref]:
    used = [
        ref
        for index, node in enumerate(program.nodes)
        if index not in inside
        for ref in node.operands
    ]
    return sorted({ref for ref in (*used, *program.results) if ref.node in inside})


@functools.lru_cache(maxsize=256)
def _fused(
    computations: tuple[Computation, ...],
    wiring: tuple[tuple[tuple[int, int], ...], ...],
    outputs: tuple[tuple[int, int], ...],
    donated: tuple[int, ...],
) -> Computation:
    """Trace several computations as one.

    Args:
        computations: In an order in which they can run.
        wiring: For each operand of each, the computation and output that it is, or
            `_INPUT` and the number of an argument of the whole.
        outputs: The computation and output that each result of the whole is.
        donated: Arguments of the whole that are donated.
    """
    arguments: dict[int, tuple[Any, Any]] = {}
    for computation, wires in zip(computations, wiring, strict=True):
        for position, (source, number) in enumerate(wires):
            if source == _INPUT:
                found = computation.in_types[position], computation.in_specs[position]
                arguments.setdefault(number, found)
    types, specs = zip(*(arguments[i] for i in range(len(arguments))), strict=True)

    def fused(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        results: list[Any] = []
        for computation, wires in zip(computations, wiring, strict=True):
            operands = [
                arrays[number] if source == _INPUT else results[source][number]
                for source, number in wires
            ]
            call: Callable[..., Any] = exported(computation).call
            results.append(call(*operands))
        return tuple(results[source][number] for source, number in outputs)

    first = computations[0]
    fused.__name__ = "+".join(dict.fromkeys(each.name for each in computations))
    out_specs = [computations[source].out_specs[number] for source, number in outputs]
    return trace(
        fused,
        tuple(map(abstract_array, types)),
        mesh=first.mesh,
        settings=first.settings,
        options=Options(
            in_shardings=tuple(map(partition_spec, specs)),
            out_shardings=tuple(map(partition_spec, out_specs)),
            donate_argnums=donated,
        ),
        platform=first.platform,
    ).computation
