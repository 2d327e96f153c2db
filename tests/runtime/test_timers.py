"""Activations come when they are due, each once, and never pile up."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.fakes import FakeClock
from timelyml.runtime.outside import Wakes
from timelyml.runtime.timers import GRID_S, Timers


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.floats(0.001, 1.0)),
        max_size=30,
    )
)
def test_each_shard_is_activated_at_its_times_and_not_before(asked):
    clock = FakeClock()
    began, timers = clock.now, Timers(clock)
    for operator, shard, after_s in asked:
        timers.ask(operator, shard, after_s)
    activated = []
    while (due := timers.due_at()) is not None:
        assert due > clock.now
        clock.now = due
        activated += [(*shard, clock.now - began) for shard in timers.take_due()]

    for operator, shard, after_s in asked:
        assert any(
            (o, s) == (operator, shard) and after_s - 1e-9 <= t <= after_s + 2 * GRID_S
            for o, s, t in activated
        )
    for operator, shard, time in activated:
        assert any(
            (o, s) == (operator, shard) and time <= after_s + 2 * GRID_S
            for o, s, after_s in asked
        )


def test_asking_over_and_over_piles_nothing_up():
    clock = FakeClock()
    timers = Timers(clock)
    for _ in range(10_000):
        timers.ask(0, 0, 0.5)
        clock.pass_(1e-6)

    assert len(timers._heap) <= 11
    clock.pass_(1.0)
    assert set(timers.take_due()) == {(0, 0)}
    assert timers.due_at() is None
    assert not timers._asked


def test_waking_over_and_over_is_one_wake():
    woken = []
    wakes = Wakes(lambda: woken.append(1))
    wake, other = wakes.waker(1, 2), wakes.waker(0, 0)
    for _ in range(1000):
        wake()
    other()

    assert list(wakes.take()) == [(0, 0), (1, 2)]
    assert list(wakes.take()) == []


def test_no_wake_is_lost_between_threads():
    wakes = Wakes(lambda: None)
    wake, seen, has_ended = wakes.waker(0, 0), 0, threading.Event()
    told = []  # a number before each wake, to be found by whoever takes it

    def work():
        for number in range(20_000):
            told.append(number)
            wake()
        has_ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not has_ended.is_set() or wakes._asked:
        for _ in wakes.take():
            seen = len(told)
    thread.join()

    assert seen == 20_000
