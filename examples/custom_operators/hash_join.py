"""A distributed hash join: rows of equal keys meet on a shard that a hash names.

One side is built into a sorted table, the other probes it. Rows of the probe side that
come before the table is complete wait; later ones are answered as they come.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from timelyml import Dataflow, Delivery, Exchange, Shard, Stream, Timestamp
from timelyml.exchange import concat, take
from timelyml.progress import Capability

BUILD, PROBE = 0, 1
Columns = dict[str, npt.NDArray[Any]]


def by_hash(on: str) -> Exchange:
    """Return the exchange that sends equal values of a column to the same shard."""

    def shards_of(rows: Columns, num_shards: int) -> Any:
        mixed = rows[on].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (mixed >> np.uint64(32)) % np.uint64(num_shards)

    return Exchange(shards_of)


@dataclass
class Held:
    """What a shard holds of one time: the right to answer, and rows by port."""

    right: Capability
    rows: tuple[list[Columns], list[Columns]] = field(default_factory=lambda: ([], []))
    table: Columns | None = None


def hash_join(build: Stream, probe: Stream, on: str) -> Stream:
    """Send each row of `probe` with each row of `build` of the same time and key."""

    def on_batch(shard: Shard, delivery: Delivery) -> None:
        if delivery.time not in shard.state:
            shard.state[delivery.time] = Held(shard.retain(delivery.time))
        shard.state[delivery.time].rows[delivery.port].append(delivery.payload)
        answer(shard, delivery.time)

    def on_frontier(shard: Shard) -> None:
        for time in sorted(shard.state):
            answer(shard, time)

    def answer(shard: Shard, time: Timestamp) -> None:
        if not shard.is_complete(BUILD, time):
            return
        held = shard.state[time]
        if held.table is None and held.rows[BUILD]:
            held.table = sorted_by(on, concat(held.rows[BUILD]))
        if held.table is not None:
            for rows in held.rows[PROBE]:
                shard.output().send(time, matches(held.table, rows, on))
        held.rows[PROBE].clear()
        if shard.is_complete(PROBE, time):
            shard.state.pop(time).right.release()

    pacts = (by_hash(on), by_hash(on))
    return build.binary_frontier(probe, on_batch, on_frontier, pacts=pacts)


def sorted_by(on: str, rows: Columns) -> Columns:
    """Return the rows in the order of a column."""
    ordered: Columns = take(rows, np.argsort(rows[on], kind="stable"))
    return ordered


def matches(table: Columns, rows: Columns, on: str) -> Columns:
    """Return the pairs of equal keys; `table` is sorted by them."""
    first = np.searchsorted(table[on], rows[on], side="left")
    counts = np.searchsorted(table[on], rows[on], side="right") - first
    row = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return {**take(table, first[row] + nth), **take(rows, row)}


def joined(build: Any, probe: Any, on: str, *, num_shards: int) -> Dataflow:
    """Return the flow that joins two sets of columns."""
    flow = Dataflow("hash join", num_shards=num_shards)
    left = flow.source(build, name="build")
    right = flow.source(probe, batch_size=256, name="probe")
    hash_join(left, right, on).collect()
    return flow


def main() -> None:
    """Join 10,000 orders with 1,000 customers."""
    rng = np.random.default_rng(7)
    customers = {"customer": np.arange(1000), "city": rng.integers(0, 9, 1000)}
    orders = {"order": np.arange(10_000), "customer": rng.integers(0, 1500, 10_000)}
    result = joined(customers, orders, "customer", num_shards=4).run(workers=2)
    total = sum(len(rows["order"]) for _, rows in result.batches("out"))
    print(f"{total} of 10000 orders have a customer")


if __name__ == "__main__":
    main()
