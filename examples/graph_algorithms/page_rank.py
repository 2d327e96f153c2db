"""PageRank, in two nested loops: sweeps within rounds, until the ranks stand still.

The inner loop sends rank along the edges, a fixed number of times. The outer loop adds up
how far that moved the ranks, over all shards, and goes round again if it was too far.
What travels between sweeps is mass for vertices; the mass of a vertex without edges goes
to all, as a row for each shard, whose vertex is `-1 - shard`.

Source:
    Page, Brin, Motwani, Winograd (1999), with dangling mass spread evenly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from examples.graph_algorithms.adjacency import (
    Adjacency,
    Columns,
    Floats,
    Ints,
    by_column,
    forget_closed,
)
from timelyml import Broadcast, Delivery, Exchange, Logic, Shard, Stream, Timestamp
from timelyml.operators import keep, take_kept

DAMPING = 0.85
SWEEPS_PER_ROUND = 5

EDGES, MASS = 0, 1
HELD, RANKS, CHANGES = 0, 1, 2


def page_rank(edges: Stream, num_vertices: int, tolerance: float = 1e-9) -> Stream:
    """Send columns `vertex` and `rank`, of all vertices.

    Args:
        edges: Columns `source` and `target`; the graph of each epoch is its own.
        num_vertices: Vertices are numbered from 0 to below this.
        tolerance: The ranks stand still if a round moves them by less, all together.
    """
    flow = edges.flow
    rounds = flow.scope("rounds")
    sweeps = flow.scope("sweeps", parent=rounds)
    next_round, next_sweep = flow.feedback(rounds), flow.feedback(sweeps)
    mass = edges.unary(_start, name="start").enter(rounds).concat(next_round.stream)
    again, held, ranks = flow.operator(
        Logic(
            on_batch=_on_batch,
            on_notify=_sweeping(num_vertices),
            on_frontier=lambda shard: forget_closed(shard, shard.state),
        ),
        inputs=[
            edges.enter(rounds).enter(sweeps),
            mass.enter(sweeps).concat(next_sweep.stream),
        ],
        pacts=[Exchange(by_column("source")), Exchange(_to_vertex)],
        outputs=3,
        name="sweep",
        states=("state", "kept"),
    )
    next_sweep.connect(again)
    unsettled, settled = flow.operator(
        Logic(on_batch=_on_batch, on_notify=_judging(tolerance)),
        inputs=[held.leave(), ranks.leave(), ranks.leave().map_batch(_total_change)],
        pacts=[None, None, Broadcast()],
        outputs=2,
        name="judge",
        states=("kept",),
    )
    next_round.connect(unsettled)
    return settled.leave()


@dataclass
class Ranked:
    """What a shard knows of the graph of one epoch."""

    graph: Adjacency
    degrees: Ints
    ranks: Floats
    before: Floats  # at the end of the last round


def _on_batch(shard: Shard, delivery: Delivery) -> None:
    keep(shard.state_of("kept"), delivery)
    shard.notify_at(delivery.time)


def _start(shard: Shard, delivery: Delivery) -> None:
    """Send no mass to every shard: it starts the sweeps where no edge leads."""
    everywhere = -1 - np.arange(shard.num_shards)
    nothing = np.zeros(shard.num_shards)
    shard.output().send(delivery.time, {"vertex": everywhere, "mass": nothing})


def _to_vertex(block: Columns, num_shards: int) -> Ints:
    vertex = block["vertex"]
    return np.where(vertex < 0, -1 - vertex, vertex % num_shards)


def _sweeping(num_vertices: int) -> Callable[[Shard, Timestamp], None]:
    def on_notify(shard: Shard, time: Timestamp) -> None:
        assert isinstance(time, tuple)  # inside the loops
        epoch, round_, sweep = time
        kept = shard.state_of("kept")
        edges = take_kept(kept, time, EDGES)
        received = take_kept(kept, time, MASS)
        if round_ == sweep == 0:
            shard.state[epoch] = _unranked(shard, edges, num_vertices)
        else:
            _receive(shard, shard.state[epoch], received, num_vertices)
        mass = _mass_of(shard, shard.state[epoch])
        if sweep + 1 < SWEEPS_PER_ROUND:
            shard.output(0).send(time, mass)
        else:
            shard.output(1).send(time, mass)
            shard.output(2).send(time, _ranks_of(shard, shard.state[epoch]))

    return on_notify


def _unranked(shard: Shard, edges: list[Columns], num_vertices: int) -> Ranked:
    mine = len(range(shard.index, num_vertices, shard.num_shards))
    graph = Adjacency(edges, shard)
    ranks = np.full(mine, 1 / num_vertices)
    return Ranked(graph, graph.out_degrees(mine), ranks, ranks)


def _receive(
    shard: Shard, ranked: Ranked, received: list[Columns], num_vertices: int
) -> None:
    """Set the ranks by the mass that came."""
    incoming = np.zeros(len(ranked.ranks))
    for block in received:
        is_for_all = block["vertex"] < 0
        incoming += block["mass"][is_for_all].sum() / num_vertices
        numbers = block["vertex"][~is_for_all] // shard.num_shards
        np.add.at(incoming, numbers, block["mass"][~is_for_all])
    ranked.ranks = (1 - DAMPING) / num_vertices + DAMPING * incoming


def _mass_of(shard: Shard, ranked: Ranked) -> Columns:
    """Return what the shard's vertices give, a row for each target."""
    is_dangling = ranked.degrees == 0
    share = ranked.ranks / np.maximum(ranked.degrees, 1)
    targets, which = ranked.graph.targets_of(np.arange(len(share)))
    distinct, codes = np.unique(targets, return_inverse=True)
    given = np.bincount(codes, share[which], len(distinct))
    everywhere = -1 - np.arange(shard.num_shards)
    lost = np.full(shard.num_shards, ranked.ranks[is_dangling].sum())
    return {
        "vertex": np.concatenate([distinct, everywhere]),
        "mass": np.concatenate([given, lost]),
    }


def _ranks_of(shard: Shard, ranked: Ranked) -> Columns:
    """Return the ranks, and how far a round has moved them."""
    change = np.abs(ranked.ranks - ranked.before)
    ranked.before = ranked.ranks
    vertex = np.arange(len(change)) * shard.num_shards + shard.index
    return {"vertex": vertex, "rank": ranked.ranks, "change": change}


def _total_change(ranks: Columns) -> Columns:
    return {"change": ranks["change"].sum(keepdims=True)}


def _judging(tolerance: float) -> Callable[[Shard, Timestamp], None]:
    def on_notify(shard: Shard, time: Timestamp) -> None:
        kept = shard.state_of("kept")
        changes = take_kept(kept, time, CHANGES)
        held = take_kept(kept, time, HELD)
        ranks = take_kept(kept, time, RANKS)
        # Every shard adds the same numbers in the same order, and judges alike.
        if sum(float(block["change"].sum()) for block in changes) > tolerance:
            for block in held:
                shard.output(0).send(time, block)
            return
        for block in ranks:
            columns = {name: block[name] for name in ("vertex", "rank")}
            shard.output(1).send(time, columns)

    return on_notify
