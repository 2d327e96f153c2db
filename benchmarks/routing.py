"""How fast one core routes blocks of rows to shards.

A block is split by a random destination per row, and, for comparison, copied whole:
routing reads and writes each row once, so a copy is the most that it could reach.
Seconds are those of the core, not of the clock: other processes do not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks.report import Report
from timelyml.exchange import destinations_by_key, split_by_destination

ROW_FLOATS = 256
TARGET_GB_PER_S = 1.5


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(prog="benchmarks routing", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(argv)
    measure(options.rounds).show(as_json=options.json)
    return 0


def measure(num_rounds: int) -> Report:
    """Return medians over rounds; all kinds take turns within a round."""
    report = Report("Routing on one core")
    random = np.random.default_rng(0)
    for num_rows, name in ((1_024, "1k"), (16_384, "16k"), (131_072, "128k")):
        rows = random.random((num_rows, ROW_FLOATS), np.float32)
        kinds: dict[str, Callable[[], Any]] = {f"copy_{name}_rows": rows.copy}
        for num_shards in (8, 64, 1_000):
            shards = random.integers(0, num_shards, num_rows)
            kinds[f"route_{name}_rows_{num_shards}_shards"] = _split(
                rows, shards, num_shards
            )
        kinds[f"route_{name}_rows_one_shard"] = _split(rows, np.zeros(num_rows, int), 8)
        copy, *routes = _take_turns(kinds, num_rounds).items()
        report.add(copy[0], rows.nbytes / copy[1] / 1e9, "GB/s")
        for kind, seconds in routes:
            speed = rows.nbytes / seconds / 1e9
            report.add(
                kind,
                speed,
                "GB/s",
                target=f"{TARGET_GB_PER_S} GB/s or more",
                is_met=speed >= TARGET_GB_PER_S,
                ratio_to_copy=copy[1] / seconds,
            )
    _measure_keys(report, num_rounds)
    return report


def _split(
    rows: np.ndarray[Any, Any], shards: np.ndarray[Any, Any], num_shards: int
) -> Callable[[], Any]:
    return lambda: split_by_destination(rows, shards, num_shards)


def _measure_keys(report: Report, num_rounds: int) -> None:
    """Destinations by key, for arrays and for records."""
    integers = np.arange(100_000) * 7919
    words = [f"word{i % 5000}" for i in range(100_000)]
    records = [(word, 1) for word in words]
    kinds: dict[str, Callable[[], Any]] = {
        "key_integer_array": lambda: destinations_by_key(integers, 64),
        "key_float_array": lambda: destinations_by_key(integers + 0.5, 64),
        "key_words": lambda: destinations_by_key(words, 64),
        "key_words_and_split_records": lambda: split_by_destination(
            records, destinations_by_key([r[0] for r in records], 64), 64
        ),
    }
    for kind, seconds in _take_turns(kinds, num_rounds).items():
        report.add(kind, len(words) / seconds / 1e6, "million keys/s")


def _take_turns(
    kinds: dict[str, Callable[[], Any]], num_rounds: int
) -> dict[str, float]:
    """Median seconds of each kind, over rounds in which each runs once."""
    samples: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(num_rounds):
        for kind, run in kinds.items():
            start = time.thread_time()
            run()
            samples[kind].append(time.thread_time() - start)
    return {kind: median(seconds) for kind, seconds in samples.items()}
