"""Turns: launches that wait for what they have to know hold up nothing but launches."""

from __future__ import annotations

import threading

from timelyml.ml.hosts.turns import Turns
from timelyml.ml.scheduling import GangKey, Ticket

TIMEOUT_S = 30.0


class Counts:
    """An array that is computed when the test says so."""

    def __init__(self):
        self.computed = threading.Event()

    def is_ready(self):
        return self.computed.is_set()

    def block_until_ready(self):
        self.computed.wait(TIMEOUT_S)


class Launches:
    """Launches of which each has a part before and one after what it waits for."""

    def __init__(self, waits):
        self.begun, self.done, self.woken = [], [], threading.Event()
        self._waits = waits
        self.turns = Turns(self._turn, self.woken.set)

    def take(self, *slices):
        first = len(self.begun)
        self.turns.take(
            Ticket(0, first + i, first + i, GangKey("p", first + i, 0), name)
            for i, name in enumerate(slices)
        )

    def _turn(self, ticket):
        self.begun.append(ticket.sequence)
        yield from self._waits.get(ticket.sequence, ())
        self.done.append(ticket.sequence)


def test_a_launch_that_waits_holds_up_those_after_it_and_not_who_launches():
    counts = Counts()
    launches = Launches({1: [counts]})

    launches.take("a", "b", "a")

    assert (launches.begun, launches.done) == ([0, 1], [0])
    launches.turns.go_on()  # as for any other news
    assert not launches.turns.is_due()
    assert launches.done == [0]
    counts.computed.set()
    assert launches.woken.wait(TIMEOUT_S)
    assert launches.turns.is_due()
    launches.turns.go_on()
    assert launches.done == [0, 1, 2]
    assert launches.begun == [0, 1, 2]


def test_nothing_is_waited_for_on_slices_that_are_abandoned():
    last = Counts()
    launches = Launches({0: [Counts(), Counts()], 1: [Counts()], 2: [last]})
    launches.take("a", "a", "b")

    launches.turns.hurry(("a",))

    assert launches.done == [0, 1]
    last.computed.set()
    assert launches.woken.wait(TIMEOUT_S)
    launches.turns.go_on()
    assert launches.done == [0, 1, 2]
