"""The cluster of tests that need no other: started once, as starting takes seconds."""

from __future__ import annotations

import pytest

from timelyml import ml


@pytest.fixture(scope="session")
def client():
    """A client of two islands of two devices, whose functions compile quickly."""
    quickly = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    with ml.local(islands=2, devices_per_island=2, environment=quickly) as client:
        yield client
