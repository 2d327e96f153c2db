"""Fixtures that all tests share; those that ship with the package do the work."""

from __future__ import annotations

import pytest

pytest_plugins = ["timelyml.testing.plugin"]


@pytest.fixture
def cluster(timelyml_cluster):
    """A place to run: the calling thread, two threads, two processes over ZeroMQ."""
    return timelyml_cluster
