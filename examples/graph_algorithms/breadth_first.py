"""Breadth-first search: the distance of every vertex from the nearest root.

A round of the loop is a step away from the roots. In it each shard takes the vertices
that it has not met before, and sends their neighbours into the next round; the loop ends
where no neighbour is new. Nobody counts the rounds: progress does.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from examples.graph_algorithms.adjacency import (
    Adjacency,
    by_column,
    forget_closed,
)
from timelyml import Delivery, Exchange, Logic, Shard, Stream, Timestamp
from timelyml.operators import keep, take_kept

EDGES, FOUND = 0, 1


def breadth_first(edges: Stream, roots: Stream) -> Stream:
    """Send columns `vertex` and `distance` of every vertex that can be reached.

    Args:
        edges: Columns `source` and `target`; the graph of each epoch is its own.
        roots: Column `vertex`, of the same epochs.
    """
    flow = edges.flow
    scope = flow.scope("steps")
    loop = flow.feedback(scope)
    reached, next_step = flow.operator(
        Logic(on_batch=_on_batch, on_notify=_on_notify, on_frontier=_on_frontier),
        inputs=[edges.enter(scope), roots.enter(scope).concat(loop.stream)],
        pacts=[Exchange(by_column("source")), Exchange(by_column("vertex"))],
        outputs=2,
        name="visit",
        states=("state", "kept"),
    )
    loop.connect(next_step)
    return reached.leave()


def _on_batch(shard: Shard, delivery: Delivery) -> None:
    keep(shard.state_of("kept"), delivery)
    shard.notify_at(delivery.time)


def _on_notify(shard: Shard, time: Timestamp) -> Iterator[None]:
    assert isinstance(time, tuple)  # inside the loop
    epoch, step = time
    edges = take_kept(shard.state_of("kept"), time, EDGES)
    if epoch not in shard.state:  # at the first step that reaches this shard
        shard.state[epoch] = Adjacency(edges, shard), np.empty(0, np.int64)
    yield  # building takes a while: let others go on
    graph, known = shard.state[epoch]
    found = take_kept(shard.state_of("kept"), time, FOUND)
    met = np.unique(np.concatenate([known[:0], *(block["vertex"] for block in found)]))
    new = met[~np.isin(met, known)]
    shard.state[epoch] = graph, np.union1d(known, new)
    distances = np.full(len(new), step)
    shard.output(0).send(time, {"vertex": new, "distance": distances})
    neighbours, _ = graph.targets_of(new // shard.num_shards)
    shard.output(1).send(time, {"vertex": np.unique(neighbours)})


def _on_frontier(shard: Shard) -> None:
    forget_closed(shard, shard.state)
