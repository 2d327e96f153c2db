"""Work on single records, in steps that leave the worker to others.

A long block of slow records must neither keep a worker from its other operators
nor keep finished results back: a step takes as many records as fit in about a
millisecond, one at first, and results are sent as soon as they have waited for
`MAX_DELAY_S`. Fast code sends one block for one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from timelyml.progress import Timestamp
from timelyml.runtime.shard import Shard

STEP_S = 0.001
RECORDS_PER_STEP = 64  # at most: the next records may be slow even if these are fast
RECORDS_PER_BLOCK = 8192
MAX_DELAY_S = 0.01

Work = Callable[[list[Any]], Iterable[Any]]
"""From a few records to their results, lazily where there may be many."""


class Pace:
    """How many records fit in a step: doubled while they are fast, else halved."""

    __slots__ = ("_began", "_now", "size")

    def __init__(self, now: Callable[[], float]) -> None:
        self.size = 1
        self._now = now
        self._began = now()

    def step(self) -> float:
        """Adapt to the step that ends here, and return the present time."""
        now = self._now()
        elapsed, self._began = now - self._began, now
        if elapsed > STEP_S:
            self.size = max(1, self.size // 2)
        elif elapsed < STEP_S / 2:
            self.size = min(2 * self.size, RECORDS_PER_STEP)
        return now

    def resume(self) -> None:
        """Do not count the time since `step`: others had the worker."""
        self._began = self._now()


def send_in_steps(
    shard: Shard,
    time: Timestamp,
    records: Iterable[Any],
    work: Work,
    failed: list[Any] | None = None,
) -> Iterator[None]:
    """Send the results of all `records` at `time`; yields every few of them.

    Args:
        shard: The one that works.
        time: Of the records and the results.
        records: What to work on.
        work: See `Work`; results go to output 0.
        failed: What `work` appends here goes to output 1.
    """
    now = shard.now
    remaining = iter(records)
    results: list[Any] = []
    send_by = now() + MAX_DELAY_S
    pace, reading = Pace(now), Pace(now)
    while chunk := list(islice(remaining, pace.size)):
        produced = iter(work(chunk))
        pace.resume()
        while True:
            reading.resume()
            # One more than one result a record ends the chunk at the first look.
            wanted = max(len(chunk) + 1, reading.size)
            before = len(results)
            results.extend(islice(produced, wanted))
            is_chunk_over = len(results) - before < wanted
            is_late = reading.step() >= send_by
            if len(results) >= RECORDS_PER_BLOCK or is_late:
                results = _send(shard, time, results, failed)
                send_by = now() + MAX_DELAY_S
            if is_chunk_over:
                pace.step()
            yield
            if is_chunk_over:
                break
    _send(shard, time, results, failed)


def _send(
    shard: Shard, time: Timestamp, results: list[Any], failed: list[Any] | None
) -> list[Any]:
    """Send what there is, and return a list for what comes next."""
    if results:
        shard.output().send(time, results)
        results = []
    if failed:
        shard.output(1).send(time, failed[:])
        failed.clear()
    return results


def in_chunks(
    shard: Shard, records: Iterable[Any], work: Callable[[list[Any]], object]
) -> Iterator[None]:
    """Call `work` with a few of the records at a time; yields in between."""
    remaining = iter(records)
    pace = Pace(shard.now)
    while chunk := list(islice(remaining, pace.size)):
        pace.resume()
        work(chunk)
        pace.step()
        yield


def in_steps(
    shard: Shard, records: Iterable[Any], visit: Callable[[Any], object]
) -> Iterator[None]:
    """Call `visit` with every record; yields every few of them."""

    def work(chunk: list[Any]) -> None:
        for record in chunk:
            visit(record)

    return in_chunks(shard, records, work)
