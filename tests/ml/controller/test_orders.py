"""Calls that are declared in order: launched as they come, and ended as others are."""

from __future__ import annotations

import pytest

from tests.ml.controller.test_core import num_over, output_errors, random_calls
from tests.ml.controller.world import World
from timelyml.errors import PeerError
from timelyml.ml.controller.messages import CancelCalls


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("memory_bytes", [4 << 30, 160], ids=["ample", "tight"])
def test_calls_of_one_order_are_launched_as_they_come(seed, memory_bytes):
    world = World(seed, memory_bytes=memory_bytes)
    random_calls(world, 60, orders=(0, 1, 2), failing=0)
    world.settle()

    assert num_over(world) == 60
    assert not world.core._calls._last
    calls = {}
    for slice_, order, outs in world.declared:
        calls.setdefault((slice_, order), []).append(outs)
    num_checked = 0
    for (_, order), expected in calls.items():
        for host in world.hosts.values() if order else ():
            launched = [outs for outs in host.launched if outs in expected]
            assert launched in ([], expected)
            num_checked += len(launched)
    assert num_checked >= 40


@pytest.mark.parametrize("seed", range(20))
def test_calls_of_one_order_end_as_others_when_some_fail(seed):
    world = World(seed, memory_bytes=160)
    expected, _ = random_calls(world, 60, orders=(0, 1, 2), failing=0.3)
    world.settle()

    assert num_over(world) == 60
    assert not world.core._calls._last
    found = output_errors(world)
    for out, fate in expected.items():
        assert found[out] in (fate or {None}), out


class Late:
    """A value on one island that is long in coming, and calls on another.

    `taking` needs it; `after` was called later and does not, in the same order.
    """

    def __init__(self, **options):
        self.world = world = World(**options)
        self.here, self.there = world.slice(1, 2, "a"), world.slice(1, 2, "b")
        x, self.y = world.put(self.here), world.put(self.there)
        world.settle()
        for number in range(40):  # more than may be under way
            (x,), _ = world.call(f"f{number}", self.here, [x])
        self.taking, _ = world.call("taking", self.there, [x, self.y], order=1)
        self.after, _ = world.call("after", self.there, [self.y], order=1)

    def launched(self):
        return self.world.hosts[2].launched


def test_a_call_waits_only_for_those_of_its_own_order():
    late = Late(num_clients=2)
    world = late.world
    slice_ = world.slice(2, 2, "b")
    others, _ = world.call("others", slice_, [world.put(slice_, 2)], client=2, order=1)
    free, _ = world.call("free", late.there, [late.y])
    another, _ = world.call("another", late.there, [late.y], order=2)
    world.settle()

    first = set(late.launched()[:3])
    assert first == {others, free, another}
    assert late.launched()[3:] == [late.taking, late.after]


@pytest.mark.parametrize("is_begun", [False, True])
def test_what_is_cancelled_lets_those_after_it_in_its_order_go(is_begun):
    late = Late()
    world = late.world
    if is_begun:  # all is compiled, and has its memory
        world.rng.random = lambda: 0.0  # deliver what is said before launches end
        while any(world.links.values()):
            world.act()
    world.say(1, CancelCalls(late.taking))
    world.settle()

    assert late.launched() == [late.after]
    assert "was cancelled" in output_errors(world)[late.taking[0]]
    assert not world.core._calls._last
    assert output_errors(world)[late.after[0]] is None


def test_an_island_that_dies_lets_those_go_that_came_after_what_needed_it():
    late = Late()
    world = late.world
    world.lose(0, PeerError("worker 0 was killed"))
    world.settle()

    found = output_errors(world)
    assert found[late.taking[0]] is not None
    assert found[late.after[0]] is None
    assert num_over(world) == 42
