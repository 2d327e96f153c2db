"""One process of Bytewax: `python -m benchmarks.peers.bytewax_side JSON`, run by `runs`."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import bytewax.operators as op
from bytewax.connectors.files import CSVSource
from bytewax.dataflow import Dataflow, Stream
from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
from bytewax.outputs import (
    DynamicSink,
    FixedPartitionedSink,
    StatefulSinkPartition,
    StatelessSinkPartition,
)
from bytewax.testing import cluster_main

from benchmarks.peers import work
from benchmarks.peers.connectors import (
    LONG_AGO,
    Batches,
    Notebook,
    Sink,
    Source,
    SumSink,
    cpu_of_tree,
)
from benchmarks.peers.runs import Side

ONE_EPOCH = timedelta(hours=1)
EACH_BATCH = timedelta(0)


class Collected(DynamicSink[Any]):
    """Keeps all items of its process."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def build(
        self, _step_id: str, _worker_index: int, _worker_count: int
    ) -> CollectedPartition:
        """Return what appends to the items."""
        return CollectedPartition(self.items)


class CollectedPartition(StatelessSinkPartition[Any]):
    """Appends to a list."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def write_batch(self, items: list[Any]) -> None:
        """Append."""
        self._items += items


class Case:
    """Builds the flow of one case in this process."""

    def __init__(self, side: Side, index: int) -> None:
        self.side = side
        self.index = index
        self.flow = Dataflow(side.case)
        self.out = Collected()
        self.interval = ONE_EPOCH

    def build(self) -> None:
        """Add the steps."""
        getattr(self, self.side.case)()

    def _read(self, make: work.Make | None = None) -> Stream[Any]:
        """Read the stored batches, or those that are made as they are asked for."""
        made = partial(work.stored, Path(self.side.data))
        if make is not None:
            made = partial(make, self.side.size)
        return self._read_made(made, is_lazy=make is not None)

    def _read_made(self, made: Batches, *, is_lazy: bool = False) -> Stream[Any]:
        source = Source(
            made,
            self.side.num_processes,
            Notebook(Path(self.side.folder)),
            self.index,
            is_lazy=is_lazy,
        )
        return op.input("read", self.flow, source)

    def _give(self, stream: Stream[Any]) -> None:
        op.output("out", stream, self.out)

    def word_count(self) -> None:
        """Count words."""
        words = op.flat_map("split", self._read(), str.split)
        self._give(op.count_final("count", words, lambda word: word))

    def keyed_sum(self) -> None:
        """Sum numbers by key."""
        pairs = self._read()
        self._give(op.reduce_final("sum", pairs, lambda a, b: a + b))

    def keyed_sum_arrays(self) -> None:
        """Sum columns by key: each block in numpy, then the pairs."""
        folder = Path(self.side.data)

        def blocks(part: int, num_parts: int) -> Any:
            return ([block] for block in work.stored(folder, part, num_parts))

        pairs = op.flat_map("block_sums", self._read_made(blocks), work.block_sums)
        self._give(op.reduce_final("sum", pairs, lambda a, b: a + b))

    def csv_keyed_sum(self) -> None:
        """Sum numbers by key from a file for each process."""
        data, folder = Path(self.side.data), Path(self.side.folder)
        path = work.csv_paths(data, self.side.num_processes)[self.index]
        rows = op.input("read", self.flow, TimedCSV(path, folder, self.index))
        pairs = op.map("pair", rows, lambda row: (row["key"], int(row["value"])))
        self._give(op.reduce_final("sum", pairs, lambda a, b: a + b))

    def map_and_redistribute(self) -> None:
        """Two maps, with records sent in turn to all workers in between."""
        first = op.map("first", self._read(), lambda n: n + 1)
        second = op.map("second", op.redistribute("spread", first), lambda n: 2 * n)
        op.output("out", second, SumSink(Notebook(Path(self.side.folder))))

    def epochs_pipelined(self) -> None:
        """Epochs of one record that crosses, as fast as they go."""
        self.interval = EACH_BATCH
        notebook = Notebook(Path(self.side.folder))
        sink = Sink(self.side.num_processes, notebook, 0.0, self.index, has_notes=False)
        op.output("out", self._read(), sink)

    def epochs_waiting(self) -> None:
        """Epochs of one record that crosses, each begun when the last one is over."""
        self.interval = EACH_BATCH
        pacer = Pacer(self.side, self.index)
        op.output("out", op.input("read", self.flow, pacer), PacedSink(pacer))

    def huge_epoch(self) -> None:
        """Large arrays in one epoch, for a slow sink in the last process."""
        notebook = Notebook(Path(self.side.folder))
        num_parts = self.side.num_processes
        sink = Sink(num_parts, notebook, work.SECONDS_PER_ITEM, self.index)
        op.output("out", self._read(work.arrays), sink)


class TimedCSV(CSVSource):
    """A CSV file that notes when it was first read."""

    def __init__(self, path: Path, folder: Path, index: int) -> None:
        super().__init__(path, get_fs_id=lambda _: f"process-{index}")
        self._begin = partial(Notebook(folder).begin, index)

    def build_part(self, step_id: str, for_part: str, resume_state: Any) -> Any:
        """Open the file."""
        self._begin()
        return super().build_part(step_id, for_part, resume_state)


class Pacer(FixedPartitionedSource[Any, int]):
    """Sends one record to the next process when the last epoch is over here."""

    def __init__(self, side: Side, index: int) -> None:
        self.index = index
        self.num_processes = side.num_processes
        self.target = str((index + 1) % side.num_processes)
        self.num_epochs = side.size.waits
        self.num_sent = 0
        self.num_over = 0
        self.begin = partial(Notebook(Path(side.folder)).begin, index)

    def list_parts(self) -> list[str]:
        """Return the partition of this process."""
        return [str(self.index)]

    def build_part(
        self, _step_id: str, _for_part: str, _resume_state: int | None
    ) -> PacerPartition:
        """Return the only partition."""
        return PacerPartition(self)


class PacerPartition(StatefulSourcePartition[Any, int]):
    """The partition of a pacer."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer

    def next_batch(self) -> list[Any]:
        """Return one record, if the last epoch is over."""
        pacer = self._pacer
        if pacer.num_over < pacer.num_sent:
            return []
        if pacer.num_sent == pacer.num_epochs:
            raise StopIteration
        if pacer.num_sent == 0:
            pacer.begin()
        pacer.num_sent += 1
        return [(pacer.target, pacer.num_sent)]

    def next_awake(self) -> datetime | None:
        """Return a time gone by: ask again at once."""
        return LONG_AGO

    def snapshot(self) -> int:
        """Return how many were sent."""
        return self._pacer.num_sent


class PacedSink(FixedPartitionedSink[Any, None]):
    """Tells the pacer of its process when an epoch is over."""

    def __init__(self, pacer: Pacer) -> None:
        self.pacer = pacer

    def list_parts(self) -> list[str]:
        """Return the partition of this process."""
        return [str(self.pacer.index)]

    def part_fn(self, item_key: str) -> int:
        """Return the partition that a key names."""
        return int(item_key)

    def build_part(
        self, _step_id: str, _for_part: str, _resume_state: None
    ) -> PacedSinkPartition:
        """Return the only partition."""
        return PacedSinkPartition(self.pacer)


class PacedSinkPartition(StatefulSinkPartition[Any, None]):
    """The partition of a paced sink."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer

    def write_batch(self, values: list[Any]) -> None:
        """Take the record."""

    def snapshot(self) -> None:
        """Note that an epoch is over, which is when this is asked for."""
        self._pacer.num_over += 1


def main() -> None:
    """Run this process's part, and print when it was over and what came out."""
    text = json.loads(sys.argv[1])
    side, index = Side.from_map(text["side"]), text["index"]
    standard_output = os.dup(1)
    os.dup2(2, 1)  # Bytewax tells of its connections on stdout
    case = Case(side, index)
    case.build()
    engine: Any = cluster_main
    engine(case.flow, text["addresses"], index, epoch_interval=case.interval)
    ended, cpu = time.monotonic(), cpu_of_tree()
    items = [[str(key), value] for key, value in case.out.items]
    output = {"ended": ended, "cpu": cpu, "items": items}
    os.write(standard_output, json.dumps(output).encode())


if __name__ == "__main__":
    main()
