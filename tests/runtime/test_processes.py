"""Worker processes: how they start, what they share, how they die."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from timelyml import Cluster, Dataflow
from timelyml.errors import ConfigError, DeadlineError, PeerError
from timelyml.exchange import CONTROLLER, ZmqTransport
from timelyml.runtime.child import Child
from timelyml.runtime.launch_processes import ProcessLauncher

TIMEOUT_S = 60.0
SILENCE_S = 60.0  # in which a peer that is gone would be noticed at the latest
SOON_S = 20.0  # long before that, on a machine that does something else too


def flow_of(fn, data=range(4), num_shards=2):
    """source -> spread over workers -> fn -> 'out'"""
    flow = Dataflow(num_shards=num_shards)
    flow.source(data).exchange(lambda x: x).map(fn, name="work").collect()
    return flow.build()


def process_ids(cluster, num_workers=2):
    """By worker, as shards are spread in turns."""
    shards = range(num_workers)
    graph = flow_of(lambda x: (x, os.getpid()), data=shards, num_shards=num_workers)
    return dict(sorted(cluster.run(graph, timeout_s=TIMEOUT_S)["out"]))


def announced(path):
    """A function that stays in user code for long, once it has said that it is there."""

    def stuck(x):
        Path(path).touch()
        threading.Event().wait(600)

    return stuck


def wait_for(condition):
    deadline = time.monotonic() + TIMEOUT_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        pause.wait(0.01)


def cluster_threads():
    """Threads of all clusters, those that other tests share included."""
    return {each for each in threading.enumerate() if each.name.startswith("timelyml")}


def is_alive(process_id):
    try:
        state = (
            Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
        )
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def intrude(endpoint, junk):
    """Send to a peer of a cluster what no peer would."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(endpoint.control)
        push.send(junk)


def test_workers_are_fresh_interpreters_with_the_environment_that_jax_needs():
    def look(x):
        names = ("OMP_NUM_THREADS", "JAX_PLATFORMS", "NPROC", "MINE")
        main = vars(sys.modules["__main__"]).get("__spec__")
        return [os.environ.get(name) for name in names], main.name

    with Cluster(1, environment={"MINE": "yes"}, num_devices=10) as cluster:
        (found, *_) = cluster.run(flow_of(look))["out"]
    environment, main = found
    assert environment == ["1", os.environ.get("JAX_PLATFORMS", "cpu"), "20", "yes"]
    assert main == "timelyml.runtime.process"


def test_more_workers_than_there_can_be_open_files_for_are_refused(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    match = r"got 99999; expected at most \d+, as this process may have 1024 open files"
    with pytest.raises(ConfigError, match=match), Cluster(99_999):
        pass


def test_tcp_workers_do_the_same_as_ipc_workers():
    with Cluster(2, transport="tcp") as cluster:
        assert len(set(process_ids(cluster).values())) == 2


def test_nothing_is_left_of_a_closed_cluster(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    parent = Path(tempfile.mkdtemp())
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    before = cluster_threads()
    with Cluster(2) as cluster:
        ids = process_ids(cluster)
        (directory,) = parent.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
    parent.rmdir()  # fails unless it is empty
    assert list(tmp_path.iterdir()) == []
    assert not any(map(is_alive, ids.values()))
    assert cluster_threads() <= before


def test_a_killed_worker_ends_every_run_within_seconds_and_is_replaced(tmp_path):
    with Cluster(2, heartbeat_timeout_s=SILENCE_S) as cluster:
        ids = process_ids(cluster)
        here = tmp_path / "here"
        run = cluster.start(flow_of(announced(here), data=[1]))
        other = cluster.start(flow_of(announced(tmp_path / "there")))
        wait_for(here.exists)
        killed = time.monotonic()
        os.kill(ids[1], signal.SIGKILL)
        for each in (run, other):
            who = rf"worker 1 \(pid {ids[1]}\) was killed by SIGKILL"
            where = r"in operator 'work', shard 1, at time 0, of run \d+ of dataflow"
            with pytest.raises(PeerError, match=f"{who} {where}") as got:
                each.result(TIMEOUT_S)
            error = got.value
            assert (error.process_id, error.worker) == (ids[1], 1)
            assert (error.operator, error.shard, error.time) == ("work", 1, 0)
        assert time.monotonic() - killed < SOON_S
        replaced = process_ids(cluster)
        assert not set(ids.values()) & set(replaced.values())
    assert not any(map(is_alive, ids.values()))


def test_an_idle_cluster_whose_worker_died_recovers_at_the_next_run():
    with Cluster(2) as cluster:
        ids = process_ids(cluster)
        os.kill(ids[0], signal.SIGKILL)
        wait_for(lambda: cluster._session.controller.error is not None)
        assert not set(ids.values()) & set(process_ids(cluster).values())


def test_user_code_that_exits_the_process_is_a_dead_worker_with_its_exit_code():
    def leave(x):
        print("bye", file=sys.stderr, flush=True)
        os._exit(7)

    with (
        Cluster(1) as cluster,
        pytest.raises(PeerError, match=r"exited with code 7 in operator 'work'") as got,
    ):
        cluster.run(flow_of(leave), timeout_s=TIMEOUT_S)
    assert "bye" in got.value.__notes__[0]


def test_a_crash_of_the_interpreter_shows_the_line_that_it_was_in():
    def crash(x):
        os.abort()

    with (
        Cluster(1) as cluster,
        pytest.raises(PeerError, match=r"worker 0 .*was killed by SIGABRT") as got,
    ):
        cluster.run(flow_of(crash), timeout_s=TIMEOUT_S)
    assert "in crash" in got.value.__notes__[0]


def transport_of_this_worker():
    gc.unfreeze()  # a worker keeps what it begins with out of sight
    (found,) = [each for each in gc.get_objects() if isinstance(each, ZmqTransport)]
    return found


def test_a_broken_link_between_workers_ends_every_run_and_both_are_replaced():
    def lose_a_message(x):
        if x == 0:
            sequences = transport_of_this_worker()._links[1].sequences
            sequences[:] = [sequence + 1 for sequence in sequences]
        return x

    with Cluster(2, heartbeat_timeout_s=SILENCE_S) as cluster:
        ids = process_ids(cluster)
        match = (
            rf"worker 1 \(pid {ids[1]}\) lost its link from worker 0 \(pid {ids[0]}\)"
        )
        broken = time.monotonic()
        with pytest.raises(PeerError, match=rf"{match}; got a gap on the"):
            cluster.run(flow_of(lose_a_message), timeout_s=TIMEOUT_S)
        assert time.monotonic() - broken < SOON_S
        replaced = process_ids(cluster)
        assert not set(ids.values()) & set(replaced.values())
    assert not any(map(is_alive, ids.values()))


def test_a_worker_that_hears_no_more_of_the_controller_leaves_and_is_replaced():
    def lose_the_controller(x):
        transport_of_this_worker()._inbox.wrong[CONTROLLER] = "it was cut"
        return x

    with Cluster(2, heartbeat_timeout_s=SILENCE_S) as cluster:
        ids = process_ids(cluster)
        match = rf"worker 0 \(pid {ids[0]}\) exited with code 3"
        broken = time.monotonic()
        with pytest.raises(PeerError, match=match) as got:
            cluster.run(flow_of(lose_the_controller, data=[0]), timeout_s=TIMEOUT_S)
        assert time.monotonic() - broken < SOON_S
        assert "lost its link to the controller" in got.value.__notes__[0]
        assert not set(ids.values()) & set(process_ids(cluster).values())


def test_a_stopped_worker_is_given_up_after_its_heartbeat_timeout(tmp_path):
    with Cluster(2, heartbeat_timeout_s=3.0) as cluster:
        ids = process_ids(cluster)
        here = tmp_path / "here"
        run = cluster.start(flow_of(announced(here), data=[1]))
        wait_for(here.exists)
        os.kill(ids[1], signal.SIGSTOP)
        match = r"stopped answering .* in operator 'work', shard 1, at time 0"
        with pytest.raises(PeerError, match=match):
            run.result(TIMEOUT_S)
        wait_for(lambda: not is_alive(ids[1]))


def test_a_worker_whose_code_holds_the_interpreter_is_busy_not_dead():
    def hog(x):
        began = time.monotonic()
        sum(range(60_000_000))  # one call that lets no other thread run
        return time.monotonic() - began

    with Cluster(1, heartbeat_timeout_s=0.5) as cluster:
        (held_s,) = cluster.run(flow_of(hog, data=[1]), timeout_s=TIMEOUT_S)["out"]
    assert held_s > 0.5


def test_a_run_behind_a_stuck_one_is_out_of_time_when_it_said(tmp_path):
    with Cluster(1) as cluster:
        here = tmp_path / "here"
        stuck = cluster.start(flow_of(announced(here)))
        wait_for(here.exists)
        asked = time.monotonic()
        with pytest.raises(DeadlineError, match=r"got 1\.5 s of time") as got:
            cluster.run(flow_of(lambda x: x), timeout_s=1.5)
        assert 1.5 <= time.monotonic() - asked < SOON_S
        told = got.value.explanation
        assert "waiting for workers to build the graph" in told
        assert "no answer from worker 0, in operator 'work', shard 0, run 1" in told
        assert not stuck.done()


def test_a_run_is_out_of_time_while_workers_have_not_come(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\nthreading.Event().wait(600)\n"
    )
    environment = {"PYTHONPATH": str(tmp_path)}
    with (
        Cluster(2, environment=environment) as cluster,
        pytest.raises(DeadlineError, match=r"got 1 s of time") as got,
    ):
        cluster.run(flow_of(lambda x: x), timeout_s=1.0)
    assert "no answer from worker 0\n  no answer from worker 1" in got.value.explanation


def test_a_worker_that_never_comes_is_named_at_the_deadline(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading\n"
        "print('stuck at start', file=sys.stderr, flush=True)\n"
        "threading.Event().wait(600)\n"
    )
    environment = {"PYTHONPATH": str(tmp_path)}
    with (
        Cluster(2, startup_timeout_s=1.5, environment=environment) as cluster,
        pytest.raises(
            PeerError, match=r"never came; waited 1\.5 s for workers 0, 1"
        ) as got,
    ):
        cluster.run(flow_of(lambda x: x))
    assert "stuck at start" in got.value.__notes__[0]


def at_start(path, line):
    """Environment in which an interpreter does this before all else."""
    (path / "sitecustomize.py").write_text(f"import os, signal\n{line}\n")
    return {"PYTHONPATH": str(path)}


def test_a_worker_that_was_stopped_before_it_came_is_named_as_stopped(tmp_path):
    stop = "os.kill(os.getpid(), signal.SIGSTOP)"
    environment = at_start(tmp_path, stop)
    with (
        Cluster(2, startup_timeout_s=1.5, environment=environment) as cluster,
        pytest.raises(
            PeerError, match=r"worker 0 never came; .* it is stopped .* process \d+"
        ),
    ):
        cluster.run(flow_of(lambda x: x))


def test_a_worker_that_is_stopped_before_it_comes_is_not_waited_for(tmp_path):
    stop = "os.kill(os.getpid(), signal.SIGSTOP)"
    environment = at_start(tmp_path, stop)
    options = {"heartbeat_timeout_s": 0.5, "startup_timeout_s": 10 * TIMEOUT_S}
    with (
        Cluster(1, environment=environment, **options) as cluster,
        pytest.raises(
            PeerError, match=r"worker 0 never came; it is stopped .* process \d+; got"
        ),
    ):
        cluster.start(flow_of(lambda x: x)).result(TIMEOUT_S)


def test_what_a_worker_says_that_was_let_go_alarms_nobody(capsys):
    said = b"terminate called without an active exception\n"
    launcher = SimpleNamespace(_read=lambda fd: said)
    for is_dismissed in (False, True):
        child = Child(0, None, -1, None, None, is_dismissed=is_dismissed)
        ProcessLauncher._read_stderr(launcher, child, 0, None)
        assert child.tail == said
        assert capsys.readouterr().err == ("" if is_dismissed else said.decode())


def test_an_interrupt_of_a_worker_that_is_still_starting_does_nothing(tmp_path, capfd):
    environment = at_start(tmp_path, "os.kill(os.getpid(), signal.SIGINT)")
    with Cluster(1, mode="processes", environment=environment) as cluster:
        found = cluster.run(flow_of(lambda x: x), timeout_s=TIMEOUT_S)["out"]

    assert sorted(found) == [0, 1, 2, 3]
    assert capfd.readouterr().err == ""


def test_a_worker_that_dies_at_start_ends_the_run_at_once_with_its_last_words(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "print('no licence', file=sys.stderr, flush=True)\n"
        "os._exit(9)\n"
    )
    environment = {"PYTHONPATH": str(tmp_path)}
    with (
        Cluster(2, environment=environment) as cluster,
        pytest.raises(PeerError, match="exited with code 9") as got,
    ):
        cluster.run(flow_of(lambda x: x))
    assert "no licence" in got.value.__notes__[0]


def test_a_cluster_started_by_a_thread_outlives_that_thread():
    found = []
    cluster = Cluster(1)
    thread = threading.Thread(target=cluster.__enter__)
    thread.start()
    thread.join()
    with cluster:
        found = cluster.run(flow_of(lambda x: x), timeout_s=TIMEOUT_S)["out"]
    assert sorted(found) == [0, 1, 2, 3]


def test_a_run_with_a_cluster_of_its_own_takes_it_down_when_it_ends():
    flow = Dataflow()
    flow.source([1]).map(lambda x: os.getpid()).collect()
    before = cluster_threads()
    run = flow.start(workers=2)
    (process_id,) = run.result(TIMEOUT_S)["out"]
    assert not is_alive(process_id)
    assert cluster_threads() <= before


def test_a_run_whose_handle_was_dropped_goes_on_to_its_end(tmp_path):
    ended = tmp_path / "ended"

    def data(index, count):
        while not (tmp_path / "go").exists():
            yield None
        yield [1]

    flow = Dataflow()
    flow.source(data, num_shards=1).sink(lambda shard, delivery: ended.touch())
    before = cluster_threads()
    flow.start(workers=1)
    gc.collect()
    (tmp_path / "go").touch()
    wait_for(ended.exists)
    wait_for(lambda: cluster_threads() <= before)


def test_refused_frames_are_counted_in_the_metrics_of_whoever_refused_them():
    flow = Dataflow()
    flow.input("in").collect()
    with Cluster(2) as cluster, cluster.start(flow.build()) as run:
        run.input("in").flush(timeout_s=TIMEOUT_S)
        session = cluster._session
        worker = session.controller.membership.members[1]
        wait_for(lambda: worker.is_connected)
        intrude(worker.endpoint, b"hello")
        intrude(session.transport.endpoint, b"x" * 100)
        wait_for(lambda: run.metrics().get("frames_refused"))
        wait_for(lambda: run.metrics()["controller"]["frames_refused"])
        metrics = run.metrics()
    assert metrics["frames_refused"] == {"short": 1}
    assert metrics["workers"][1]["frames_refused"] == {"short": 1}
    assert metrics["controller"]["frames_refused"] == {"magic": 1}


def cpu_seconds(process_ids):
    """What processes have used so far, those that are gone left out."""
    total = 0
    for process_id in process_ids:
        with contextlib.suppress(FileNotFoundError):
            stat = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2]
            total += sum(map(int, stat.split()[11:13]))
    return total / os.sysconf("SC_CLK_TCK")


def test_idle_workers_and_driver_use_hardly_any_cpu():
    with Cluster(2) as cluster:
        ids = [os.getpid(), *process_ids(cluster).values()]
        flow = Dataflow()
        flow.input("in").collect()
        with cluster.start(flow.build()) as run:
            run.input("in").flush()
            began, before = time.monotonic(), cpu_seconds(ids)
            threading.Event().wait(2.0)
            share = (cpu_seconds(ids) - before) / (time.monotonic() - began)
    assert share < 0.06  # 2% for each of three processes


def test_workers_that_wait_for_another_leave_it_the_cores():
    """More workers than cores: those with nothing to do must not look for work."""

    def compute(shard, delivery):
        if delivery.time == 0:  # until all have come
            return
        until = time.process_time() + 1.0
        while time.process_time() < until:
            pass

    num_workers = 2 * len(os.sched_getaffinity(0))
    flow = Dataflow()
    numbers = flow.input("in").exchange(lambda n: 0).unary(compute)
    numbers.broadcast().probe("seen")
    with Cluster(num_workers) as cluster:
        ids = process_ids(cluster, num_workers)
        with cluster.start(flow.build()) as run:
            for epoch in range(2):
                before = cpu_seconds(ids.values())
                run.input("in").send([epoch])
                run.input("in").advance_to(epoch + 1)
                run.probe("seen").wait_until(epoch, TIMEOUT_S)
            used = cpu_seconds(ids.values()) - before
    assert 0.9 < used < 1.5  # each figure of each process is cut to ticks of the clock
