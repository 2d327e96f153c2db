"""Directories for sockets and spilled blocks go with their process, however it ends."""

from __future__ import annotations

import gc
import signal
import tempfile
from pathlib import Path

import pytest

from tests.runtime import scripts
from timelyml.runtime.scratch import PREFIX, ScratchDirectory

HOLDS_ONE = """
from timelyml.runtime.scratch import ScratchDirectory

scratch = ScratchDirectory()
(scratch.path / "spilled").write_text("rows")
print(scratch.path, flush=True)
input()
"""
HOLDS_A_CLUSTER = """
from timelyml import Cluster, Dataflow

flow = Dataflow()
flow.source([1]).collect()
if __name__ == "__main__":
    with Cluster(workers=1) as cluster:
        flow.run(cluster=cluster)
        print("ready", flush=True)
        input()
"""


@pytest.fixture(autouse=True)
def directory(monkeypatch):
    """Return the directory of temporary files, which nobody else uses.

    Not pytest's own, whose path can be too long for the sockets in it.
    """
    with tempfile.TemporaryDirectory() as found:
        monkeypatch.setattr("tempfile.tempdir", found)
        yield Path(found)


def test_a_directory_is_private_and_goes_when_it_is_removed():
    scratch = ScratchDirectory()
    mode = scratch.path.stat().st_mode & 0o777
    (scratch.path / "spilled").write_text("rows")

    scratch.remove()
    scratch.remove()

    assert mode == 0o700
    assert not scratch.path.exists()


def test_a_directory_goes_with_the_last_reference(directory):
    scratch = ScratchDirectory()

    del scratch
    gc.collect()

    assert list(directory.iterdir()) == []


def test_directories_of_live_processes_stay(directory, tmp_path):
    other = scripts.start(
        HOLDS_ONE, cwd=tmp_path, keep_stdin=True, TMPDIR=str(directory)
    )
    theirs = scripts.read_line(other)

    first, second = ScratchDirectory(), ScratchDirectory()

    here = {str(path) for path in directory.iterdir()}
    other.communicate("\n", timeout=scripts.TIMEOUT_S)
    assert here == {theirs, str(first.path), str(second.path)}


@pytest.mark.parametrize("program", [HOLDS_ONE, HOLDS_A_CLUSTER])
def test_what_a_killed_process_left_is_removed(directory, tmp_path, program):
    killed = scripts.start(
        program,
        cwd=tmp_path,
        keep_stdin=True,
        TMPDIR=str(directory),
        XDG_RUNTIME_DIR=str(tmp_path),
    )
    scripts.read_line(killed)
    killed.kill()
    killed.communicate(timeout=scripts.TIMEOUT_S)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(directory.iterdir())) == 1

    scratch = ScratchDirectory()

    assert list(directory.iterdir()) == [scratch.path]


def test_a_fork_that_ends_leaves_the_directory_to_its_parent(directory, tmp_path):
    fork = """
import os, sys
from timelyml.runtime.scratch import ScratchDirectory

scratch = ScratchDirectory()
if os.fork() == 0:
    sys.exit()
os.wait()
print(scratch.path.exists())
"""

    code, out, err = scripts.run(fork, cwd=tmp_path, TMPDIR=str(directory))

    assert (code, out, err) == (0, "True\n", "")
    assert list(directory.iterdir()) == []


def test_a_link_of_that_name_is_left_alone(directory, tmp_path):
    target = tmp_path / "mine"
    target.mkdir()
    (target / "kept").write_text("rows")
    (directory / f"{PREFIX}link").symlink_to(target)
    (directory / f"{PREFIX}file").write_text("rows")

    ScratchDirectory().remove()

    assert (target / "kept").exists()
    assert {path.name for path in directory.iterdir()} == {
        f"{PREFIX}link",
        f"{PREFIX}file",
    }
