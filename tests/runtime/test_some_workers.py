"""Runs that have some of a cluster's workers, and are concerned by no other."""

from __future__ import annotations

import os

import pytest

from tests.runtime.echo import echo
from timelyml import Cluster, Dataflow
from timelyml.errors import ConfigError, PeerError


def die(_):
    os._exit(7)


def places():
    """Each shard collects the process that it is in."""
    flow = Dataflow(num_shards=4)
    one = flow.source(lambda shard, _: [[shard]]).exchange(lambda shard: shard)
    one.map(lambda shard: (shard, os.getpid())).collect()
    return flow


@pytest.mark.parametrize("mode", ["broadcast", "accumulator"])
def test_a_run_numbers_the_workers_that_it_was_given_in_their_order(mode):
    with Cluster(3, services=(echo(3),)) as cluster:
        options = {"cluster": cluster, "progress_mode": mode, "timeout_s": 60}
        alone = [
            dict(places().run(workers=[each], **options)["out"]) for each in range(3)
        ]
        pair = dict(places().run(workers=(2, 0), **options)["out"])
        assert cluster.workers == (0, 1, 2)

    process = [found[0] for found in alone]
    assert len({*process}) == 3
    assert all({*found.values()} == {process[n]} for n, found in enumerate(alone))
    assert [pair[shard] for shard in range(4)] == [process[2], process[0]] * 2


def test_the_death_of_another_worker_does_not_concern_a_run():
    flow, fatal = Dataflow(), Dataflow()
    flow.input("numbers").exchange(lambda n: n).map(lambda n: n + 1).collect()
    fatal.source([1]).map(die)

    with Cluster(3, services=(echo(3),)) as cluster:
        run = flow.start(cluster=cluster, workers=[0, 2])
        run.input("numbers").send([1, 2])
        with pytest.raises(PeerError, match=r"worker 1 .*code 7"):
            fatal.run(cluster=cluster, workers=[1], timeout_s=60)
        assert cluster.workers == (0, 2)
        run.input("numbers").send([3])
        run.close_inputs()

        assert sorted(run.result(timeout_s=60)["out"]) == [2, 3, 4]
        with pytest.raises(ConfigError, match=r"got \[1\]; expected some of \[0, 2\]"):
            flow.run(cluster=cluster, workers=[1])


@pytest.mark.parametrize(
    "workers", [[], [0, 0], [1], "0", [None], [0.0], [[0]], 1.5, 1]
)
def test_workers_that_are_none_of_the_cluster_are_refused(workers):
    with (
        Cluster(1, mode="inline") as cluster,
        pytest.raises(ConfigError, match="workers"),
    ):
        places().run(cluster=cluster, workers=workers)


def test_workers_are_named_of_a_cluster_only():
    with pytest.raises(ConfigError, match="or a cluster of which to have some"):
        places().run(workers=[0])
