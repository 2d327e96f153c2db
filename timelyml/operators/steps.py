"""Work on single records, in steps that leave the worker to others.

A long block of slow records must neither keep a worker from its other operators
nor keep finished results back: a step takes as many records as fit in about a
millisecond, one at first; the others have the worker after about a millisecond of
steps; and results are sent as soon as they have waited for `MAX_DELAY_S`, or are so
large that credit could not bound them. Fast code sends one block for one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from timelyml.exchange import size_bytes
from timelyml.progress import Timestamp
from timelyml.runtime.operator import Steps
from timelyml.runtime.shard import Shard

STEP_S = 0.001
RECORDS_PER_STEP = 1024  # at most: the next records may be slow even if these are fast
STEPS_PER_YIELD = 16  # at most: a yield costs as much as ten fast records
RECORDS_PER_BLOCK = 8192
BYTES_PER_BLOCK = 4 << 20  # about: an eighth of the default credit of a channel
MAX_DELAY_S = 0.01

Work = Callable[[list[Any]], Iterable[Any]]
"""From a few records to their results, lazily where there may be many."""


class Pace:
    """How many records fit in a step, doubled while they are fast, else halved.

    It also tells when the others should have the worker.
    """

    __slots__ = ("_now", "_num_steps", "_resumed", "began", "size")

    def __init__(self, now: Callable[[], float], size: int = 1) -> None:
        self.size = size
        self._now = now
        self.began = self._resumed = now()
        self._num_steps = 0

    def step(self, num_records: int) -> float:
        """Adapt to the step of so many records that ends here; return the time."""
        now = self._now()
        elapsed, self.began = now - self.began, now
        self._num_steps += 1
        if elapsed > STEP_S:
            self.size = max(1, self.size // 2)
        elif elapsed < STEP_S / 2 and self.size <= num_records:  # it was a full one
            self.size = min(2 * self.size, RECORDS_PER_STEP)
        return now

    @property
    def is_over(self) -> bool:
        """Whether it is time to yield."""
        worked_s = self.began - self._resumed
        return worked_s >= STEP_S / 2 or self._num_steps >= STEPS_PER_YIELD

    def resume(self) -> None:
        """Begin after a yield: do not count the time that others had the worker."""
        self.began = self._resumed = self._now()
        self._num_steps = 0


def send_results(
    shard: Shard,
    time: Timestamp,
    records: Iterable[Any],
    work: Work,
    failed: list[Any] | None = None,
) -> Steps:
    """As `send_in_steps`; at once, and without steps, if all fit in one."""
    size = shard.records_per_step
    if not isinstance(records, list) or len(records) > size:
        return send_in_steps(shard, time, records, work, failed)
    pace = Pace(shard.now, size)
    produced = work(records)
    if not isinstance(produced, list):
        return send_in_steps(shard, time, records, lambda _: produced, failed)
    pace.step(len(records))
    shard.records_per_step = pace.size
    _send(shard, time, produced, failed)
    return None


def send_in_steps(
    shard: Shard,
    time: Timestamp,
    records: Iterable[Any],
    work: Work,
    failed: list[Any] | None = None,
) -> Iterator[None]:
    """Send the results of all `records` at `time`; yields now and then.

    Args:
        shard: The one that works.
        time: Of the records and the results.
        records: What to work on.
        work: See `Work`; results go to output 0.
        failed: What `work` appends here goes to output 1.
    """
    take = _taker(records)
    results: list[Any] = []
    # A block begins as the shard's last one ended, or it were over before its steps
    # are long; what a record yields may be as slow as it likes.
    pace, reading = Pace(shard.now, shard.records_per_step), Pace(shard.now)
    send_by = pace.began + MAX_DELAY_S
    while chunk := take(pace.size):
        produced = work(chunk)
        whole = produced if isinstance(produced, list) else None
        unread = iter(produced)
        is_chunk_over = False
        while not is_chunk_over:
            if whole is not None:
                results = results + whole if results else whole
                now, is_chunk_over = pace.step(len(chunk)), True
            else:
                # One more than one result a record ends the chunk at the first look;
                # as many again take half as many looks each time.
                wanted = reading.size = max(len(chunk) + 1, reading.size)
                before = len(results)
                results += islice(unread, wanted)
                num_read = len(results) - before
                now, is_chunk_over = reading.step(num_read), num_read < wanted
                if is_chunk_over:
                    pace.step(len(chunk))
            if len(results) >= RECORDS_PER_BLOCK or now >= send_by:
                results = _send(shard, time, results, failed)
                send_by = now + MAX_DELAY_S
            if pace.is_over or reading.is_over:
                if size_bytes(results[-1:]) * len(results) >= BYTES_PER_BLOCK:
                    results = _send(shard, time, results, failed)
                yield
                reading.resume()
                pace.resume()
    shard.records_per_step = pace.size
    _send(shard, time, results, failed)


def _taker(records: Iterable[Any]) -> Callable[[int], list[Any]]:
    """Return what takes so many of the records, in their order."""
    if not isinstance(records, list):
        remaining = iter(records)
        return lambda number: list(islice(remaining, number))
    start = 0

    def take(number: int) -> list[Any]:
        nonlocal start
        start += number
        if start == number >= len(records):
            return records  # all of them
        return records[start - number : start]  # 10 ns a record less

    return take


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
    """Call `work` with a few of the records at a time; yields now and then."""
    take = _taker(records)
    pace = Pace(shard.now, shard.records_per_step)
    while chunk := take(pace.size):
        work(chunk)
        pace.step(len(chunk))
        if pace.is_over:
            yield
            pace.resume()
    shard.records_per_step = pace.size


def in_steps(
    shard: Shard, records: Iterable[Any], visit: Callable[[Any], object]
) -> Iterator[None]:
    """Call `visit` with every record; yields now and then."""

    def work(chunk: list[Any]) -> None:
        for record in chunk:
            visit(record)

    return in_chunks(shard, records, work)
