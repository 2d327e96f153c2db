"""Work on single records, in steps that leave the worker to others.

A long block of slow records must neither keep a worker from its other operators
nor keep finished results back: there is a yield every few records, and results are
sent as soon as they have waited for `MAX_DELAY_S`. Fast code sends one block for
one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from timelyml.progress import Timestamp
from timelyml.runtime.shard import Shard

RECORDS_PER_STEP = 16
RESULTS_PER_STEP = RECORDS_PER_STEP + 1  # so that one result a record ends the step
RECORDS_PER_BLOCK = 8192
MAX_DELAY_S = 0.01

Work = Callable[[list[Any]], Iterable[Any]]
"""From a few records to their results, lazily where there may be many."""


def send_in_steps(
    shard: Shard, time: Timestamp, records: Iterable[Any], work: Work
) -> Iterator[None]:
    """Send the results of all `records` at `time`; yields every few of them."""
    output, now = shard.output(), shard.now
    remaining = iter(records)
    results: list[Any] = []
    send_by = now() + MAX_DELAY_S
    while chunk := list(islice(remaining, RECORDS_PER_STEP)):
        produced = iter(work(chunk))
        while True:
            before = len(results)
            results.extend(islice(produced, RESULTS_PER_STEP))
            is_chunk_over = len(results) - before < RESULTS_PER_STEP
            if len(results) >= RECORDS_PER_BLOCK or now() >= send_by:
                if results:
                    output.send(time, results)
                results = []
                send_by = now() + MAX_DELAY_S
            yield
            if is_chunk_over:
                break
    if results:
        output.send(time, results)


def in_steps(records: Iterable[Any], visit: Callable[[Any], object]) -> Iterator[None]:
    """Call `visit` with every record; yields every few of them."""
    remaining = iter(records)
    while chunk := list(islice(remaining, RECORDS_PER_STEP)):
        for record in chunk:
            visit(record)
        yield
