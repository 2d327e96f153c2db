"""Fixtures for pytest: `pytest_plugins = ["timelyml.testing.plugin"]` in a conftest.

A test that takes `timelyml_cluster` runs three times: in the calling thread, on two
threads, and on two processes over ZeroMQ. Clusters are shared between tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from timelyml.fluent import Mode
from timelyml.testing.leftovers import Leftovers
from timelyml.testing.places import MODES, Place


@pytest.fixture(scope="session")
def timelyml_places() -> Iterator[dict[Mode, Place]]:
    """The clusters that tests have used so far, by mode; all gone at the end."""
    before = Leftovers.now()
    opened: dict[Mode, Place] = {}
    yield opened
    for place in opened.values():
        place.close()
    before.check_gone()


@pytest.fixture(params=list(MODES))
def timelyml_cluster(
    request: pytest.FixtureRequest, timelyml_places: dict[Mode, Place]
) -> Iterator[Place]:
    """A place to run flows on; fails a test that leaves anything behind."""
    mode: Mode = request.param
    if mode not in timelyml_places:
        timelyml_places[mode] = Place(mode)
    place = timelyml_places[mode]
    place.wait_until_ready()
    before = Leftovers.now()
    yield place
    place.check_nothing_left()
    before.check_gone(sockets=False)
