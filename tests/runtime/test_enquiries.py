"""Other programs of the user can ask a driver what its runs wait for, and nobody else."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import weakref

import pytest

from tests.runtime import scripts
from timelyml import Cluster, Dataflow
from timelyml.errors import ConfigError
from timelyml.runtime import enquiries
from timelyml.runtime.enquiries import EnquiryServer, ask_drivers, private_directory
from timelyml.testing import eventually


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "timelyml"


def forgetful():
    """A flow whose operator keeps a capability for ever."""

    def keep(shard, delivery):
        shard.state[delivery.time] = shard.retain(delivery.time)

    flow = Dataflow("forgetful")
    flow.source([1]).unary(keep, name="window").collect()
    return flow


@pytest.mark.parametrize(("mode", "workers"), [("threads", 2), ("processes", 2)])
def test_a_run_says_who_holds_it_back(mode, workers):
    with Cluster(workers, mode=mode) as cluster:
        run = forgetful().start(cluster=cluster)
        assert eventually(lambda: "in keep" in str(run.explain_stall()), 60)
        (answer,) = ask_drivers()
        run.cancel()
    assert answer["process_id"] == os.getpid()
    assert answer["num_workers"] == workers
    (report,) = answer["runs"]
    assert "dataflow 'forgetful'" in report["headline"]
    rows = [(row["operator"], row["time"], row["worker"]) for row in report["rows"]]
    assert ("window", 0, 0) in rows
    assert any("in keep" in site for row in report["rows"] for site in row["sites"])
    assert ask_drivers() == []


def test_code_that_keeps_the_calling_thread_is_named(tmp_path):
    code = (
        "from timelyml import Dataflow\n"
        "flow = Dataflow()\n"
        "def call(x):\n"
        "    print('here', flush=True)\n"
        "    input()\n"
        "flow.source([1]).map(call, name='call').collect()\n"
        "flow.run()\n"
    )
    program = scripts.start(code, cwd=tmp_path, keep_stdin=True)
    scripts.read_line(program)
    (answer,) = ask_drivers(timeout_s=0.2)
    scripts.finish(program)

    assert answer["process_id"] == program.pid
    assert answer["program"].endswith("program.py")
    assert answer["workers"] == {"0": "in operator 'call', shard 0, run 1"}
    assert "controller that does not answer" in answer["runs"][0]["headline"]


def test_a_run_that_is_over_is_not_told_of():
    flow = Dataflow()
    flow.source([1]).collect()
    with Cluster(1, mode="threads") as cluster:
        flow.run(cluster=cluster)
        assert [answer["runs"] for answer in ask_drivers()] == [[]]


class Captured:
    """What a user's function refers to."""


def test_neither_a_run_nor_its_graph_is_kept_for_enquiries():
    def run(cluster):
        captured = Captured()
        flow = Dataflow()
        flow.source([1]).map(lambda x: captured and x).collect()
        flow.run(cluster=cluster)
        return weakref.ref(captured)

    with Cluster(1, mode="threads") as cluster:
        kept = run(cluster)
        gc.collect()
        assert kept() is None
        assert len(cluster._session._runs) == 0


def test_sockets_are_private_and_go_with_their_session(directory):
    with Cluster(1, mode="inline"):
        (path,) = directory.iterdir()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_ISSOCK(path.stat().st_mode)
    assert not directory.exists()


def test_a_directory_that_others_may_enter_is_not_used(directory):
    directory.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="is not private; got mode 755"):
        private_directory()
    flow = Dataflow()
    flow.source([1]).collect()
    assert flow.run()["out"] == [1]
    with pytest.raises(ConfigError, match="is not private"):
        ask_drivers()
    assert list(directory.iterdir()) == []


def test_a_link_to_another_directory_is_not_used(directory, tmp_path):
    (tmp_path / "other").mkdir(mode=0o700)
    directory.symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="is not private"):
        private_directory()


def test_the_directory_of_temporary_files_stands_in(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert private_directory() == tmp_path / f"timelyml-{os.getuid()}"


def test_a_socket_of_a_driver_that_was_killed_is_removed(directory):
    private_directory()
    path = directory / "1-dead.socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))
    assert ask_drivers() == []
    assert not path.exists()


def test_the_next_driver_removes_what_is_left_of_one_that_was_killed(directory):
    private_directory()
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(directory / f"{gone.pid}-dead.socket"))
    server = EnquiryServer(lambda timeout_s: {})
    assert [path.name for path in directory.iterdir()] == [server.path.name]
    server.close()


def test_a_driver_that_does_not_answer_is_named(directory, monkeypatch):
    monkeypatch.setattr(enquiries, "CLIENT_TIMEOUT_S", 0.1)
    private_directory()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as deaf:
        deaf.bind(str(directory / "17-deaf.socket"))
        deaf.listen()
        (answer,) = ask_drivers(timeout_s=0.1)
    assert answer["process_id"] == 17
    assert "does not answer: TimeoutError" in answer["error"]


@pytest.mark.parametrize(
    "said", [b"nonsense\n", b"[]\n", b'{"ask": "exec"}\n', b'{"ask": "why"}\n', b"x"]
)
def test_nonsense_is_not_answered_and_ends_nothing(said):
    server = EnquiryServer(lambda timeout_s: {"process_id": 7})
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(server.path))
        client.sendall(said)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100) == b""
    assert ask_drivers() == [{"process_id": 7}]
    server.close()


def test_another_user_is_not_answered(monkeypatch):
    server = EnquiryServer(lambda timeout_s: {"process_id": 7})
    monkeypatch.setattr(enquiries.os, "getuid", lambda: 4711)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(server.path))
        with contextlib.suppress(ConnectionError):  # closed before it was asked
            client.sendall(json.dumps({"ask": "why", "timeout_s": 1}).encode() + b"\n")
            assert client.recv(100) == b""
    server.close()


def test_a_closed_server_leaves_no_thread_and_no_socket(directory):
    before = set(threading.enumerate())
    server = EnquiryServer(lambda timeout_s: {})
    (thread,) = set(threading.enumerate()) - before
    server.close()
    assert not thread.is_alive()
    assert not directory.exists()


def test_the_last_of_several_removes_the_directory(directory):
    first, second = (EnquiryServer(lambda timeout_s: {}) for _ in range(2))
    first.close()
    assert [path.name for path in directory.iterdir()] == [second.path.name]
    second.close()
    assert not directory.exists()
