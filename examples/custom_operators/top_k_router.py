"""A top-k router: each row goes to the experts that it scores highest, and back.

Every expert is a shard. It gets only the rows that chose it, computes once per time on
all of them, and is not run at times that nobody chose it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from timelyml import Dataflow, Delivery, Shard, Stream, Timestamp
from timelyml.exchange import concat
from timelyml.operators import keep, take_kept

Matrix = npt.NDArray[np.float64]


def route(tokens: Stream, gate: Matrix, k: int) -> Stream:
    """Send each row to the `k` experts with the highest scores, with its weights."""

    def on_batch(shard: Shard, delivery: Delivery) -> None:
        token, x = delivery.payload["token"], delivery.payload["x"]
        scores = x @ gate  # (rows, experts)
        chosen = np.argsort(-scores, axis=1, kind="stable")[:, :k]  # (rows, k)
        weights = softmax(np.take_along_axis(scores, chosen, axis=1))
        rows = np.repeat(np.arange(len(x)), k)  # each row once per expert
        sent = {
            "home": np.full(len(rows), shard.index),
            "token": token[rows],
            "weight": weights.ravel(),
            "x": x[rows],
        }
        shard.output().send_rows(delivery.time, sent, chosen.ravel())

    return tokens.unary(on_batch, name="route").direct(num_shards=gate.shape[1])


def apply_experts(routed: Stream, experts: Matrix, num_homes: int) -> Stream:
    """Apply each expert to the rows that chose it; each result goes to its home."""

    def on_batch(shard: Shard, delivery: Delivery) -> None:
        keep(shard.state, delivery)
        shard.notify_at(delivery.time)

    def on_notify(shard: Shard, time: Timestamp) -> None:
        rows = concat(take_kept(shard.state, time))
        results = np.tanh(rows["x"] @ experts[shard.index]) * rows["weight"][:, None]
        sent = {"token": rows["token"], "y": results}
        shard.output().send_rows(time, sent, rows["home"])

    applied = routed.unary_notify(on_batch, on_notify, name="experts")
    return applied.direct(num_shards=num_homes)


def combine(results: Stream) -> Stream:
    """Add up the `k` results of each token, once all of a time have come back."""

    def on_batch(shard: Shard, delivery: Delivery) -> None:
        keep(shard.state, delivery)
        shard.notify_at(delivery.time)

    def on_notify(shard: Shard, time: Timestamp) -> None:
        rows = concat(take_kept(shard.state, time))  # expert by expert
        tokens, index = np.unique(rows["token"], return_inverse=True)
        total = np.zeros((len(tokens), rows["y"].shape[1]))
        np.add.at(total, index, rows["y"])
        shard.output().send(time, {"token": tokens, "y": total})

    return results.unary_notify(on_batch, on_notify, name="combine")


def softmax(scores: Matrix) -> Matrix:
    """Return weights that are positive and add up to 1 in each row."""
    raised: Matrix = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights: Matrix = raised / raised.sum(axis=1, keepdims=True)
    return weights


def mixture(
    data: Any, gate: Matrix, experts: Matrix, *, k: int, homes: int
) -> Dataflow:
    """Return the flow of a mixture of experts over `data`, on `homes` shards."""
    flow = Dataflow("top-k router", num_shards=homes)
    routed = route(flow.source(data), gate, k)
    combine(apply_experts(routed, experts, homes)).collect()
    return flow


def main() -> None:
    """Route 1,000 tokens to 2 of 4 experts each."""
    rng = np.random.default_rng(7)
    data = {"token": np.arange(1000), "x": rng.normal(size=(1000, 8))}
    gate, experts = rng.normal(size=(8, 4)), rng.normal(size=(4, 8, 8))
    result = mixture(data, gate, experts, k=2, homes=2).run(workers=2)
    for time, rows in result.batches("out"):
        print(f"time {time}: {len(rows['token'])} tokens, mean {rows['y'].mean():.4f}")


if __name__ == "__main__":
    main()
