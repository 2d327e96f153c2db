"""Fixtures that all tests share; those that ship with the package do the work."""

from __future__ import annotations

import signal

import pytest

from timelyml.progress import tracker

pytest_plugins = ["timelyml.testing.plugin"]


def pytest_collection_modifyitems(items):
    """On compiled modules leave out what has to change a class from outside."""
    if tracker.__file__.endswith(".py"):
        return
    skip = pytest.mark.skip(reason="compiled classes cannot be patched")
    for item in items:
        if item.get_closest_marker("sources"):
            item.add_marker(skip)


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
