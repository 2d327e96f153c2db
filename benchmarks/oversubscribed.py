"""What more workers than cores cost: the same work, shared by more and more processes.

Rows are summed by key, and epochs with one record of each worker are closed one after
the other. Each number of workers takes its turn in each round, so that a busy machine
slows all of them; ratios are medians of the rounds' own. Workers have summed a little
before: what they load for it once, each for itself, is no work that is shared. How long
that first run takes is told too.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks.pulse import pulse_graph
from benchmarks.report import Report
from timelyml import Cluster, Dataflow
from timelyml.runtime.config import PROGRESS_MODES

NUM_SHARDS = 16  # of the sum, whatever the number of workers
NUM_KEYS = 1000
ROWS_PER_BLOCK = 20_000
AIM = 1.5  # times as long as with a worker for each core
FIRST, WORK, EPOCH = "first_run", "sum_by_key", "epoch"


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(
        prog="benchmarks oversubscribed", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=400, help="of rows, for a sum")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument(
        "--times", type=int, nargs="+", default=[1, 2, 4], help="workers for each core"
    )
    parser.add_argument("--mode", choices=PROGRESS_MODES, help="of progress")
    options = parser.parse_args(argv)
    config = {} if options.mode is None else {"progress_mode": options.mode}
    cores = len(os.sched_getaffinity(0))
    counts = [cores * times for times in options.times]
    rounds = [
        measure(counts, options.blocks, options.epochs, **config)
        for _ in range(options.rounds)
    ]
    report(rounds, counts).show(as_json=options.json)
    return 0


def measure(
    counts: Sequence[int], num_blocks: int, num_epochs: int, **config: Any
) -> dict[tuple[str, int], float]:
    """Return seconds of the work, and of an epoch, by number of workers."""
    seconds = {}
    for workers in counts:
        with Cluster(workers) as cluster:
            cluster.run(pulse_graph(num_epochs=1, senders="all"))  # all have come
            seconds[FIRST, workers] = _sum(NUM_SHARDS, cluster, **config)
            seconds[WORK, workers] = _sum(num_blocks, cluster, **config)
            graph = pulse_graph(num_epochs=num_epochs, senders="all")
            pulse = cluster.run(graph, **config)
            seconds[EPOCH, workers] = median(
                sample for _, samples in pulse["seconds"] for sample in samples
            )
    return seconds


def _sum(num_blocks: int, cluster: Cluster, **config: Any) -> float:
    """Sum so many blocks; return the seconds that it took."""
    began = time.perf_counter()
    result = _sums(num_blocks).run(cluster=cluster, **config)
    seconds = time.perf_counter() - began
    found = sum(int(block["n"].sum()) for _, block in result.batches("out"))
    if found != num_blocks * ROWS_PER_BLOCK:
        raise ValueError(f"rows are missing: {found} were summed")
    return seconds


def _sums(num_blocks: int) -> Dataflow:
    def read(shard: int, num_shards: int) -> object:
        random = np.random.default_rng(shard)
        keys = random.integers(0, NUM_KEYS, ROWS_PER_BLOCK)
        block = {"key": keys, "value": random.random(ROWS_PER_BLOCK)}
        return ((0, block) for _ in range(shard, num_blocks, num_shards))

    flow = Dataflow(num_shards=NUM_SHARDS)
    rows = flow.source(read)
    rows.aggregate("key", {"n": "count", "total": ("sum", "value")}).collect()
    return flow


def report(
    rounds: Sequence[dict[tuple[str, int], float]], counts: Sequence[int]
) -> Report:
    """Sum the rounds up: medians, and medians of ratios to the first count."""
    table = Report(f"The same work with more workers than the {counts[0]} cores")
    for what, unit, scale in ((FIRST, "s", 1.0), (WORK, "s", 1.0), (EPOCH, "ms", 1e3)):
        for workers in counts:
            ratio = median(r[what, workers] / r[what, counts[0]] for r in rounds)
            is_aimed = what == WORK and workers > counts[0]
            share = ratio * counts[0] / workers  # an epoch is work for every worker
            table.add(
                f"{what}_{workers}_workers_{unit}",
                median(r[what, workers] for r in rounds) * scale,
                unit,
                target=f"within {AIM:g} x" if is_aimed else "",
                is_met=ratio <= AIM if is_aimed else None,
                ratio_to_first=ratio,
                **({"ratio_by_worker": share} if what == EPOCH else {}),
            )
    return table
