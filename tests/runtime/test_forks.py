"""Forks of user code: they never act as a worker, and end with theirs."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tests.runtime import scripts
from tests.runtime.test_processes import is_alive, wait_for
from timelyml import Cluster, Dataflow

TIMEOUT_S = 30.0

# Of Python where there are threads, and of JAX where another test has loaded it.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*")


def flow_of(fn, data=(0,)):
    flow = Dataflow(num_shards=1)
    flow.source(data).map(fn, name="work").collect()
    return flow


def come_back(x):
    return os.fork()


def exit_as_a_program_would(x):
    child = os.fork()
    if not child:
        sys.exit(0)
    return child


def raise_in_the_child(x):
    child = os.fork()
    if not child:
        raise LookupError("in the child")
    return child


def come_back_without_a_reader(x):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        os.dup2(writing, 2)
    os.close(reading if child else writing)
    return child


@pytest.mark.parametrize(
    "fork",
    [
        come_back,
        come_back_without_a_reader,
        exit_as_a_program_would,
        raise_in_the_child,
    ],
)
def test_a_fork_that_comes_back_from_user_code_ends_and_its_parent_goes_on(
    cluster, fork
):
    (child,) = cluster.run(flow_of(fork))["out"]
    assert child > 0
    if cluster.mode == "processes":
        wait_for(lambda: not is_alive(child))
    else:
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 4
    assert cluster.run(flow_of(lambda x: x + 1))["out"] == [1]


@pytest.mark.parametrize("workers", ["", "workers=1"])
def test_a_fork_that_came_back_says_so_and_what_to_do(tmp_path, workers):
    code = (
        "import os, time\n"
        "from timelyml import Dataflow\n"
        "flow = Dataflow()\n"
        "flow.source([1]).map(lambda x: os.fork() > 0, name='work').collect()\n"
        f"print(flow.run({workers})['out'])\n"
    )
    code, out, err = scripts.run(code, cwd=tmp_path)
    assert (code, out) == (0, "[True]\n")
    (line,) = err.splitlines()
    assert "forked in operator 'work', shard 0" in line
    assert "os._exit" in line


def test_a_fork_that_stays_in_user_code_ends_with_its_worker(tmp_path):
    def stay(x):
        child = os.fork()
        if not child:
            threading.Event().wait(600)
        return child

    with Cluster(1) as cluster:
        (child,) = cluster.run(flow_of(stay).build(), timeout_s=TIMEOUT_S)["out"]
        assert is_alive(child)
    wait_for(lambda: not is_alive(child))


def test_a_program_that_user_code_started_ends_with_its_worker():
    def start(x):
        import subprocess

        return subprocess.Popen(["sleep", "600"]).pid

    with Cluster(1) as cluster:
        (child,) = cluster.run(flow_of(start).build(), timeout_s=TIMEOUT_S)["out"]
        assert is_alive(child)
    wait_for(lambda: not is_alive(child))


def test_a_fork_in_user_code_ends_with_a_driver_that_was_killed(tmp_path):
    code = (
        "import os, threading\n"
        "from timelyml import Dataflow\n"
        "def stay(x):\n"
        "    child = os.fork()\n"
        "    if child:\n"
        "        print(child, flush=True)\n"
        "    threading.Event().wait(600)\n"
        "flow = Dataflow()\n"
        "flow.source([1]).map(stay).collect()\n"
        "flow.run(workers=1)\n"
    )
    program = scripts.start(code, cwd=tmp_path)
    child = int(scripts.read_line(program))
    assert is_alive(child)
    program.kill()
    scripts.finish(program)
    wait_for(lambda: not is_alive(child))


def test_a_fork_whose_parent_dies_at_once_ends_too(tmp_path):
    code = (
        "import os, threading\n"
        "from timelyml.runtime.process import _let_forks_die_too\n"
        "parent = os.getpid()\n"
        "def until_it_is_gone():\n"
        "    while os.getppid() == parent:\n"
        "        threading.Event().wait(0.01)\n"
        "os.register_at_fork(after_in_child=until_it_is_gone)\n"
        "_let_forks_die_too()\n"
        "if os.fork():\n"
        "    os._exit(0)\n"
        "print('goes on without its parent')\n"
    )
    assert scripts.run(code, cwd=tmp_path) == (0, "", "")


def test_user_code_may_use_forks_of_multiprocessing(cluster):
    def work(x):
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=lambda: queue.put(2 * x))
        child.start()
        child.join()
        return child.exitcode, queue.get()

    assert cluster.run(flow_of(work, data=[21]))["out"] == [(0, 42)]


@pytest.mark.parametrize("mode", ["inline", "threads", "processes"])
def test_a_fork_of_the_driver_has_workers_of_its_own_and_leaves_the_parents_alone(
    tmp_path, mode
):
    code = (
        "import os, sys\n"
        "from timelyml import Cluster, Dataflow\n"
        "def run():\n"
        "    flow = Dataflow()\n"
        "    flow.source([1]).map(lambda x: x + 1).collect()\n"
        "    return cluster.run(flow.build(), timeout_s=20)['out']\n"
        f"cluster = Cluster(1, mode={mode!r})\n"
        "assert run() == [2]\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    assert run() == [2]\n"
        "    cluster.close()\n"
        "    sys.exit(0)\n"
        "_, status = os.waitpid(child, 0)\n"
        "print(status, run())\n"
        "cluster.close()\n"
    )
    # Not below tmp_path: addresses of sockets must be short.
    with tempfile.TemporaryDirectory() as directory:
        environment = {"TMPDIR": directory, "XDG_RUNTIME_DIR": directory}
        found = scripts.run(code, cwd=tmp_path, **environment)
        assert found == (0, "0 [2]\n", "")
        assert not list(Path(directory).iterdir())
