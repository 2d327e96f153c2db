"""Hosts that join a served cluster as processes, and leave: in peace, or suddenly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.ml.client.test_serving import core_of, start
from timelyml import Dataflow, ml
from timelyml.errors import BufferLostError, PeerError
from timelyml.exchange import ServerKeys
from timelyml.runtime import cluster
from timelyml.testing.leftovers import Leftovers, eventually

SOON_S = 10
TIMEOUT_S = 60
SILENCE_S = 4
ARRAY = np.arange(5000, dtype=np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    before = Leftovers.now()
    path = tmp_path_factory.mktemp("server") / "address"
    listen = "tcp://127.0.0.1:*"
    options = {"memory_bytes_per_device": 1 << 20, "heartbeat_timeout_s": SILENCE_S}
    with ml.serve(path, listen=listen, **options) as server:
        yield server
    before.check_gone(sockets=False)


@pytest.fixture
def client(server):
    with ml.connect(server.path) as client:
        yield client


@pytest.fixture
def join(server):
    """Start a worker that joins; killed at the end if it is still there."""
    workers = []

    def start(*options, key=None):
        command = [sys.executable, "-m", "timelyml", "worker", "--join", server.address]
        command += ["--key", str(key or server.key_path), *options]
        worker = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.kill()
        worker.communicate(timeout=TIMEOUT_S)


def code_of(worker):
    """Its exit code, and what it said."""
    _, said = worker.communicate(timeout=TIMEOUT_S)
    return worker.returncode, said


def test_a_slice_that_waited_is_given_devices_that_join_and_leave_in_peace(
    client, join
):
    mine = client.slice({"x": 1}, memory_bytes=1 << 19)
    x = client.put(ARRAY, mine.sharding())
    worker = join("--devices", "2", "--drain", "60")
    more = (1 << 19) + 1  # than mine leaves
    waited = client.slice({"x": 1}, memory_bytes=more, timeout_s=TIMEOUT_S)
    assert waited.island != mine.island
    pair = client.slice({"x": 2}, island=waited.island)

    twice = ml.jit(lambda x: x * 2, slice=pair, in_shardings=P("x"))(x)
    back = ml.jit(lambda x: x + 1, slice=mine)(twice)
    np.testing.assert_array_equal(back, ARRAY * 2 + 1)

    moving = client.slice({"x": 1})
    assert moving.island == waited.island, "the least loaded device is there"
    y = client.put(ARRAY, moving.sharding())
    worker.send_signal(signal.SIGTERM)
    pair.close()
    waited.close()
    assert eventually(lambda: is_refused(client), SOON_S)
    np.testing.assert_array_equal(twice, ARRAY * 2)  # it stays until this is let go of
    del twice
    assert code_of(worker)[0] == 0
    np.testing.assert_array_equal(back, ARRAY * 2 + 1)
    y = ml.jit(lambda x: x + 1, slice=moving)(y)
    np.testing.assert_array_equal(y, ARRAY + 1)  # the slice has moved to where mine is


def test_workers_form_an_island_whose_end_is_told_by_name(client, join):
    options = "--island", "pair", "--hosts-per-island", "2"
    workers = [join(*options) for _ in range(2)]
    first = client.slice({"x": 1})
    s = next(filter(None, iter(lambda: slice_on(client, "pair"), object())))
    x = client.put(ARRAY, s.sharding(P("x")))
    total = ml.jit(lambda x: x.sum(), slice=s)(x)
    assert float(total) == pytest.approx(ARRAY.sum(), rel=1e-6)
    code, said = code_of(join("--island", "pair"))
    assert code == 2
    assert "island 'pair' was formed before" in said

    workers[0].kill()
    with pytest.raises(BufferLostError, match=r"float32\[5000\] .* island 'pair'; got"):
        ml.jit(lambda x: x + 1, slice=s)(x).result(timeout_s=SOON_S)
    # Of no use any more, it is let go; JAX aborts it if it was not the coordinator.
    assert code_of(workers[1])[0] in (0, -signal.SIGABRT)
    other = ml.jit(lambda x: x + 1, slice=first)
    assert float(other(np.float32(1))) == 2.0


def test_dataflows_run_on_a_worker_that_joined_until_they_lose_it(
    server, join, monkeypatch
):
    before = squares_on(server.cluster)
    worker = join()
    assert eventually(lambda: server.cluster.num_workers == 2, TIMEOUT_S)
    counted = []
    monkeypatch.setattr(
        cluster, "default_mode", lambda *sizes: counted.append(sizes) or "broadcast"
    )
    after = squares_on(server.cluster)
    assert [num_workers for num_workers, _ in counted] == [2]
    processes = processes_of(after, epoch=0)
    assert worker.pid in processes
    assert processes_of(before, epoch=0) == processes - {worker.pid}

    worker.kill()
    with pytest.raises(PeerError, match=rf"worker \d+ \(joined, pid {worker.pid}\)"):
        after.result(timeout_s=SOON_S)
    assert processes_of(before, epoch=1) == processes - {worker.pid}
    before.stop(timeout_s=SOON_S)


@pytest.mark.slow
def test_a_signal_lets_processes_leave_that_jax_has_joined(client, join):
    workers = [join("--island", "two", "--hosts-per-island", "2") for _ in range(2)]
    s = next(filter(None, iter(lambda: slice_on(client, "two"), object())))
    assert float(ml.jit(lambda: np.float32(2), slice=s)()) == 2.0
    s.close()
    workers[0].send_signal(signal.SIGTERM)
    assert [code_of(each)[0] for each in workers] == [0, 0]


def squares_on(cluster):
    """A run that squares numbers; each says which process did it."""
    flow = Dataflow()
    numbers = flow.input("numbers").exchange(lambda n: n)
    numbers.map(lambda n: (n * n, os.getpid())).collect("squares")
    return flow.start(cluster=cluster)


def processes_of(run, epoch):
    """Give a run the numbers of an epoch; return the processes that squared them."""
    run.input("numbers").send(list(range(8)))
    run.input("numbers").advance_to(epoch + 1)

    def found():
        batches = run.batches("squares")
        return [row for time, rows in batches if time == epoch for row in rows]

    assert eventually(found, SOON_S)
    assert sorted(square for square, _ in found()) == [n * n for n in range(8)]
    return {process for _, process in found()}


def is_refused(client):
    """Whether nobody gives two devices any more, as only the worker has so many."""
    found = slice_on(client, None)
    if found is not None:
        found.close()
    return found is None


def slice_on(client, island, num_devices=2):
    """A slice over devices of an island, two unless said, if it may be used."""
    try:
        return client.slice({"x": num_devices}, island=island, timeout_s=0)
    except ml.SliceError:
        return None


def test_a_worker_without_the_key_is_refused_and_learns_why(join, tmp_path):
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text(ServerKeys.generate().access.to_text())
    code, said = code_of(join(key=key))
    assert code == 1
    assert "lets nobody in with this key; got the handshake failed" in said
    assert key.read_text() not in said
    code, said = code_of(join("--hosts-per-island", "2"))
    assert code == 2
    assert "processes of one island have to name it alike" in said


def test_hosts_that_stop_answering_leave_no_trace(server, join):
    core = core_of(server)
    worker = join("--island", "half", "--hosts-per-island", "2")
    assert eventually(lambda: core._arrivals._forming, SOON_S * 3)
    worker.kill()
    assert eventually(lambda: not core._arrivals._forming, SOON_S)


def test_a_worker_that_is_stopped_is_given_up_by_name(client, join):
    worker = join("--devices", "3")
    s = next(filter(None, iter(lambda: slice_on(client, None, 3), object())))
    x = client.put(ARRAY, s.sharding())
    twice = ml.jit(lambda x: x * 2, slice=s)(x).block_until_ready()
    worker.send_signal(signal.SIGSTOP)
    who = rf"worker \d+ \(joined, pid {worker.pid}\) .*silent for {SILENCE_S} s"
    with pytest.raises(BufferLostError, match=who):
        ml.jit(lambda x: x + 1, slice=s)(twice).result(timeout_s=SOON_S * 3)


def test_a_client_that_is_stopped_is_forgotten_with_what_it_had(server):
    core = core_of(server)
    theirs = start(server, is_remote=True, num_devices=1)
    assert theirs.stdout.readline() == "20\n"
    (other,) = {entry.client for entry in core.buffers.directory.entries()}
    theirs.send_signal(signal.SIGSTOP)
    assert eventually(lambda: not core.buffers.directory.of_client(other), SOON_S * 3)
    assert eventually(lambda: server.num_clients == 0, SOON_S)
    theirs.send_signal(signal.SIGCONT)
    theirs.communicate("\n", timeout=TIMEOUT_S)
    assert theirs.returncode == 0
