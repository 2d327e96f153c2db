"""Keeping the blocks of a time until it is complete, in an order that is always the same.

Blocks of several producer shards arrive in any order. What depends on the order,
float sums above all, takes them by producer shard, and within one as they came:
links never reorder, so that order does not depend on timing.
"""

from __future__ import annotations

from typing import Any

from timelyml.exchange import num_records
from timelyml.progress import Timestamp
from timelyml.runtime.operator import Delivery

Cell = dict[Any, Any]
"""State of a shard: from a time to its blocks so far."""


def keep(cell: Cell, delivery: Delivery) -> None:
    """Add a block to those of its time; one without records is not kept."""
    blocks = cell.setdefault(delivery.time, [])
    if num_records(delivery.payload):
        blocks.append((delivery.port, delivery.source_shard, delivery.payload))


def take_kept(cell: Cell, time: Timestamp, port: int = 0) -> list[Any]:
    """Remove and return the payloads that `port` got at `time`, in producer order.

    >>> cell = {}
    >>> for shard, record in [(1, "b"), (0, "a"), (1, "c")]:
    ...     keep(cell, Delivery(0, 7, [record], 1, shard))
    >>> take_kept(cell, 7), cell
    ([['a'], ['b'], ['c']], {})
    """
    blocks = cell.pop(time, [])
    others = [block for block in blocks if block[0] != port]
    if others:
        cell[time] = others
    mine = [block for block in blocks if block[0] == port]
    return [payload for _, _, payload in sorted(mine, key=_producer)]


def _producer(block: tuple[int, int, Any]) -> int:
    return block[1]
