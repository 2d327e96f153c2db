"""The join of columns of all times: a sort per block, and binary searches.

Each side keeps its rows in blocks that are sorted by key. A new block meets each of the
other side, and is merged with those of its own side that are not much larger, so that
there are few, and each row is sorted a few times at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from timelyml.exchange import concat, records_of
from timelyml.operators.columns import Columns
from timelyml.operators.grouping import Array
from timelyml.operators.join_columns import (
    NOTHING,
    ROWS_PER_BLOCK,
    ColumnJoin,
    comparable,
    matches,
)
from timelyml.progress import Timestamp
from timelyml.runtime.shard import Shard

SIDES = ("left", "right")
BLOCKS = "blocks"
"""Where the state of a side has its blocks."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one side, by ascending key.

    Attributes:
        keys: Of the rows.
        columns: All columns, the key's included.
        times: Of each row, one number a coordinate: `(rows, depth)`.
        has_met: Whether each row had a partner.
    """

    keys: Array
    columns: Columns
    times: Array
    has_met: Array

    def __len__(self) -> int:
        return len(self.keys)

    def chosen(self, rows: Array) -> Block:
        """Return some of its rows."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        return Block(self.keys[rows], columns, self.times[rows], self.has_met[rows])

    def merged(self, other: Block) -> Block:
        """Return the rows of both; its own come first among equal keys."""
        both = Block(
            np.concatenate([self.keys, other.keys]),
            concat([self.columns, other.columns]),
            np.concatenate([self.times, other.times]),
            np.concatenate([self.has_met, other.has_met]),
        )
        return both.chosen(np.argsort(both.keys, kind="stable"))


class ColumnsAcross:
    """Joins the columns of all times; see `join`.

    Args:
        columns: Joins two blocks.
        ttl_epochs: See `join`.
        sends: For each side, whether rows without a partner are sent.
    """

    def __init__(
        self, columns: ColumnJoin, ttl_epochs: int | None, sends: tuple[bool, bool]
    ) -> None:
        self._columns = columns
        self._ttl_epochs = ttl_epochs
        self._sends = sends

    def meet(
        self, shard: Shard, time: Timestamp, port: int, payloads: list[Any]
    ) -> Iterator[None]:
        """Let the new rows of one side meet all of the other, and keep them."""
        known = shard.state_of("columns")
        columns = self._columns.columns_of(payloads, port, known)
        if columns is None or not payloads:
            return
        new = self._sorted(columns, time, port)
        for other in _blocks_of(shard, 1 - port):
            self._columns.check_kinds(new.keys, other.keys, port)
            keys = comparable(new.keys, other.keys)
            for at, to in matches(*keys, keeps_all=False):
                near = self._near(other.times[to], new.times[0])
                at, to = at[near], to[near]  # noqa: PLW2901  narrowed
                new.has_met[at] = other.has_met[to] = True
                yield from self._send(shard, (new, at), (other, to), port)
        _add(shard, port, new)

    def expire(self, shard: Shard, epoch: int) -> Iterator[None]:
        """Forget what no later row can meet; send what never had a partner."""
        assert self._ttl_epochs is not None  # noqa: S101  the caller saw
        for port in (0, 1):
            kept = []
            for block in _blocks_of(shard, port):
                is_old = block.times[:, 0] + self._ttl_epochs <= epoch
                if not is_old.any():
                    kept.append(block)
                    continue
                alone = np.flatnonzero(is_old & ~block.has_met)
                if self._sends[port] and len(alone):
                    yield from self._send_alone(
                        shard, epoch, block.columns, alone, port
                    )
                kept.append(block.chosen(np.flatnonzero(~is_old)))
            _put(shard, port, kept)

    def take_records(
        self, shard: Shard, port: int
    ) -> Iterator[tuple[Timestamp, Any, Any, bool]]:
        """Remove the rows of one side; yields time, key, record and whether it met."""
        blocks = _blocks_of(shard, port)
        _put(shard, port, [])
        for block in blocks:
            for row, key in enumerate(block.keys.tolist()):
                time = tuple(block.times[row].tolist())
                one = {
                    name: values[row : row + 1]
                    for name, values in block.columns.items()
                }
                (record,) = records_of(one)
                is_epoch = len(time) == 1
                yield (
                    time[0] if is_epoch else time,
                    key,
                    record,
                    bool(block.has_met[row]),
                )

    def _sorted(self, columns: Columns, time: Timestamp, port: int) -> Block:
        keys = self._columns.key_of(columns, port)
        order = np.argsort(keys, kind="stable")
        coordinates = np.array([time] if isinstance(time, int) else time, np.int64)
        times = np.broadcast_to(coordinates, (len(keys), len(coordinates)))
        rows = {name: values.take(order, axis=0) for name, values in columns.items()}
        return Block(keys[order], rows, times, np.zeros(len(keys), np.bool_))

    def _near(self, times: Array, now: Array) -> Array:
        """Return which of some times are near enough to meet what is new."""
        if self._ttl_epochs is None:
            return np.ones(len(times), np.bool_)
        near: Array = times[:, 0] + self._ttl_epochs >= now[0]
        return near

    def _send(
        self,
        shard: Shard,
        new: tuple[Block, Array],
        other: tuple[Block, Array],
        port: int,
    ) -> Iterator[None]:
        """Send joined rows, each at the join of its times."""
        (mine, at), (theirs, to) = new, other
        if not len(at):
            return
        times = np.maximum(mine.times[0], theirs.times[to])
        distinct = times[:1]
        if (times != distinct).any():  # never outside of scopes: epochs are in order
            distinct = np.unique(times, axis=0)
        for time in distinct.tolist():
            chosen = (times == time).all(axis=1)
            sides = (mine.columns, at[chosen]), (theirs.columns, to[chosen])
            left, right = sides if port == 0 else sides[::-1]
            joined = self._columns.joined(left[0], right[0], left[1], right[1])
            shard.output().send(time[0] if len(time) == 1 else tuple(time), joined)
            yield

    def _send_alone(
        self, shard: Shard, epoch: int, columns: Columns, alone: Array, port: int
    ) -> Iterator[None]:
        others = self._columns.known(1 - port, shard.state_of("columns"))
        for start in range(0, len(alone), ROWS_PER_BLOCK):
            rows = alone[start : start + ROWS_PER_BLOCK]
            nothing = np.full(len(rows), NOTHING)
            if port == 0:
                joined = self._columns.joined(columns, others, rows, nothing)
            else:
                joined = self._columns.joined(others, columns, nothing, rows)
            shard.output().send(epoch, joined)
            yield


def _blocks_of(shard: Shard, port: int) -> list[Block]:
    blocks: list[Block] = shard.state_of(SIDES[port]).get(BLOCKS, [])
    return blocks


def _add(shard: Shard, port: int, new: Block) -> None:
    blocks = list(_blocks_of(shard, port))
    while blocks and len(blocks[-1]) <= 2 * len(new):
        new = blocks.pop().merged(new)
    _put(shard, port, [*blocks, new])


def _put(shard: Shard, port: int, blocks: list[Block]) -> None:
    side = shard.state_of(SIDES[port])
    side.pop(BLOCKS, None)
    blocks = [block for block in blocks if len(block)]
    if blocks:
        side[BLOCKS] = blocks
