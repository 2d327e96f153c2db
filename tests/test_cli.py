"""The command line: what it prints where, and with which code it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from timelyml import Cluster, Dataflow
from timelyml.cli import app

FLOWS = """
import sys
import time

from timelyml import Dataflow

flow = Dataflow("words")
words = flow.source(["to be or", "not to be"]).flat_map(str.split)
words.reduce(str, lambda a, b: a + b, value=lambda word: 1).collect("counts")
words.collect("words")


def made():
    return flow


def divided():
    flow = Dataflow("divided")
    flow.source([1, 0]).map(lambda record: 1 // record, name="divide").collect()
    return flow


def looped():
    flow = Dataflow("looped")
    flow.feedback(name="again")
    return flow


def locked():
    import threading

    lock = threading.Lock()
    flow = Dataflow("locked")
    flow.source([1]).map(lambda record: lock and record, name="guard").collect()
    return flow


def mistaken():
    return undefined_name


def endless():
    def forever(shard, num_shards):
        if shard == 0:
            print("started", file=sys.stderr, flush=True)
        while True:
            yield [shard]

    flow = Dataflow("endless")
    flow.source(forever).sink(lambda shard, delivery: None)
    return flow


def leaves():
    sys.exit(3)


def needs(argument):
    return flow


number = 7
table = __import__("numpy").array([[0], [1]])
"""


@pytest.fixture
def timelyml(tmp_path, monkeypatch):
    """Call the command in a directory that holds `flows.py`."""
    (tmp_path / "flows.py").write_text(FLOWS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "flows", raising=False)

    def call(*arguments: str):
        return CliRunner().invoke(app, list(arguments))

    yield call
    sys.modules.pop("flows", None)


def test_version_is_that_of_the_package(timelyml):
    done = timelyml("--version")

    assert (done.exit_code, done.stdout) == (0, f"timelyml {version('timelyml')}\n")


@pytest.mark.parametrize(
    "target", ["flows:flow", "flows", "flows.py:flow", "flows:made"]
)
def test_collected_records_are_printed_one_a_line(timelyml, target):
    done = timelyml("run", target, "--print", "counts")

    expected = ["('be', 2)", "('not', 1)", "('or', 1)", "('to', 2)"]
    assert (done.exit_code, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == expected


def test_nothing_is_printed_unless_asked_for(timelyml):
    done = timelyml("run", "flows:flow")

    assert (done.exit_code, done.output) == (0, "")


@pytest.mark.parametrize("where", [["-w", "2"], ["-w", "2", "--mode", "threads"]])
def test_a_file_runs_on_several_workers(timelyml, where):
    done = timelyml("run", "flows.py", *where, "--print", "words")

    assert (done.exit_code, done.stderr) == (0, "")
    assert sorted(done.stdout.split()) == ["be", "be", "not", "or", "to", "to"]


def test_workers_may_talk_over_tcp(timelyml):
    done = timelyml(
        "run", "flows", "-w", "2", "--transport", "tcp", "--print", "counts"
    )

    assert (done.exit_code, len(done.stdout.splitlines())) == (0, 4)


def test_a_failed_operator_shows_the_users_lines_and_leaves_with_1(timelyml):
    done = timelyml("run", "flows:divided")

    assert (done.exit_code, done.stdout) == (1, "")
    assert "1 // record" in done.stderr
    assert "cli.py" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("timelyml: operator 'divide' failed on worker 0, shard 0")
    assert "ZeroDivisionError" in last


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ("flows:mistaken", "'mistaken' of 'flows' cannot be made; got NameError: "),
        ("raises", "module 'raises' cannot be imported; got ZeroDivisionError: "),
        ("raises.py", "file 'raises.py' cannot be imported; got ZeroDivisionError: "),
        ("needy", "module 'needy' cannot be imported; got ModuleNotFoundError: "),
    ],
)
def test_an_error_in_the_users_module_shows_the_users_lines_and_leaves_with_2(
    timelyml, tmp_path, target, what
):
    (tmp_path / "raises.py").write_text("1 // 0\n")
    (tmp_path / "needy.py").write_text("import surely_not_installed\n")
    done = timelyml("graph", target)

    *lines, last = done.stderr.splitlines()
    assert (done.exit_code, done.stdout) == (2, "")
    assert last.startswith(f"timelyml: {what}")
    assert lines[0] == "Traceback (most recent call last):"
    assert f"{target.partition(':')[0].removesuffix('.py')}.py" in lines[1]
    assert "cli.py" not in done.stderr
    assert "importlib" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["run", "nowhere:flow"], "module 'nowhere' cannot be found"),
        (["run", "nowhere.py:flow"], "file 'nowhere.py' does not exist"),
        (["run", "flows:nothing"], "names no dataflow"),
        (["run", "flows:number"], "names no dataflow; got 7"),
        (["run", "flows:table"], "names no dataflow; got array([[0], [1]])"),
        (["run", "flows:needs"], "'needs' of 'flows' cannot be made; got TypeError"),
        (["run", "flows:leaves"], "'leaves' of 'flows' cannot be made; got SystemExit"),
        (["run", ""], "got '' for the module and 'flow' for the flow"),
        (["run", ":flow"], "got '' for the module and 'flow' for the flow"),
        (["run", "flows:"], "got 'flows' for the module and '' for the flow"),
        (["run", ".."], "got '..' for the module"),
        (["run", ".flows"], "got '.flows' for the module"),
        (["run", "a:b:c"], "got 'a' for the module and 'b:c' for the flow"),
        (["run", "flows:\udcff"], "and '\\udcff' for the flow"),
        (["run", "\udcff"], "got '\\udcff' for the module"),
        (["run", "\udcff.py"], "file '\\udcff.py' does not exist"),
        (["run", "some/where"], "got 'some/where' for the module"),
        (["run", "flows:flow", "--print", "\udcff"], "got --print '\\udcff'"),
        (["why", "--timeout", "nan"], "option 'timeout_s' cannot work; got nan"),
        (["why", "--timeout", "-9"], "option 'timeout_s' cannot work; got -9.0"),
        (["run", "flows:flow", "--print", "out"], "collects nothing of that name"),
        (["run", "flows:flow", "--mode", "inline", "-w", "2"], "'workers' cannot work"),
        (["run", "flows:looped"], "loop 'again' is never connected"),
        (["run", "flows:locked"], "operator 'guard' cannot be shipped"),
        (["graph", "flows:looped"], "loop 'again' is never connected"),
    ],
)
def test_what_is_refused_is_said_in_one_line_and_leaves_with_2(
    timelyml, arguments, reason
):
    done = timelyml(*arguments)

    (line,) = done.stderr.splitlines()
    assert (done.exit_code, done.stdout) == (2, "")
    assert line.startswith("timelyml: ")
    assert reason in line


@pytest.mark.parametrize(
    "arguments", [["run"], ["walk", "flows"], ["run", "flows", "-w", "0"]]
)
def test_wrong_usage_leaves_with_2(timelyml, arguments):
    done = timelyml(*arguments)

    assert (done.exit_code, done.stdout) == (2, "")
    assert "Usage: " in done.stderr


def test_a_graph_is_printed_as_text_or_as_mermaid(timelyml):
    text, mermaid = timelyml("graph", "flows"), timelyml("graph", "flows", "--mermaid")

    assert (text.exit_code, mermaid.exit_code) == (0, 0)
    assert text.stdout.startswith("dataflow words\n")
    assert mermaid.stdout.startswith("flowchart ")
    assert "counts" in text.stdout
    assert "counts" in mermaid.stdout


@pytest.fixture
def sockets(tmp_path, monkeypatch):
    """Drivers of this test listen where those of nobody else do."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_why_says_what_a_running_flow_waits_for(timelyml, sockets):
    flow = Dataflow("fed")
    flow.input("numbers").collect()
    with Cluster(1, mode="threads") as cluster:
        run = flow.start(cluster=cluster)
        run.record.wait_until(lambda: run.record.is_started, 30)
        done = timelyml("why", str(os.getpid()))
        other = timelyml("why", "1")
        run.cancel()

    assert (done.exit_code, done.stderr) == (0, "")
    first, *rest = done.stdout.splitlines()
    assert first.startswith(f"process {os.getpid()}, ")
    assert "run 1 of dataflow 'fed'" in rest[0]
    assert "an input that the driver has not advanced or closed" in rest[1]
    assert "worker 0 is waiting" in done.stdout
    assert (other.exit_code, other.stdout) == (1, "")
    assert "no driver with process id 1 has a cluster" in other.stderr


def test_why_says_so_where_nothing_runs(timelyml, sockets):
    done = timelyml("why")

    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "timelyml: no driver of yours has a cluster on this machine\n"


def test_why_says_so_where_no_run_is_going_on(timelyml, sockets):
    with Cluster(1, mode="inline"):
        done = timelyml("why")

    assert done.exit_code == 0
    assert done.stdout.splitlines()[1] == "  no run is going on"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
@pytest.mark.parametrize("where", [[], ["-w", "2"]])
def test_a_signal_drains_the_run_and_leaves_with_its_code(
    tmp_path, number, code, where
):
    (tmp_path / "flows.py").write_text(FLOWS)
    command = [sys.executable, "-m", "timelyml", "run", "flows:endless", *where]
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr.readline() == "started\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()

    assert (process.returncode, out) == (code, "")
    assert err == ""


def run_printing(tmp_path, stdout):
    """Run the command with that for its stdout; return its exit code and stderr."""
    (tmp_path / "flows.py").write_text(FLOWS)
    command = [sys.executable, "-m", "timelyml", "run", "flows", "--print", "words"]
    done = subprocess.run(
        command,
        check=False,
        cwd=tmp_path,
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    return done.returncode, done.stderr.decode()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_is_said_in_one_line_and_leaves_with_1(tmp_path):
    with Path("/dev/full").open("w") as full:
        code, err = run_printing(tmp_path, full)

    assert (code, len(err.splitlines())) == (1, 1)
    assert "timelyml: stdout cannot be written" in err
    assert "No space left on device" in err


def test_a_closed_pipe_ends_the_program_without_a_word(tmp_path):
    read_end, write_end = os.pipe()
    os.close(read_end)
    code, err = run_printing(tmp_path, write_end)
    os.close(write_end)

    assert (code, err) == (1, "")
