"""Hypothesis without deadlines, as an example is not wrong for being slow; a transport."""

from __future__ import annotations

from contextlib import closing

import pytest
from hypothesis import settings

from timelyml.exchange import ZmqTransport

from .samples import TOKEN, codec, private

settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")


@pytest.fixture
def alone(tmp_path):
    """A transport that plain sockets talk to."""
    transport = ZmqTransport(0, codec=codec(), token=TOKEN, bind=private(tmp_path))
    with closing(transport):
        yield transport
