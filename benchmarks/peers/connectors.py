"""The sources and sinks that both engines read and write, and what they note.

Each partition notes when it was first read, so that what came before, imports and
connections, is not measured. One that is asked to also notes how many bytes it has
handed over or taken, and when.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
from bytewax.outputs import (
    DynamicSink,
    FixedPartitionedSink,
    StatefulSinkPartition,
    StatelessSinkPartition,
)

Batches = Callable[[int, int], Iterator[list[Any]]]
"""From a partition and the number of partitions to its batches."""

LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)
CPU_CLOCK = 2  # of the clocks that Linux has of each process: all its threads


@dataclass(frozen=True)
class Notebook:
    """A folder in which partitions leave what they note."""

    folder: Path

    def write(self, name: str, value: Any) -> None:
        """Leave a value under a name."""
        (self.folder / f"{name}.json").write_text(json.dumps(value))

    def begin(self, part: object) -> None:
        """Note that a partition is read for the first time: the time, and CPU time."""
        times = {"at": time.monotonic(), "cpu": time.process_time()}
        self.write(f"first-{part}", {**times, "process": os.getpid()})

    def read(self, prefix: str) -> list[Any]:
        """Return all values whose names begin so."""
        paths = sorted(self.folder.glob(f"{prefix}*.json"))
        return [json.loads(path.read_text()) for path in paths]


class Source(FixedPartitionedSource[Any, int]):
    """Batches that a function makes, one partition for each process.

    Args:
        make: Makes the batches of a partition before the first is asked for.
        num_parts: Number of partitions.
        notebook: For notes.
        local: The only partition that this process sees; None: it sees all.
        is_lazy: Make batches as they are asked for, and note their bytes.
    """

    def __init__(
        self,
        make: Batches,
        num_parts: int,
        notebook: Notebook,
        local: int | None = None,
        *,
        is_lazy: bool = False,
    ) -> None:
        self.make = make
        self.num_parts = num_parts
        self.notebook = notebook
        self.local = local
        self.is_lazy = is_lazy

    def list_parts(self) -> list[str]:
        """Return the partitions that this process sees."""
        return _parts(self.num_parts, self.local)

    def build_part(
        self, _step_id: str, for_part: str, _resume_state: int | None
    ) -> SourcePartition:
        """Make the batches of a partition."""
        batches = self.make(int(for_part), self.num_parts)
        made = batches if self.is_lazy else iter(list(batches))
        return SourcePartition(for_part, made, self.notebook, is_lazy=self.is_lazy)


class SourcePartition(StatefulSourcePartition[Any, int]):
    """Batches of one partition."""

    def __init__(
        self,
        part: str,
        batches: Iterator[list[Any]],
        notebook: Notebook,
        *,
        is_lazy: bool,
    ) -> None:
        self._part = part
        self._batches = batches
        self._notebook = notebook
        self._flow = FlowNotes(f"made-{part}", notebook) if is_lazy else None
        self._num_read = 0

    def next_batch(self) -> list[Any]:
        """Return the next batch."""
        if not self._num_read:
            self._notebook.begin(self._part)
        self._num_read += 1
        batch = next(self._batches)
        if self._flow is not None:
            self._flow.note(batch)
        return batch

    def next_awake(self) -> datetime | None:
        """Return a time gone by: ask again at once."""
        return LONG_AGO

    def snapshot(self) -> int:
        """Return how many batches were read."""
        return self._num_read

    def close(self) -> None:
        """Leave the notes."""
        if self._flow is not None:
            self._flow.close()


class Sink(FixedPartitionedSink[Any, None]):
    """Takes each value slowly, and notes bytes; partitions by number."""

    def __init__(
        self,
        num_parts: int,
        notebook: Notebook,
        seconds_per_value: float,
        local: int | None = None,
        *,
        has_notes: bool = True,
    ) -> None:
        self.num_parts = num_parts
        self.has_notes = has_notes
        self.notebook = notebook
        self.seconds_per_value = seconds_per_value
        self.local = local

    def list_parts(self) -> list[str]:
        """Return the partitions that this process sees."""
        return _parts(self.num_parts, self.local)

    def part_fn(self, item_key: str) -> int:
        """Return the partition that a key names."""
        return int(item_key)

    def build_part(
        self, _step_id: str, for_part: str, _resume_state: None
    ) -> SinkPartition:
        """Open a partition."""
        return SinkPartition(for_part, self)


class SinkPartition(StatefulSinkPartition[Any, None]):
    """Takes values, each with so many seconds of work."""

    def __init__(self, part: str, sink: Sink) -> None:
        self._seconds = sink.seconds_per_value
        name = f"taken-{part}"
        self._flow = FlowNotes(name, sink.notebook) if sink.has_notes else None

    def write_batch(self, values: list[Any]) -> None:
        """Take some values."""
        if self._flow is None:
            return
        for value in values:
            until = time.perf_counter() + self._seconds
            while time.perf_counter() < until:
                pass
            self._flow.note([value])

    def snapshot(self) -> None:
        """Keep no position."""

    def close(self) -> None:
        """Leave the notes."""
        if self._flow is not None:
            self._flow.close()


class SumSink(DynamicSink[int]):
    """Adds numbers up, and leaves the sum."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook = notebook

    def build(self, _step_id: str, worker_index: int, _count: int) -> SumPartition:
        """Return what adds up the numbers of one worker or shard."""
        return SumPartition(self.notebook, worker_index)


class SumPartition(StatelessSinkPartition[int]):
    """The sum of one worker or shard."""

    def __init__(self, notebook: Notebook, index: int) -> None:
        self._notebook = notebook
        self._index = index
        self._total = 0

    def write_batch(self, items: list[int]) -> None:
        """Add some numbers."""
        self._total += sum(items)

    def close(self) -> None:
        """Leave the sum."""
        self._notebook.write(f"sum-{self._index}", self._total)


class FlowNotes:
    """How many bytes have passed somewhere, by time, and the memory of the process."""

    def __init__(self, name: str, notebook: Notebook) -> None:
        self._name = name
        self._notebook = notebook
        self._so_far = 0
        self._passed: list[tuple[float, int]] = []
        self._rss_before = rss_bytes()

    def note(self, values: list[Any]) -> None:
        """Count some values: pairs of a key and an array, or arrays."""
        for value in values:
            array = value[1] if isinstance(value, tuple) else value
            self._so_far += array.nbytes
        self._passed.append((time.monotonic(), self._so_far))

    def close(self) -> None:
        """Leave what was noted."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        growth = {"process": os.getpid(), "growth": peak - self._rss_before}
        self._notebook.write(f"memory-{self._name}", growth)
        self._notebook.write(self._name, self._passed)


def cpu_of_tree() -> dict[str, float]:
    """Return the CPU time so far of this process and of its children, by process."""
    processes = [os.getpid()]
    for thread in Path("/proc/self/task").iterdir():
        processes += map(int, (thread / "children").read_text().split())
    # The clock of a process counts nanoseconds; its `stat` 10 ms, as long as small runs.
    return {
        str(process): time.clock_gettime((~process << 3) | CPU_CLOCK)
        for process in processes
    }


def rss_bytes() -> int:
    """Return the memory that this process has resident now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _parts(num_parts: int, local: int | None) -> list[str]:
    return [str(part) for part in range(num_parts) if local in (None, part)]
