"""Streams into the sinks of Bytewax, or into objects of their shape.

The driver lists the partitions once, since records are routed by them; the shard
that writes a partition checks that it sees it. Where a partition ends is state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from timelyml.errors import GraphError, PayloadError
from timelyml.exchange import records_of
from timelyml.graph import Exchange, Placement
from timelyml.io.bytewax_positions import POSITIONS, Live, Position
from timelyml.io.bytewax_shapes import (
    Shape,
    SinkPartition,
    check_partition,
    describe,
    list_partitions,
    noting,
    sink_shape,
)
from timelyml.operators import StreamLike, add_operator, keep, take_kept
from timelyml.progress import Timestamp
from timelyml.runtime.operator import Delivery, Logic
from timelyml.runtime.shard import Shard

KEPT = "kept"


def write(
    up: StreamLike,
    sink: Any,
    *,
    whole_epochs: bool = False,
    num_shards: int | None = None,
    placement: Placement | None = None,
    name: str | None = None,
) -> None:
    """Write the records of a stream into a sink of Bytewax.

    A sink has the methods of `FixedPartitionedSink` or of `DynamicSink`; Bytewax need
    not be installed. For the former records are pairs of a string and a value, and
    the string decides on the partition, of which one shard writes each. Partitions are
    closed when the stream is over, and not if the run fails or is cancelled, as in
    Bytewax.

    Args:
        up: Stream to write.
        sink: Shipped to the workers, so what it captures must pickle.
        whole_epochs: Keep records until their epoch is complete, then write epoch
            after epoch; each is written whole, or not begun. Default: write at once.
        num_shards: Default: that of the stream.
        placement: Which worker holds which shard.
        name: Shown in traces and errors, the step id of the sink's partitions, and the
            key of their positions; default: "write".

    Raises:
        GraphError: `sink` has not the shape of a sink, or lists no partitions.
    """
    who = name or "write"
    shape = sink_shape(who, sink)
    parts: tuple[str, ...] = ()
    if shape is Shape.FIXED:
        parts = tuple(list_partitions(who, sink))
        if not parts:
            raise GraphError(
                f"sink {who!r} lists no partitions; got {describe(sink)} with none; "
                f"expected at least one; check that what it writes to exists",
                sink=who,
            )
    writing = _Writing(who, sink, parts)
    pact = Exchange(writing.route) if parts else None
    add_operator(
        "write",
        [up],
        Logic(
            on_start=writing.start,
            on_batch=writing.keep if whole_epochs else writing.write_now,
            on_notify=writing.write_epoch if whole_epochs else None,
            on_frontier=_close_at_end,
            in_order=True,
        ),
        name=name,
        pacts=[pact],
        num_outputs=0,
        states=("state", POSITIONS, KEPT),
        num_shards=num_shards,
        placement=placement,
    )


@dataclass(slots=True)
class _Opened(Live):
    """The partitions that one shard writes, by index, and their names for messages."""

    partitions: dict[int, SinkPartition] = field(default_factory=dict)
    positions: dict[int, Position] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def __reduce__(self) -> Any:
        return _Opened, ()


@dataclass(frozen=True, slots=True)
class _Writing:
    """The callbacks of one sink; shipped with it. No parts: one for each shard."""

    who: str
    sink: Any
    parts: tuple[str, ...]

    def start(self, shard: Shard) -> None:
        opened = shard.state["live"] = _Opened()
        if not self.parts:
            what = f"the partition of shard {shard.index} of {shard.operator!r}"
            with noting(f"while {what} was built"):
                partition = self.sink.build(
                    shard.operator, shard.index, shard.num_shards
                )
            self._open(opened, 0, partition, Position(), what)
            return
        mine = range(shard.index, len(self.parts), shard.num_shards)
        if not mine:
            return
        seen = set(list_partitions(shard.operator, self.sink))
        positions = shard.state_of(POSITIONS)
        for index in mine:
            part = self.parts[index]
            what = f"partition {part!r} of {shard.operator!r}"
            if part not in seen:
                raise GraphError(
                    f"sink {shard.operator!r} lacks {what} on worker "
                    f"{shard.worker_index}; got {sorted(seen)}; expected what the "
                    f"driver listed; make it visible there too",
                    sink=shard.operator,
                    partition=part,
                )
            position = positions.setdefault(part, Position())
            with noting(f"while {what} was built"):
                partition = self.sink.build_part(shard.operator, part, position.value)
            self._open(opened, index, partition, position, what)

    def _open(
        self,
        opened: _Opened,
        index: int,
        partition: SinkPartition,
        position: Position,
        what: str,
    ) -> None:
        check_partition(self.who, partition, "write_batch")
        position.follow(partition)
        opened.partitions[index] = partition
        opened.positions[index] = position
        opened.names[index] = what

    def write_now(self, shard: Shard, delivery: Delivery) -> Iterator[None]:
        return self._write(shard, delivery.payload)

    def keep(self, shard: Shard, delivery: Delivery) -> None:
        shard.notify_at(delivery.time)
        keep(shard.state_of(KEPT), delivery)

    def write_epoch(self, shard: Shard, time: Timestamp) -> Iterator[None]:
        for payload in take_kept(shard.state_of(KEPT), time):
            yield from self._write(shard, payload)

    def _write(self, shard: Shard, payload: Any) -> Iterator[None]:
        opened: _Opened = shard.state["live"]
        for index, items in self._by_partition(payload).items():
            with noting(f"while {opened.names[index]} was written"):
                opened.partitions[index].write_batch(items)
            yield

    def _by_partition(self, payload: Any) -> dict[int, list[Any]]:
        records = list(records_of(payload))
        if not self.parts:
            return {0: records}
        parted: dict[int, list[Any]] = {}
        for record in records:
            parted.setdefault(self._index_of(record), []).append(record[1])
        return parted

    def route(self, payload: Any, num_shards: int) -> npt.NDArray[np.int64]:
        """Return the shard of each record: the one that writes its partition."""
        indices = [self._index_of(record) for record in records_of(payload)]
        return np.asarray(indices, np.int64) % num_shards

    def _index_of(self, record: Any) -> int:
        is_pair = isinstance(record, tuple) and len(record) == 2
        if not (is_pair and isinstance(record[0], str)):
            raise PayloadError(
                f"sink {self.who!r} cannot place a record; got {record!r:.200}; "
                f"expected a tuple of a string and a value; make such pairs before it",
                sink=self.who,
            )
        with noting(f"while {self.who!r} chose a partition for key {record[0]!r}"):
            return int(self.sink.part_fn(record[0])) % len(self.parts)


def _close_at_end(shard: Shard) -> None:
    if shard.frontier():
        return
    opened: _Opened = shard.state["live"]
    for index, position in opened.positions.items():
        position.settle(opened.names[index])
