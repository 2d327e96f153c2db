"""Guests come and leave; workers and other guests are told, and go on."""

from __future__ import annotations

import pytest

from timelyml.exchange import CONTROLLER, Endpoint, LinkFailure
from timelyml.runtime.guests import Guests
from timelyml.runtime.membership import Membership, Phase
from timelyml.runtime.messages import (
    HANDSHAKE,
    Connect,
    GuestCame,
    Hello,
    LinkLost,
    ServiceMessage,
    Shutdown,
)

WORKERS = {0: Endpoint("ipc://0", "ipc://0b"), 1: None}


class Wire:
    """A transport that notes what is sent, and to whom."""

    def __init__(self):
        self.connected, self.sent = [], []

    def connect(self, peer, endpoint, *, is_watched):
        assert is_watched, "the silence of a guest has to be noticed"
        self.connected.append(peer)

    def send(self, peer, message, lane):
        self.sent.append((peer, message))


class Services:
    """Notes what services hear."""

    def __init__(self):
        self.heard, self.gone = [], {}

    def handle(self, peer, message):
        self.heard.append((peer, message.body))

    def lost(self, peer, error):
        self.gone[peer] = str(error)


class Workers:
    """Whom the cluster began with, and who of them was let go."""

    num_workers = len(WORKERS)

    def __init__(self):
        self.there = dict(WORKERS)

    def endpoints(self):
        return self.there

    def lose(self, worker, _):
        del self.there[worker]


class Processes:
    """Notes which processes are started and ended; each is in a callback."""

    def __init__(self):
        self.done = []

    def spawn(self, worker):
        self.done.append(("spawn", worker))

    def place(self, worker):
        return f"callback of {worker}"

    def kill(self, worker):
        self.done.append(("kill", worker))

    def retire(self, worker):
        self.done.append(("retire", worker))


class Runs:
    """Notes who is lost to runs."""

    def __init__(self):
        self.lost = []

    def told(self, place):
        return f" in {place}", {"operator": place}

    def lose(self, worker, error):
        self.lost.append((worker, getattr(error, "operator", None)))


@pytest.fixture
def place():
    place = Place()
    place.guests.open(place.services)
    return place


class Place:
    """Guests with all that they need; suspicions wait until `later` is called."""

    def __init__(self):
        self.wire, self.services, self.suspicions = Wire(), Services(), []
        self.workers, self.processes, self.runs = Workers(), Processes(), Runs()
        self.guests = Guests(
            self.wire,
            self.workers,
            self.processes,
            self.suspicions.append,
            self.runs,
        )

    def come(self, version=HANDSHAKE):
        index = self.guests.invite()
        self.guests.handle(index, Hello(index, 70 + index, at(index), version))
        return index

    def later(self):
        while self.suspicions:
            self.suspicions.pop()()


def at(index):
    return Endpoint(f"tcp://g{index}", f"tcp://g{index}b")


def test_each_guest_and_all_others_are_introduced_to_each_other(place):
    first, second = place.come(), place.come()
    assert (first, second) == (2, 3)
    assert place.wire.connected == [2, 3]
    assert place.wire.sent == [
        (0, GuestCame(2, at(2))),
        (1, GuestCame(2, at(2))),
        (2, Connect((WORKERS[0], None))),
        (0, GuestCame(3, at(3))),
        (1, GuestCame(3, at(3))),
        (2, GuestCame(3, at(3))),
        (3, Connect((WORKERS[0], None, at(2)))),
    ]


def test_a_guest_that_comes_before_the_workers_waits_for_them():
    place = Place()
    index = place.come()
    assert index not in place.guests
    place.guests.open(place.services)
    assert index in place.guests


def test_who_was_not_invited_or_speaks_otherwise_is_not_heard(place):
    assert not place.guests.handle(9, Hello(9, 1, at(9), HANDSHAKE))
    index = place.come("another wire")
    assert index not in place.guests
    assert not place.guests.handle(index, ServiceMessage("ml", 1))
    assert not place.services.heard


def test_what_a_guest_says_reaches_services_and_so_does_its_loss(place):
    index = place.come()
    place.guests.handle(index, ServiceMessage("ml", "hello"))
    assert place.services.heard == [(index, "hello")]
    place.guests.handle(index, LinkFailure("it broke"))
    gone = "worker 2 (joined, pid 72) is gone: it broke in callback of 2;"
    assert place.services.gone[index].startswith(gone)
    assert place.runs.lost == [(index, "callback of 2")]
    assert place.come() == 3, "an index is never used again"


def test_a_guest_that_is_dismissed_is_no_loss(place):
    index = place.come()
    place.guests.dismiss(index)
    assert place.wire.sent[-1] == (index, Shutdown())
    assert not place.guests.handle(index, LinkFailure("it closed"))
    assert not place.services.gone


def test_the_end_of_a_peer_is_not_held_against_who_tells_of_it(place):
    stays, leaves = place.come(), place.come()
    place.guests.handle(stays, LinkLost(stays, leaves, "it closed"))
    place.guests.handle(stays, LinkLost(stays, 1, "it closed"))
    place.guests.dismiss(leaves)
    place.guests.dismiss(1)
    place.later()
    assert stays in place.guests

    place.guests.handle(stays, LinkLost(stays, 0, "a gap"))
    place.later()
    assert "hears no more of worker 0: a gap" in place.services.gone[stays]


def test_guests_are_hired_and_let_go_like_those_that_came(place):
    first, second = place.guests.start_workers(2)
    place.guests.handle(first, Hello(first, 70, at(first), HANDSHAKE))
    place.guests.dismiss(first)
    place.guests.dismiss(second, is_at_once=True)
    assert place.processes.done == [
        ("spawn", first),
        ("spawn", second),
        ("retire", first),
        ("kill", second),
    ]
    assert not list(place.guests)


def test_a_guest_without_a_controller_is_gone(place):
    index = place.come()
    place.guests.handle(index, LinkLost(index, CONTROLLER, "a gap"))
    place.later()
    assert index not in place.guests


def test_a_cluster_that_only_has_guests_is_ready_at_once():
    membership = Membership(0, 5.0, heartbeat_timeout_s=8.0)
    assert membership.phase is Phase.READY
    assert membership.overdue(100.0) == []
    assert membership.next_deadline() == 102.0
