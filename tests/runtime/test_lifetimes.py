"""How long clusters and runs live: dropped, closed by many, forked, used too late."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import threading
import weakref
from pathlib import Path

import pytest

from tests.runtime.test_processes import cluster_threads, flow_of, is_alive, wait_for
from timelyml import Cluster, Dataflow
from timelyml.errors import PeerError, RunStoppedError, TimelyError

MODES = {"inline": 1, "threads": 2, "processes": 2}


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


@pytest.fixture
def nothing_left(monkeypatch):
    """What the test starts is gone at its end, once it was dropped."""
    with tempfile.TemporaryDirectory() as parent:
        monkeypatch.setattr(tempfile, "tempdir", parent)
        monkeypatch.setenv("XDG_RUNTIME_DIR", parent)
        before = cluster_threads()
        yield
        gc.collect()
        wait_for(lambda: cluster_threads() <= before)
        wait_for(lambda: not list(Path(parent).iterdir()))


def waiting():
    """A flow that goes on until its input is closed."""
    flow = Dataflow()
    flow.input("in").probe("seen").collect()
    return flow


def drops(cluster):
    """Wait until a cluster that nobody else refers to is collected."""
    ref = weakref.ref(cluster)
    del cluster

    def wait():
        gc.collect()
        wait_for(lambda: ref() is None)

    return wait


def leave(x):
    os._exit(7)


def test_a_dropped_cluster_ends(mode, nothing_left):
    cluster = Cluster(MODES[mode], mode=mode)
    ids = {i for _, i in cluster.run(flow_of(lambda x: (x, os.getpid())))["out"]}
    is_collected = drops(cluster)
    del cluster
    is_collected()
    wait_for(lambda: not any(map(is_alive, ids - {os.getpid()})))


def test_a_dropped_cluster_ends_whose_runs_failed(mode, nothing_left):
    cluster = Cluster(MODES[mode], mode=mode)
    with pytest.raises(ZeroDivisionError, match="'work' failed on worker"):
        cluster.run(flow_of(lambda x: 1 // 0))
    is_collected = drops(cluster)
    del cluster
    is_collected()


def test_a_dropped_cluster_ends_that_lost_its_workers(nothing_left):
    cluster = Cluster(2)
    with pytest.raises(PeerError, match="exited with code 7"):
        cluster.run(flow_of(leave))
    is_collected = drops(cluster)
    del cluster
    is_collected()


def test_runs_that_are_lost_with_a_worker_have_an_error_each(nothing_left):
    with Cluster(2) as cluster:
        runs = [cluster.start(flow_of(leave)) for _ in range(2)]
        errors = [run.record.future.exception() for run in runs]
    assert errors[0] is not errors[1]
    assert str(errors[0]) == str(errors[1])


def test_a_cluster_ends_that_was_dropped_with_a_run_on_it(mode, nothing_left):
    cluster = Cluster(MODES[mode], mode=mode)
    record = cluster.start(waiting().build()).record
    is_collected = drops(cluster)
    del cluster
    is_collected()
    with pytest.raises(RunStoppedError, match="the cluster was closed"):
        record.future.result(60)


def test_a_run_keeps_its_cluster_alive_until_its_result_is_there(mode, nothing_left):
    run = waiting().start(cluster=Cluster(MODES[mode], mode=mode))
    gc.collect()
    run.input("in").send([1])
    run.input("in").close()
    assert run.result(60)["out"] == [1]


@pytest.mark.sources
@pytest.mark.parametrize("where", ["inline", "threads"])
def test_what_operators_started_ends_with_a_session_that_broke(where, nothing_left):
    async def never(x):
        await asyncio.Event().wait()

    def fail():
        raise RuntimeError("broken")

    flow = Dataflow()
    flow.source([1]).map_async(never).collect()
    before = cluster_threads()
    with Cluster(1, mode=where) as cluster:
        run = flow.start(cluster=cluster)
        wait_for(
            lambda: any(
                each.name == "timelyml-loop" for each in cluster_threads() - before
            )
        )
        launcher = cluster._session._launcher
        broken = launcher._workers[0] if where == "threads" else launcher.worker
        broken.step = fail
        with pytest.raises(TimelyError, match="broken"):
            run.result(60)
    assert cluster_threads() <= before


def test_whoever_closes_a_cluster_finds_it_closed(mode, nothing_left):
    cluster = Cluster(MODES[mode], mode=mode)
    run = cluster.start(waiting().build())
    left = []

    def close():
        cluster.close()
        left.append(cluster._session._closed.is_set())

    threads = [threading.Thread(target=close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left == [True] * 4
    with pytest.raises(RunStoppedError, match="the cluster was closed"):
        run.result(60)


@pytest.mark.filterwarnings("ignore:.*fork.*")  # of JAX, if another test loaded it
def test_a_fork_of_the_driver_leaves_the_cluster_alone(nothing_left):
    with Cluster(1) as cluster:
        cluster.run(flow_of(lambda x: x))
        child = os.fork()
        if child == 0:
            cluster.close()  # as at the end of its program
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert sorted(cluster.run(flow_of(lambda x: x))["out"]) == [0, 1, 2, 3]


def test_many_threads_may_start_the_first_runs_of_a_cluster(mode, nothing_left):
    before = cluster_threads()
    with Cluster(MODES[mode], mode=mode) as cluster:
        barrier = threading.Barrier(4)
        found = []

        def start():
            barrier.wait()
            found.append(cluster.start(flow_of(lambda x: x)).record.future)

        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        names = [thread.name for thread in cluster_threads() - before]
        out = [sorted(future.result(60)["out"]) for future in found]
    assert out == [[0, 1, 2, 3]] * 4
    assert names.count("timelyml-controller") == 1
