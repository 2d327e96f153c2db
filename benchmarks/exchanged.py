"""Rows that a dataflow exchanges between two workers: all of them cross.

Each block is routed to four shards of the other worker, row by row, and counted when
the operator there is given its part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from timelyml import Cluster, Dataflow

ROW_FLOATS = 256
ROWS_PER_BLOCK = 4096  # 4 MiB
SHARDS_PER_WORKER = 4

Array = np.ndarray[Any, Any]


def exchanged_mb_per_s(cluster: Cluster, num_mib: int, *, both_ways: bool) -> float:
    """Return the rate from the first part that arrives to the last."""
    result = cluster.run(_crossing(num_mib // 4, both_ways=both_ways).build())
    arrived: list[tuple[float, int]] = sorted(result["arrived"])
    expected = num_mib // 4 * ROWS_PER_BLOCK * ROW_FLOATS * 4 * (1 + both_ways)
    found = sum(size for _, size in arrived)
    if found != expected:
        raise ValueError(f"rows are missing: {found} bytes came of {expected}")
    return (found - arrived[0][1]) / (arrived[-1][0] - arrived[0][0]) / 1e6


def _crossing(num_blocks: int, *, both_ways: bool) -> Dataflow:
    picked = np.random.default_rng(0).integers(0, SHARDS_PER_WORKER, ROWS_PER_BLOCK)

    def read(shard: int, _: int) -> Iterator[tuple[int, Array]]:
        block = np.full((ROWS_PER_BLOCK, ROW_FLOATS), shard, np.float32)
        is_sender = both_ways or shard == 0
        return ((0, block) for _ in range(num_blocks if is_sender else 0))

    def to_the_other(rows: Array) -> Array:
        return 2 * picked + 1 - int(rows[0, 0])  # shards stand on workers in turn

    def note(rows: Array) -> list[tuple[float, int]]:
        return [(time.perf_counter(), rows.nbytes)]  # one clock for all processes

    flow = Dataflow("crossing")
    rows = flow.source(read, num_shards=2)
    crossed = rows.exchange(
        to_the_other, by_batch=True, num_shards=2 * SHARDS_PER_WORKER
    )
    crossed.map_batch(note).collect("arrived")
    return flow
