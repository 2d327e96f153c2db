"""Fixtures that all tests share; those that ship with the package do the work."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile

import pytest

pytest_plugins = ["timelyml.testing.plugin"]

UNREADABLE = "ignore:Error reading persistent compilation cache entry"
"""What JAX says where another process is just writing the entry; then it compiles."""


def pytest_configure(config):
    """Let all processes that tests start share what XLA compiles, for this run alone.

    Many tests compile the same functions, each in workers of its own.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return  # the user's own, or of the process that distributes the tests
    directory = tempfile.mkdtemp(prefix="compiled-for-tests-")
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = directory
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    others = os.environ.get("PYTHONWARNINGS", "").split(",")
    os.environ["PYTHONWARNINGS"] = ",".join([*filter(None, others), UNREADABLE])
    config.addinivalue_line("filterwarnings", UNREADABLE)


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_works():
    """Programs that tests start hear Ctrl-C, also where the shell lets it be ignored.

    A shell without job control starts what runs in the background so, and a program
    inherits it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def cluster(timelyml_cluster):
    """A place to run: the calling thread, two threads, two processes over ZeroMQ."""
    return timelyml_cluster
