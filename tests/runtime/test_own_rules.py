"""Placements that users wrote themselves, and graphs that differ between workers."""

from __future__ import annotations

import os

import pytest

from timelyml import Dataflow
from timelyml.errors import InvariantError, PlacementError

NUM_SHARDS = 8


class ByHash:
    """A rule with the classical mistake: processes hash strings differently."""

    def worker_of(self, shard, num_shards, num_workers):
        return hash((f"shard {shard}", os.getpid())) % num_workers

    def shards_of(self, worker, num_shards, num_workers):
        shards = range(num_shards)
        return [
            s for s in shards if self.worker_of(s, num_shards, num_workers) == worker
        ]

    def check(self, num_shards, num_workers, *, who):
        pass

    def describe(self):
        return f"by hash in process {os.getpid()}"


class Beyond(ByHash):
    def worker_of(self, shard, num_shards, num_workers):
        return num_workers


class Failing(ByHash):
    def worker_of(self, shard, num_shards, num_workers):
        raise KeyError(shard)


def told_where(placement=None):
    """A flow that collects (shard, worker) of each shard of an operator."""

    def tell(shard, delivery):
        shard.output().send(delivery.time, [(shard.index, shard.worker_index)])

    flow = Dataflow("placed", num_shards=NUM_SHARDS)
    rows = flow.source(range(NUM_SHARDS), num_shards=1)
    spread = rows.exchange(int, num_shards=NUM_SHARDS)
    spread.unary(tell, placement=placement).gather().collect()
    return flow


@pytest.mark.parametrize("how", ["of the operator", "of the run"])
def test_a_rule_that_each_process_would_answer_otherwise_is_asked_once(cluster, how):
    rule, workers = ByHash(), cluster.num_workers
    if how == "of the run":
        result = cluster.run(told_where(), placement=rule)
    else:
        result = cluster.run(told_where(rule))

    expected = [(s, rule.worker_of(s, NUM_SHARDS, workers)) for s in range(NUM_SHARDS)]
    assert sorted(result["out"]) == expected


def test_a_rule_that_names_no_worker_is_refused_before_anything_starts(cluster):
    with pytest.raises(PlacementError, match="'unary' is placed on a worker that does"):
        cluster.run(told_where(Beyond()))
    with pytest.raises(PlacementError, match="is placed on a worker that does not"):
        cluster.run(told_where(), placement=Beyond())


def test_what_a_rule_raises_is_raised_where_the_run_is_started(cluster):
    with pytest.raises(KeyError, match=r"^0$"):
        cluster.run(told_where(Failing()))


class Shifty(str):
    """A name that is another one in another process."""

    __slots__ = ()

    def __reduce__(self):
        return name_here, ()


def name_here():
    return Shifty(f"flow of process {os.getpid()}")


def test_a_graph_that_differs_between_workers_is_refused_with_the_difference(cluster):
    flow = Dataflow(name_here())
    flow.source([1]).collect()

    if cluster.mode != "processes":  # one process, one name
        assert cluster.run(flow)["out"] == [1]
        return
    difference = (
        rf"line 1: 'dataflow {name_here()}' here, 'dataflow flow of process \d+"
    )
    with pytest.raises(
        InvariantError, match=r"worker . built another graph; got "
    ) as got:
        cluster.run(flow)
    got.match(difference)
    got.match("a graph must not depend on the worker that builds it")
