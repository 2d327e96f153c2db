"""Columns that meet across times, beside the same as records: windows and joins.

One process, one shard. Columns are sorted block by block; records go one by one through
functions of Python. Both take turns; seconds are those of the core.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks.report import Report
from timelyml import Dataflow, Session, Sliding, Stream, Tumbling

EPOCHS = 10
EPOCH_SPAN = 1000
LATENESS = 200
WINDOWS = {
    "tumbling": Tumbling(100),
    "sliding": Sliding(100, 50),
    "session": Session(5),
}


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(prog="benchmarks over_time", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=100_000)
    options = parser.parse_args(argv)
    measure(options.rounds, options.rows).show(as_json=options.json)
    return 0


def measure(num_rounds: int, num_rows: int) -> Report:
    """Return medians over rounds; all kinds take turns within a round."""
    report = Report("Columns across times, and the same as records")
    kinds: dict[str, Callable[[Dataflow], Stream]] = {}
    for name, windows in WINDOWS.items():
        kinds[f"{name}_columns"] = _aggregated(windows, num_rows)
        kinds[f"{name}_records"] = _combined(windows, num_rows)
    kinds["join_columns"] = _joined(num_rows, as_columns=True)
    kinds["join_records"] = _joined(num_rows, as_columns=False)
    samples: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(num_rounds):
        for kind, add in kinds.items():
            samples[kind].append(_seconds(add))
    for kind, seconds in samples.items():
        report.add(kind, num_rows / median(seconds) / 1e3, "thousand rows/s")
    return report


def _seconds(add: Callable[[Dataflow], Stream]) -> float:
    flow = Dataflow(num_shards=1)
    add(flow).count().collect()
    start = time.process_time()
    flow.run()
    return time.process_time() - start


def _rows(num_rows: int, seed: int) -> Callable[[int, int], Iterator[Any]]:
    def read(shard: int, num_shards: int) -> Iterator[Any]:
        random = np.random.default_rng([seed, shard, num_shards])
        for epoch in range(EPOCHS):
            size, start = num_rows // EPOCHS, epoch * EPOCH_SPAN
            yield {
                "key": random.integers(0, num_rows // 100, size),
                "at": random.integers(start, start + EPOCH_SPAN + LATENESS, size),
                "x": random.random(size),
            }

    return read


def _aggregated(windows: Any, num_rows: int) -> Callable[[Dataflow], Stream]:
    def add(flow: Dataflow) -> Stream:
        rows = flow.source(_rows(num_rows, 0))
        return rows.window(
            windows,
            "at",
            key="key",
            aggregates={"rows": "count", "x": ("sum", "x")},
            allowed_lateness=LATENESS,
        ).results

    return add


def _combined(windows: Any, num_rows: int) -> Callable[[Dataflow], Stream]:
    def add(flow: Dataflow) -> Stream:
        rows = flow.source(_rows(num_rows, 0))
        return rows.window(
            windows,
            "at",
            key="key",
            value=lambda row: (1, row["x"]),
            combine=lambda a, b: (a[0] + b[0], a[1] + b[1]),
            allowed_lateness=LATENESS,
        ).results

    return add


def _joined(num_rows: int, *, as_columns: bool) -> Callable[[Dataflow], Stream]:
    def add(flow: Dataflow) -> Stream:
        sides = [flow.source(_rows(num_rows // 2, seed)) for seed in (1, 2)]
        if not as_columns:
            sides = [side.map_batch(_as_records) for side in sides]
        left, right = (side.map_batch(lambda rows: rows) for side in sides)
        return left.join(right, key="key", across_times=True)

    return add


def _as_records(columns: Any) -> list[Any]:
    names = list(columns)
    rows = zip(*(columns[name].tolist() for name in names), strict=True)
    return [dict(zip(names, row, strict=True)) for row in rows]
