"""A shuffle in two rounds: sample pivots first, then send each row to its range.

In the first round every shard sends a few of its keys to one shard, which picks the
pivots and sends them to all. In the second every shard sends its rows where the pivots
say. What comes out is sorted: within a shard, and from shard to shard.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from timelyml import Dataflow, Delivery, Shard, Stream, Timestamp
from timelyml.exchange import concat, take
from timelyml.operators import keep, take_kept

ROWS, PIVOTS = 0, 1


def keep_until_complete(shard: Shard, delivery: Delivery) -> None:
    """Keep a block, and ask to be told once nothing more of its time can come."""
    keep(shard.state, delivery)
    shard.notify_at(delivery.time)


def sample(rows: Stream, on: str, size: int) -> Stream:
    """Send evenly spaced keys of each shard, and how many rows each stands for."""

    def on_notify(shard: Shard, time: Timestamp) -> None:
        keys = np.sort(concat(take_kept(shard.state, time))[on])
        picked = keys[np.linspace(0, len(keys) - 1, size).astype(int)]
        weights = np.full(size, len(keys) / size)
        shard.output().send(time, {"key": picked, "weight": weights})

    return rows.unary_notify(keep_until_complete, on_notify, name="sample")


def choose_pivots(samples: Stream, num_shards: int) -> Stream:
    """Send `num_shards - 1` keys that part all rows evenly, to all shards."""

    def on_notify(shard: Shard, time: Timestamp) -> None:
        found = concat(take_kept(shard.state, time))
        found = take(found, np.argsort(found["key"], kind="stable"))
        share = np.cumsum(found["weight"]) / found["weight"].sum()
        wanted = np.arange(1, num_shards) / num_shards
        pivots = found["key"][np.searchsorted(share, wanted)]
        shard.output().send(time, pivots[np.newaxis])  # one row, even of no pivots

    gathered = samples.gather(num_shards=1)
    chosen = gathered.unary_notify(keep_until_complete, on_notify, name="pivots")
    return chosen.broadcast(num_shards=num_shards)


def send_to_ranges(rows: Stream, pivots: Stream, on: str) -> Stream:
    """Hold rows until the pivots of their time are there, then send them off."""

    def on_notify(shard: Shard, time: Timestamp) -> None:
        ((chosen,),) = take_kept(shard.state, time, PIVOTS)
        for block in take_kept(shard.state, time, ROWS):
            ranges = np.searchsorted(chosen, block[on], side="right")
            shard.output().send_rows(time, block, ranges)

    sent = rows.binary_notify(pivots, keep_until_complete, on_notify, name="ranges")
    return sent.direct()


def sort_within(rows: Stream, on: str) -> Stream:
    """Send the rows of each time in order of their keys."""

    def on_notify(shard: Shard, time: Timestamp) -> None:
        block = concat(take_kept(shard.state, time))
        shard.output().send(time, take(block, np.argsort(block[on], kind="stable")))

    return rows.unary_notify(keep_until_complete, on_notify, name="sort")


def shuffled(
    data: Any, on: str, *, num_shards: int, sample_size: int = 64, **options: Any
) -> Dataflow:
    """Return the flow that sorts `data` over `num_shards` shards."""
    flow = Dataflow("range shuffle", num_shards=num_shards)
    rows = flow.source(data, **options)
    pivots = choose_pivots(sample(rows, on, sample_size), num_shards)
    sort_within(send_to_ranges(rows, pivots, on), on).collect()
    return flow


def main() -> None:
    """Sort 100,000 skewed keys on 4 shards."""
    keys = np.random.default_rng(7).lognormal(size=100_000)
    result = shuffled({"key": keys}, "key", num_shards=4).run(workers=2)
    for _, rows in result.batches("out"):
        low, high = rows["key"][0], rows["key"][-1]
        print(f"{len(rows['key'])} rows from {low:.4f} to {high:.4f}")


if __name__ == "__main__":
    main()
