"""Launching strictly in sequence, on one host."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyml.errors import LaunchOrderError
from timelyml.ml.scheduling import GangKey, LaunchGate, Ticket


def ticket(position, *, sequence=None, generation=0, placement="s0"):
    number = position * 3 if sequence is None else sequence
    return Ticket(generation, position, number, GangKey("p", position, 0), placement)


@given(st.permutations(range(6)), st.permutations(range(6)), st.integers(1, 6))
def test_launches_are_in_order_whenever_gangs_are_prepared(prepared, mixed, cap):
    gate = LaunchGate("h", generation=0, max_unfinished=cap)
    tickets = [ticket(k) for k in range(6)]
    launched, unfinished = [], []

    def note(now):
        launched.extend(now)
        unfinished.extend(now)
        assert len(unfinished) <= cap

    admitted = iter(tickets)
    for number, key in zip(mixed, prepared, strict=True):
        if number % 2:
            note(gate.admit([next(admitted)]))
        note(gate.prepare(GangKey("p", key, 0)))
    note(gate.admit(admitted))
    while unfinished:
        note(gate.finish(unfinished.pop(0).sequence))
    assert launched == tickets


@pytest.mark.parametrize(
    "wrong",
    [
        ticket(2),
        ticket(0),
        ticket(1, generation=1),
        ticket(1, sequence=0),
    ],
    ids=["gap", "doubled", "other generation", "sequence goes back"],
)
def test_a_gate_refuses_what_is_not_next(wrong):
    gate = LaunchGate("h", generation=0)
    gate.admit([ticket(0)])
    with pytest.raises(LaunchOrderError, match="host 'h' is told to launch out of"):
        gate.admit([wrong])


def test_a_gate_says_which_gang_holds_up_the_rest():
    gate = LaunchGate("h", generation=0)
    assert gate.awaited() is None
    gate.admit([ticket(0), ticket(1)])
    gate.prepare(GangKey("p", 1, 0))
    assert gate.awaited() == ticket(0)
    gate.prepare(GangKey("p", 0, 0))
    assert gate.awaited() is None


def test_preparation_of_a_gang_that_never_comes_is_forgotten():
    gate = LaunchGate("h", generation=0)
    gate.prepare(GangKey("p", 0, 0))
    gate.forget(GangKey("p", 0, 0))
    assert gate.admit([ticket(0)]) == ()


def test_devices_fill_up_on_their_own():
    gate = LaunchGate("h", generation=0, max_unfinished=1)
    for position in range(3):
        gate.prepare(GangKey("p", position, 0))
    gate.place("s0", ["d0"])
    gate.place("both", ["d0", "d1"])
    both, other = ticket(1, placement="both"), ticket(2, placement="unknown")
    assert gate.admit([ticket(0), both, other]) == (ticket(0),)
    assert gate.finish(0) == (both, other)


def test_a_launch_ends_once():
    gate = LaunchGate("h", generation=0)
    with pytest.raises(LaunchOrderError, match="did not begin"):
        gate.finish(0)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 12))
def test_a_gang_of_several_launches_counts_as_so_many(weights, cap):
    gate = LaunchGate("h", generation=0, max_unfinished=cap)
    launched, unfinished = [], []

    def note(now):
        for each in now:
            before = sum(weights[position] for position in unfinished)
            assert before + weights[each.position] <= cap or not unfinished
            launched.append(each.position)
            unfinished.append(each.position)

    for position, weight in enumerate(weights):
        gate.weigh(GangKey("p", position, 0), weight)
        note(gate.prepare(GangKey("p", position, 0)))
    note(gate.admit([ticket(position) for position in range(len(weights))]))
    while unfinished:
        finished = unfinished.pop(0)
        note(gate.finish(ticket(finished).sequence))
    assert launched == list(range(len(weights)))
