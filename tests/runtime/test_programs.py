"""Users' programs from outside: no guard, stdin, pipes, signals, a killed driver."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests.runtime import scripts
from tests.runtime.test_processes import is_alive

PLAIN = """
from timelyml import Dataflow

class Point:
    def __init__(self, x):
        self.x = x

def double(point):
    return Point(2 * point.x)

flow = Dataflow(num_shards=2)
(flow.source([Point(i) for i in range(4)]).exchange(lambda p: p.x).map(double)
    .exchange(lambda p: p.x // 4).collect())
points = flow.run(workers=2)["out"]
assert all(isinstance(point, Point) for point in points)
print(sorted(point.x for point in points))
"""

# Prints a line once it runs; ends only if it is told to.
ENDLESS = """
import itertools, os
from timelyml import Dataflow

def numbers(index, count):
    for i in itertools.count():
        if i == 3:
            print("running", os.getpid(), flush=True)
        yield [i] if i < 3 else []

flow = Dataflow()
flow.source(numbers).collect()
try:
    result = flow.run({workers})
    print("returned", flush=True)
except BaseException as error:
    print("raised", type(error).__name__, error, flush=True)
    raise
"""

MODES = {"inline": "", "processes": "workers=2"}


def test_a_script_without_a_main_guard_runs_and_its_classes_travel(tmp_path):
    assert scripts.run(PLAIN, cwd=tmp_path) == (0, "[0, 2, 4, 6]\n", "")


def test_a_program_on_stdin_runs(tmp_path):
    assert scripts.run(PLAIN, cwd=tmp_path, argv=("-",)) == (0, "[0, 2, 4, 6]\n", "")


def test_a_program_on_the_command_line_runs(tmp_path):
    argv = ("-c", PLAIN)
    assert scripts.run("", cwd=tmp_path, argv=argv)[:2] == (0, "[0, 2, 4, 6]\n")


def test_a_module_beside_the_script_is_importable_in_workers(tmp_path):
    (tmp_path / "beside.py").write_text("def f(x):\n    return x + 1\n")
    code = (
        "import beside\n"
        "from timelyml import Dataflow\n"
        "flow = Dataflow()\n"
        "flow.source([1, 2]).map(beside.f).collect()\n"
        "print(flow.run(workers=1)['out'])\n"
    )
    other = tmp_path / "elsewhere"
    other.mkdir()
    (tmp_path / "program.py").write_text(code)
    argv = (str(tmp_path / "program.py"),)
    assert scripts.run(code, cwd=other, argv=argv)[:2] == (0, "[2, 3]\n")


def test_a_file_of_the_working_directory_does_not_shadow_a_module_of_a_worker(tmp_path):
    (tmp_path / "queue.py").write_text("raise RuntimeError('not for you')\n")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "program.py").write_text(PLAIN)
    argv = (str(inside / "program.py"),)
    assert scripts.run(PLAIN, cwd=tmp_path, argv=argv) == (0, "[0, 2, 4, 6]\n", "")


def test_prints_of_users_go_to_stdout_and_nothing_else_does(tmp_path):
    code = (
        "import sys\n"
        "from timelyml import Dataflow\n"
        "def work(x):\n"
        "    print('out', x)\n"
        "    print('err', x, file=sys.stderr)\n"
        "    return x\n"
        "flow = Dataflow()\n"
        "flow.source([1, 2]).map(work).collect()\n"
        "flow.run(workers=1)\n"
    )
    code, out, err = scripts.run(code, cwd=tmp_path)
    assert (code, out, err) == (0, "out 1\nout 2\n", "err 1\nerr 2\n")


def test_an_error_ends_a_program_with_the_users_line_in_its_traceback(tmp_path):
    code = PLAIN.replace("2 * point.x", "{}[point.x]")
    status, out, err = scripts.run(code, cwd=tmp_path)
    assert status == 1
    assert out == ""
    assert "KeyError: operator 'map' failed on worker" in err
    assert "return Point({}[point.x])" in err


@pytest.mark.parametrize("mode", MODES)
def test_ctrl_c_drains_the_run_then_interrupts_the_program(tmp_path, mode):
    program = scripts.start(ENDLESS.replace("{workers}", MODES[mode]), cwd=tmp_path)
    scripts.read_line(program)
    program.send_signal(signal.SIGINT)
    code, out, err = scripts.finish(program)
    assert out.splitlines()[-1] == "raised KeyboardInterrupt "
    assert code == -signal.SIGINT
    assert "RunStoppedError" not in err  # it was drained, not cancelled


@pytest.mark.parametrize("mode", MODES)
def test_sigterm_drains_the_run_then_ends_the_program(tmp_path, mode):
    program = scripts.start(ENDLESS.replace("{workers}", MODES[mode]), cwd=tmp_path)
    scripts.read_line(program)
    program.send_signal(signal.SIGTERM)
    code, out, _ = scripts.finish(program)
    assert out.splitlines()[-1] == "raised SystemExit 143"
    assert code == 128 + signal.SIGTERM


@pytest.mark.parametrize("mode", MODES)
def test_a_second_ctrl_c_gives_up_what_cannot_be_drained(tmp_path, mode):
    code = (
        "import threading\n"
        "from timelyml import Dataflow\n"
        "def work(x):\n"
        "    print('stuck', flush=True)\n"
        "    threading.Event().wait(600)\n"
        "flow = Dataflow()\n"
        "flow.source([1]).map(work).collect()\n"
        f"flow.run({MODES[mode]})\n"
    )
    program = scripts.start(code, cwd=tmp_path)
    scripts.read_line(program)
    program.send_signal(signal.SIGINT)
    pause = threading.Event()
    while program.poll() is None:
        # the first may still be on its way: signals of one kind do not queue
        pause.wait(0.2)
        program.send_signal(signal.SIGINT)
    code, _, err = scripts.finish(program)
    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in err


STUCK = """
import atexit, os, threading
from timelyml import Cluster, Dataflow

def work(x):
    {work}
    return x

flow = Dataflow(num_shards=2)
flow.source([1, 2]).exchange(lambda x: x).map(work).collect()
{run}
"""
TELL = "print('worker', os.getpid(), flush=True)"
WAIT = "threading.Event().wait(600)"
IN_CLUSTER = """
with Cluster(2{options}) as cluster:
    {before}
    flow.run(cluster=cluster)
    print("closing", flush=True)
"""
LEAVES_LATE = f"{TELL}; atexit.register(lambda: {WAIT})"
STUCK_PROGRAMS = {
    "starting": STUCK.format(
        work="pass",
        run=IN_CLUSTER.format(
            options=", environment={'PYTHONPATH': os.getcwd()}",
            before="print('starting', flush=True)",
        ),
    ),
    "starting its own": STUCK.format(
        work="pass", run="print('starting', flush=True)\nflow.run(workers=2)"
    ),
    "running": STUCK.format(
        work=f"{TELL}; {WAIT}", run=IN_CLUSTER.format(options="", before="pass")
    ),
    "running its own": STUCK.format(work=f"{TELL}; {WAIT}", run="flow.run(workers=2)"),
    "started": STUCK.format(
        work=f"{TELL}; {WAIT}", run="with flow.start(workers=2) as run:\n    pass"
    ),
    "stopping": STUCK.format(
        work=f"{TELL}; {WAIT}",
        run="flow.source([0]).sink(lambda shard, _: shard.emit('here', 0))\n"
        "here = threading.Event()\n"
        "run = flow.start(workers=2, on_message=lambda *_: here.set())\n"
        "here.wait()\n"
        "run.stop()",
    ),
    "closing": STUCK.format(
        work=LEAVES_LATE, run=IN_CLUSTER.format(options="", before="pass")
    ),
    "closing its own": STUCK.format(work=LEAVES_LATE, run="flow.run(workers=2)"),
    "exiting": STUCK.format(
        work=LEAVES_LATE,
        run="cluster = Cluster(2)\nflow.run(cluster=cluster)\n"
        "print('closing', flush=True)",
    ),
}


@pytest.mark.parametrize("where", STUCK_PROGRAMS)
def test_ctrl_c_over_and_over_leaves_nothing_behind(tmp_path, where):
    if where == "starting":
        (tmp_path / "sitecustomize.py").write_text(
            "import sys\nif 'timelyml.runtime.process' in sys.orig_argv:\n"
            f"    import threading; {WAIT}\n"
        )
    # not below tmp_path: the name of a socket can have some 100 characters
    with tempfile.TemporaryDirectory() as directory:
        program = scripts.start(
            STUCK_PROGRAMS[where],
            cwd=tmp_path,
            TMPDIR=directory,
            XDG_RUNTIME_DIR=directory,
        )
        lines = [scripts.read_line(program)]
        while lines[-1].startswith("worker") and where.startswith(("clos", "exit")):
            lines.append(scripts.read_line(program))
            if len(lines) == 2:
                break
        pause = threading.Event()
        began = time.monotonic()
        while program.poll() is None:
            program.send_signal(signal.SIGINT)
            pause.wait(0.1)
        took_s = time.monotonic() - began
        _, out, err = scripts.finish(program)
        lines += out.splitlines()
        workers = [int(line.split()[1]) for line in lines if "worker" in line]
        assert not any(map(is_alive, workers)), lines
        assert list(Path(directory).iterdir()) == [], err
    assert took_s < 20.0  # what does not leave by itself is not waited for


def test_workers_die_with_a_driver_that_was_killed(tmp_path):
    program = scripts.start(ENDLESS.replace("{workers}", "workers=2"), cwd=tmp_path)
    worker = int(scripts.read_line(program).split()[1])
    assert worker != program.pid
    os.kill(program.pid, signal.SIGKILL)
    scripts.finish(program)
    deadline = time.monotonic() + 30
    pause = threading.Event()
    while is_alive(worker):
        assert time.monotonic() < deadline, "the worker outlived its driver"
        pause.wait(0.02)


def test_a_program_that_forgets_its_cluster_ends_all_the_same(tmp_path):
    code = (
        "import os\n"
        "from timelyml import Cluster, Dataflow\n"
        "flow = Dataflow()\n"
        "flow.source([1]).map(lambda x: os.getpid()).collect()\n"
        "cluster = Cluster(2)\n"
        "print(cluster.run(flow.build())['out'][0])\n"
    )
    code, out, err = scripts.run(code, cwd=tmp_path)
    assert (code, err) == (0, "")
    assert not is_alive(int(out))
