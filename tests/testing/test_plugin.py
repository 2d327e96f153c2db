"""The shipped fixtures, in a project of a user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CONFTEST = 'pytest_plugins = ["timelyml.testing.plugin"]\n'

TESTS = """
from timelyml import Dataflow


def test_sum(timelyml_cluster):
    flow = Dataflow(num_shards=2)
    flow.source(range(4)).exchange(lambda n: n).map(lambda n: n + 1).collect()
    assert sorted(timelyml_cluster.run(flow)["out"]) == [1, 2, 3, 4]


def test_forgotten(timelyml_cluster):
    flow = Dataflow()
    flow.input("numbers").collect()
    timelyml_cluster.start(flow)


def test_next(timelyml_cluster):
    assert timelyml_cluster.run(Dataflow()) == {}
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_flows.py").write_text(TESTS)

    def run(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )

    return run


def test_a_test_runs_in_every_mode(project):
    done = project("-v", "-k", "sum")

    assert done.returncode == 0, done.stdout
    for mode in ("inline", "threads", "processes"):
        assert f"test_sum[{mode}] PASSED" in done.stdout


def test_a_run_that_a_test_leaves_is_an_error_of_that_test_only(project):
    done = project("-rA", "-k", "forgotten or next")

    assert "3 errors" in done.stdout
    assert "ERROR test_flows.py::test_forgotten[inline]" in done.stdout
    assert "the test left <Run" in done.stdout
    assert "an input that the driver has not advanced or closed" in done.stdout
    assert done.stdout.count("PASSED test_flows.py::test_next") == 3
