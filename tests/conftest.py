"""Fixtures that all tests share; those that ship with the package do the work."""

from __future__ import annotations

import signal

import pytest

pytest_plugins = ["timelyml.testing.plugin"]


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
