"""Blocks: launches of a program that the scheduler orders, and hosts launch, as one.

Neither the controller nor a host should have to say anything for every launch of a long
chain. A block is still short, so that programs of others run in between (the paper's
section 4.5: one message for a subgraph does not make it indivisible).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from timelyml.ml.scheduling import PlacedGang

MAX_BLOCK_LAUNCHES = 16
"""Half of what may be unfinished on a device, so that one block follows another."""

MAX_SINGLE_LAUNCHES = 128
"""The same where all slices of a program are single devices: without collectives, it
does not matter how many launches are unfinished."""

BLOCK_NS = 1_000_000
"""How long the launches of a block may take, by their estimates."""


@dataclass(slots=True)
class Block:
    """Launches on one slice, in their order.

    Attributes:
        gangs: Their indices in the program.
        needs: Blocks that have to be ordered before, by their place in the list.
    """

    island: str
    slice: str
    gangs: list[int] = field(default_factory=list)
    needs: set[int] = field(default_factory=set)
    estimate_ns: int = 0


def cut(
    gangs: Sequence[PlacedGang],
    leaving: Collection[int],
    max_launches: int = MAX_BLOCK_LAUNCHES,
    max_ns: int = BLOCK_NS,
) -> list[Block]:
    """Cut the gangs of a program into blocks; none needs itself or a later one.

    A gang joins the last block of its slice. A block ends with a gang whose results go
    to another slice, which need not wait for more, and begins anew for one that needs
    what comes from there, for which what could run must not wait.

    Args:
        gangs: In an order in which they could run.
        leaving: Those whose results are moved to another slice.
        max_launches: Of a block.
        max_ns: How long they may take, by their estimates.
    """
    blocks: list[Block] = []
    block_of: list[int] = []
    open_: dict[str, int] = {}
    for index, gang in enumerate(gangs):
        needs = {block_of[each] for each in gang.needs}
        number = open_.get(gang.placement)
        most = max_launches, max_ns
        if number is None or not _fits(blocks, number, gang, needs, most):
            number = open_[gang.placement] = len(blocks)
            blocks.append(Block(gang.island, gang.placement))
        block = blocks[number]
        block.gangs.append(index)
        block.needs |= needs - {number}
        block.estimate_ns += gang.estimate_ns or 0
        block_of.append(number)
        if index in leaving:
            del open_[gang.placement]
    return blocks


def _fits(
    blocks: Sequence[Block],
    number: int,
    gang: PlacedGang,
    needs: Collection[int],
    most: tuple[int, int],
) -> bool:
    block = blocks[number]
    max_launches, max_ns = most
    arriving = {each for each in needs if blocks[each].slice != block.slice}
    return (
        len(block.gangs) < max_launches
        and block.estimate_ns + (gang.estimate_ns or 0) <= max_ns
        and arriving <= block.needs
    )
