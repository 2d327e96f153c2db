"""What a source reads, as bounded pieces with their epochs.

A reader is a plain description that is shipped to every worker. `pieces` opens it for
one shard at a position that an earlier piece reported, so that what has been read
need not be remembered.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from timelyml.errors import GraphError, TimeError
from timelyml.exchange import as_payload, num_records, size_bytes, slice_rows
from timelyml.operators.async_reading import Pump
from timelyml.operators.loop_thread import LoopThread
from timelyml.runtime.shard import Shard

RECORDS_PER_BATCH = 1024
BYTES_PER_BATCH = 4 << 20  # an eighth of the default credit of a channel
RECORDS_PER_LOOK = 16
MAX_DELAY_S = 0.01


class Piece(NamedTuple):
    """One bounded batch, and where the source stands after it.

    Attributes:
        epoch: Its timestamp.
        payload: Records or columns.
        next_epoch: The first epoch that may still get something.
        is_last: Whether the block of this epoch ends with it.
        position: From where to read on.
    """

    epoch: int
    payload: Any
    next_epoch: int
    is_last: bool
    position: tuple[int, int]


Pieces = Iterator[Piece | None]
"""Pieces in order; None where there is nothing yet, but may be later."""

START = (0, 0)
"""The position before anything was read."""


class Reader(Protocol):
    """Something that a source can read."""

    def pieces(self, shard: Shard, position: tuple[int, int]) -> Pieces:
        """Read what belongs to one shard, from `position` on."""
        ...

    def close(self) -> None:
        """Free what is not freed with the pieces."""
        ...


@dataclass(frozen=True, slots=True)
class RecordReader:
    """Reads an iterable on shard 0, in batches of records.

    A batch is sent before it is full if its records are slow to come; epochs go by
    the number of records, so they do not depend on that.
    """

    records: Iterable[Any]
    batch_size: int
    records_per_epoch: int | None

    def close(self) -> None:
        """Do nothing: what is open is freed with the pieces."""

    def pieces(self, shard: Shard, position: tuple[int, int]) -> Pieces:
        """Read everything on shard 0, from record `position[0]` on."""
        if shard.index:
            return
        index = position[0]
        remaining = islice(iter(self.records), index, None)
        while True:
            epoch, room = self.epoch_of(index)
            batch = _promptly(remaining, min(self.batch_size, room), shard.now)
            if not batch:
                return
            index += len(batch)
            next_epoch, _ = self.epoch_of(index)
            yield Piece(epoch, batch, next_epoch, next_epoch > epoch, (index, 0))

    def epoch_of(self, index: int) -> tuple[int, int]:
        """Return the epoch of a record, and how many records it still takes."""
        if self.records_per_epoch is None:
            return 0, self.batch_size
        epoch, used = divmod(index, self.records_per_epoch)
        return epoch, self.records_per_epoch - used


@dataclass(frozen=True, slots=True)
class AsyncRecordReader:
    """Reads an async iterable on shard 0: what has come so far, in batches."""

    records: AsyncIterable[Any]
    batch_size: int
    records_per_epoch: int | None
    loop: LoopThread = field(default_factory=LoopThread)

    def close(self) -> None:
        """End the thread that reads it, if there is one."""
        self.loop.close()

    def pieces(self, shard: Shard, position: tuple[int, int]) -> Pieces:
        """Read everything on shard 0, from record `position[0]` on."""
        if shard.index:
            return
        batch = _Arrived(Pump(self.loop, _boxed(self.records), shard.waker()))
        plain = RecordReader((), self.batch_size, self.records_per_epoch)
        index = 0
        while True:
            epoch, room = plain.epoch_of(index)
            records = batch.take(min(self.batch_size, room))
            if not records:
                if batch.is_over:
                    return
                yield None
                continue
            index += len(records)
            if index > position[0]:
                fresh = records[max(0, len(records) - (index - position[0])) :]
                next_epoch, _ = plain.epoch_of(index)
                yield Piece(epoch, fresh, next_epoch, next_epoch > epoch, (index, 0))


class _Arrived:
    """Boxed records of a pump, as far as they have come."""

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        self.is_over = False

    def take(self, most: int) -> list[Any]:
        """Return up to `most` of them."""
        records: list[Any] = []
        while len(records) < most and not self.is_over:
            box = next(self._pump, ())
            if box is None:
                break
            self.is_over = box == ()
            records += box
        return records


async def _boxed(records: AsyncIterable[Any]) -> AsyncIterator[tuple[Any]]:
    """Yield each record in a tuple, so that None is a record like any other."""
    async for record in records:
        yield (record,)


@dataclass(frozen=True, slots=True)
class ColumnReader:
    """Reads columns: one contiguous range of rows per shard, cut into batches.

    Every shard has the same number of batches, where one more row on some shards
    may leave the others an empty one.
    """

    columns: Any
    batch_size: int | None
    batches_per_epoch: int | None

    def close(self) -> None:
        """Do nothing: what is open is freed with the pieces."""

    def pieces(self, shard: Shard, position: tuple[int, int]) -> Pieces:
        """Read the rows of one shard, from batch `position[0]` on."""
        rows = num_records(self.columns)
        start = shard.index * rows // shard.num_shards
        stop = (shard.index + 1) * rows // shard.num_shards
        size = self.batch_size or _rows_per_batch(self.columns)
        most_rows = -(-rows // shard.num_shards)
        num_batches = -(-most_rows // size)
        per_epoch = self.batches_per_epoch or max(num_batches, 1)
        for batch in range(position[0], num_batches):
            epoch, next_epoch = batch // per_epoch, (batch + 1) // per_epoch
            is_last = next_epoch > epoch or batch + 1 == num_batches
            low = min(start + batch * size, stop)
            payload = slice_rows(self.columns, low, min(low + size, stop))
            yield Piece(epoch, payload, next_epoch, is_last, (batch + 1, 0))


@dataclass(frozen=True, slots=True)
class FunctionReader:
    """Reads what a function of the user gives each shard, one payload at a time."""

    name: str
    fn: Callable[[int, int], Iterable[Any] | AsyncIterable[Any]]
    batch_size: int | None
    loop: LoopThread = field(default_factory=LoopThread)

    def close(self) -> None:
        """End the thread that reads async iterators, if there is one."""
        self.loop.close()

    def pieces(self, shard: Shard, position: tuple[int, int]) -> Pieces:
        """Read one shard's items, from item `position[0]` and its epoch on."""
        num_skipped, epoch = position
        num_items = 0
        for item in self._open(shard):
            if item is None:
                yield None
                continue
            num_items += 1
            if num_items <= num_skipped:
                continue
            time, payload = _split_item(item)
            if time is not None and time < epoch:
                raise TimeError(
                    f"source {self.name!r} cannot move backwards; got epoch {time}; "
                    f"expected {epoch} or later; yield payloads in order of time",
                    source=self.name,
                    time=time,
                )
            epoch = epoch if time is None else time
            next_epoch = epoch + 1 if time is None else epoch
            yield from self._cut(epoch, payload, next_epoch, num_items)
            epoch = next_epoch

    def _open(self, shard: Shard) -> Iterator[Any]:
        opened = self.fn(shard.index, shard.num_shards)
        if isinstance(opened, AsyncIterable):
            return Pump(self.loop, opened, shard.waker())
        try:
            return iter(opened)
        except TypeError:
            raise GraphError(
                f"source {self.name!r} has nothing to read on shard {shard.index}; got "
                f"{opened!r}; expected an iterator of payloads; yield them, or return "
                f"a list of them",
                source=self.name,
            ) from None

    def _cut(
        self, epoch: int, payload: Any, next_epoch: int, num_items: int
    ) -> Iterator[Piece]:
        """Give one item in pieces of at most `batch_size` records."""
        payload = as_payload(payload)
        rows = num_records(payload)
        size = self.batch_size or max(rows, 1)
        for start in range(0, max(rows, 1), size):
            stop = start + size
            is_last = stop >= rows
            part = payload if size >= rows else slice_rows(payload, start, stop)
            yield Piece(
                epoch,
                part,
                next_epoch if is_last else epoch,
                is_last,
                (num_items, next_epoch),
            )


def _split_item(item: Any) -> tuple[int | None, Any]:
    """Part an item `(time, payload)`; a number alone never is a column."""
    if type(item) is tuple and len(item) == 2:
        time, payload = item
        if isinstance(time, (int, np.integer)) and not isinstance(time, bool):
            return int(time), payload
    return None, item


def _promptly(records: Iterator[Any], most: int, now: Callable[[], float]) -> list[Any]:
    """Take up to `most` records: fewer, but at least one, if they are slow or large."""
    batch: list[Any] = []
    send_by = now() + MAX_DELAY_S
    weigh_at = RECORDS_PER_LOOK
    while len(batch) < most:
        wanted = min(RECORDS_PER_LOOK, most - len(batch))
        taken = list(islice(records, wanted))
        batch += taken
        if len(taken) < wanted or now() >= send_by:
            break
        if len(batch) >= weigh_at:
            if size_bytes(batch) >= BYTES_PER_BATCH:
                break
            weigh_at *= 2
    return batch


def _rows_per_batch(columns: Any) -> int:
    rows = num_records(columns)
    row_bytes = max(1, size_bytes(columns) // max(rows, 1))
    return max(1, BYTES_PER_BATCH // row_bytes)
