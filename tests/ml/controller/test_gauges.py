"""Gauges that clients open: how many there are, and whose buffers they count."""

from __future__ import annotations

import pytest

from timelyml.errors import AdmissionError, WireError
from timelyml.ml.controller import Core
from timelyml.ml.controller.gauged import (
    MAX_GROUPS,
    CountBuffers,
    Gauged,
    OpenGauge,
    ReadGauge,
)
from timelyml.ml.controller.gauging import MAX_GAUGES
from timelyml.ml.controller.messages import Refused
from timelyml.ml.controller.outbox import ToClient
from timelyml.ml.store import CLIENT_BITS
from timelyml.runtime.failure import unpack_error


@pytest.fixture
def core():
    core = Core({"island-0": [0]})
    for client in (1, 2):
        core.join(client)
    return core


def answer(core, client, message):
    core.handle(client, message, 0.0)
    effects = core.flush()
    (told,) = [each.body for each in effects if isinstance(each, ToClient)]
    return told


@pytest.mark.parametrize(
    ("number", "group", "says"),
    [
        (5 + (2 << CLIENT_BITS), 0, "under the number of another"),
        (5 + (1 << CLIENT_BITS), MAX_GROUPS, "counts buffers in an impossible group"),
    ],
)
def test_a_client_counts_its_own_buffers_in_a_bounded_number_of_groups(
    core, number, group, says
):
    gauge = answer(core, 1, OpenGauge(1)).request
    with pytest.raises(WireError, match=says):
        core.handle(1, CountBuffers(gauge, group, 0, (number,)), 0.0)


def test_the_oldest_gauge_ends_when_there_are_too_many_of_one_client(core):
    answer(core, 2, OpenGauge(1))
    for request in range(1, MAX_GAUGES + 2):
        answer(core, 1, OpenGauge(request))
    refused = answer(core, 1, ReadGauge(100, 1))
    assert isinstance(refused, Refused)
    with pytest.raises(AdmissionError, match="has no such gauge any more"):
        raise unpack_error(refused.error)
    assert answer(core, 1, ReadGauge(101, 2)) == Gauged(101, ())
    assert answer(core, 2, ReadGauge(102, 1)) == Gauged(102, ())


def test_a_gauge_is_read_until_it_is_ended_or_its_client_leaves(core):
    answer(core, 1, OpenGauge(1))
    assert answer(core, 1, ReadGauge(2, 1)) == Gauged(2, ())
    assert answer(core, 1, ReadGauge(3, 1, ends=True)) == Gauged(3, ())
    assert isinstance(answer(core, 1, ReadGauge(4, 1)), Refused)
    answer(core, 1, OpenGauge(5))
    core.leave(1)
    core.join(1)
    assert isinstance(answer(core, 1, ReadGauge(6, 5)), Refused)
    core.handle(1, CountBuffers(5, 0, 0, (7 + (1 << CLIENT_BITS),)), 0.0)
