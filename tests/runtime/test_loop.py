"""The loop waits when there is nothing to do, and looks again only while it pays."""

from __future__ import annotations

from itertools import accumulate

from timelyml.runtime.loop import MAX_WAIT_S, Patience, drive


class World:
    """An endpoint, its transport and a clock: messages arrive at given times.

    With `ticks_s` it has something to do by itself that often.
    """

    def __init__(self, arrivals, *, end=10.0, ticks_s=None):
        self.ticks_s = ticks_s
        self.next_tick = ticks_s
        self.now = 0.0
        self.arrivals = sorted(arrivals)
        self.end = end
        self.num_steps = 0
        self.num_sleeps = 0
        self.num_looks = 0
        self.handled_at = []

    def clock(self):
        return self.now

    def step(self):
        self.num_steps += 1
        self.now += 10e-6
        if self.arrivals and self.arrivals[0] <= self.now:
            self.handled_at.append(self.now)
            self.arrivals.pop(0)
            return True
        if self.next_tick is not None and self.next_tick <= self.now:
            self.next_tick += self.ticks_s
            return True
        return False

    def has_work(self):
        return False

    def next_deadline(self):
        return self.next_tick

    def poll(self):
        self.num_looks += 1
        self.now += 2e-6
        return bool(self.arrivals) and self.arrivals[0] <= self.now

    def wait(self, timeout_s):
        self.num_sleeps += 1
        arrival = self.arrivals[0] if self.arrivals else self.end
        self.now = max(self.now, min(arrival, self.now + timeout_s))

    def run(self, spin_s):
        drive(self, self, lambda: self.now >= self.end, self.clock, spin_s=spin_s)


def test_a_loop_without_patience_sleeps_after_each_message():
    world = World([0.001 * n for n in range(1, 101)], end=0.2)

    world.run(spin_s=0.0)

    assert len(world.handled_at) == 100
    assert world.num_sleeps >= 100


def test_a_loop_that_gets_answers_soon_does_not_sleep_between_them():
    world = World([0.0002 * n for n in range(1, 1001)], end=0.201)

    world.run(spin_s=0.002)

    assert len(world.handled_at) == 1000
    assert world.num_sleeps < 10
    assert world.num_steps < 2100  # it looks, but takes steps only when it found some


def test_an_idle_loop_sleeps_for_as_long_as_it_may():
    world = World([], end=60.0)

    world.run(spin_s=0.002)

    assert world.num_sleeps >= 60 / MAX_WAIT_S
    assert world.num_looks == 0  # nothing has come that another could follow


def test_an_answer_that_is_late_now_and_then_is_looked_for_all_the_same():
    gaps = [0.0015 if n % 10 == 0 else 0.0002 for n in range(1000)]
    arrivals = list(accumulate(gaps))
    world = World(arrivals, end=arrivals[-1] + 0.001)

    world.run(spin_s=0.002)

    assert len(world.handled_at) == 1000
    assert world.num_sleeps < 10


def test_answers_that_are_mostly_late_are_slept_for():
    world = World([0.0015 * n for n in range(1, 1001)], end=1.501)

    world.run(spin_s=0.002)

    assert len(world.handled_at) == 1000
    assert world.num_sleeps > 950


def test_work_that_only_time_brings_is_slept_for():
    world = World([], end=1.0, ticks_s=0.001)

    world.run(spin_s=0.002)

    assert world.num_steps > 900
    assert world.num_sleeps > 900


def test_looking_in_vain_is_given_up_and_taken_up_again():
    patience = Patience(0.0003)
    now = 0.0
    looks = []
    for _ in range(10):
        patience.worked(now)
        count = 0
        while patience.goes_on(now):
            now += 10e-6
            count += 1
        looks.append(count)
        now += 1.0
        patience.slept(now)

    assert looks[0] > looks[1] > looks[2]
    assert looks[-1] == 0

    patience.worked(now)
    patience.slept(now + 0.00005)
    patience.worked(now)
    assert patience.goes_on(now + 0.0002)
