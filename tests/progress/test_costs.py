"""Costs counted in steps, not in time: nothing is quadratic in the open times.

A step is a line of the package's code that runs, or a comparison of coordinates.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from timelyml.progress import (
    Change,
    MutableAntichain,
    ProgressLog,
    ReachabilityGraph,
    Summary,
    Timestamp,
    Tracker,
)

FEW, MANY = 100, 800  # eight times as many


class Coordinate(int):
    """An int that counts how often it is compared."""

    num_compared = 0

    def __lt__(self, other: int) -> bool:
        Coordinate.num_compared += 1
        return int.__lt__(self, other)

    def __le__(self, other: int) -> bool:
        Coordinate.num_compared += 1
        return int.__le__(self, other)

    def __gt__(self, other: int) -> bool:
        Coordinate.num_compared += 1
        return int.__gt__(self, other)

    def __ge__(self, other: int) -> bool:
        Coordinate.num_compared += 1
        return int.__ge__(self, other)


def count_steps(work: Callable[[], object]) -> int:
    """Run `work` and count its steps."""
    num_lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal num_lines
        if "timelyml" not in frame.f_code.co_filename:
            return None
        num_lines += event == "line"
        return trace

    Coordinate.num_compared = 0
    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(previous)
    return num_lines + Coordinate.num_compared


def times_of(depth: int, num_times: int, order: str) -> list[Timestamp]:
    """Distinct times: ever later, in a chain or not, or in random order."""
    rng = random.Random(7)
    epochs = list(range(num_times))
    if order == "random":
        rng.shuffle(epochs)
    limit = 1 if order == "chain" else num_times
    inner = [[Coordinate(rng.randrange(limit)) for _ in range(depth)] for _ in epochs]
    pairs = zip(epochs, inner, strict=True)
    return [(Coordinate(e), *rest) if depth else Coordinate(e) for e, rest in pairs]


def steps_per_change(
    step: Callable[[Timestamp, int], object], depth: int, num_open: int, order: str
) -> float:
    """Open many times, then close one and open another in turn, then close all."""
    times = times_of(depth, 2 * num_open, order)

    def work() -> None:
        for opening in times[:num_open]:
            step(opening, 1)
        for closing, opening in zip(times[:num_open], times[num_open:], strict=True):
            step(closing, -1)
            step(opening, 1)
        for closing in times[num_open:]:
            step(closing, -1)

    return count_steps(work) / (4 * num_open)


def on_antichain() -> Callable[[Timestamp, int], object]:
    multiset = MutableAntichain()
    return lambda time, delta: multiset.update(((time, delta),))


def on_tracker(depth: int) -> Callable[[Timestamp, int], object]:
    identity = Summary.identity(depth)
    edges = [(0, 1, identity), (1, 2, identity)]
    if depth:
        edges.append((2, 0, Summary.advance(depth)))
    tracker = Tracker(ReachabilityGraph([depth] * 3, edges))

    def step(time: Timestamp, delta: int) -> None:
        tracker.update(1, time, delta)
        tracker.propagate()

    return step


@pytest.mark.parametrize("order", ["random", "oldest first", "chain"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("place", ["antichain", "tracker"])
def test_the_cost_of_a_change_hardly_grows_with_the_open_times(
    place: str, depth: int, order: str
) -> None:
    few, many = (
        steps_per_change(
            on_antichain() if place == "antichain" else on_tracker(depth),
            depth,
            num_open,
            order,
        )
        for num_open in (FEW, MANY)
    )
    # log2 grows by a factor of 1.5; a cost that is linear in the open times, by 8.
    assert many < 2 * few


@pytest.mark.parametrize("order", ["random", "oldest first"])
@pytest.mark.parametrize("place", ["antichain", "tracker"])
def test_a_change_of_ints_costs_the_same_beside_1_100_and_10_000_open_times(
    place: str, order: str
) -> None:
    num_changes = 300

    def cost(num_open: int) -> int:
        step = on_antichain() if place == "antichain" else on_tracker(0)
        times = times_of(0, num_open + num_changes, order)
        for time in times[:num_open]:
            step(time, 1)

        def work() -> None:
            for closing, opening in zip(times, times[num_open:], strict=False):
                step(closing, -1)
                step(opening, 1)

        return count_steps(work)

    one, some, many = map(cost, (1, 100, 10_000))
    assert max(some, many) < 1.5 * one


def test_the_cost_of_a_deep_product_grows_with_the_width_only() -> None:
    costs = []
    for num_open in (FEW, MANY):
        multiset = MutableAntichain()
        widths: list[int] = []

        def step(
            time: Timestamp,
            delta: int,
            multiset: MutableAntichain = multiset,
            widths: list[int] = widths,
        ) -> None:
            multiset.update(((time, delta),))
            widths.append(len(multiset.elements))

        cost = steps_per_change(step, 2, num_open, "random")
        costs.append(cost / (sum(widths) / len(widths)))
    assert costs[1] < 2 * costs[0]


@pytest.mark.parametrize("depth", [0, 1])
def test_closing_all_times_in_one_update_costs_as_much_as_one_by_one(
    depth: int,
) -> None:
    def cost(num_open: int) -> float:
        multiset = MutableAntichain()
        times = times_of(depth, num_open, "random")
        multiset.update([(time, 1) for time in times])
        closing = [(time, -1) for time in times]
        return count_steps(lambda: multiset.update(closing)) / num_open

    assert cost(MANY) < 2 * cost(FEW)


def test_reopening_an_early_time_over_a_wide_frontier_compares_nothing_twice() -> None:
    """Its elements are displaced and rise again as one group."""

    def cost(width: int) -> float:
        multiset = MutableAntichain()
        multiset.update([((index, width - index), 1) for index in range(width)])
        early = (Coordinate(0), Coordinate(0))

        def work() -> None:
            for _ in range(5):
                multiset.update([(early, 1)])
                multiset.update([(early, -1)])

        return count_steps(work) / width

    assert cost(MANY) < 2 * cost(FEW)


@pytest.mark.parametrize("depth", [0, 1])
def test_testing_a_long_held_buffer_again_costs_as_little_as_a_short_one(
    depth: int,
) -> None:
    graph = ReachabilityGraph([depth] * 2, [(0, 1, Summary.identity(depth))])

    def cost(num_held: int) -> float:
        times = times_of(depth, num_held, "oldest first")
        first: Change = (0, (Coordinate(0), Coordinate(0)) if depth else 0, 1)
        tracker = Tracker(graph, [first])
        log = ProgressLog(0, 0)

        def work() -> None:
            for closed in times[1:]:
                log.record(1, closed, -1)
                assert log.take(tracker) is None

        return count_steps(work) / num_held

    assert cost(MANY) < 2 * cost(FEW)


def test_each_pointstamp_is_settled_once_per_propagation_in_nested_loops() -> None:
    """A cost that doubled with each location would never end here."""

    def cost(size: int) -> int:
        identity, advance = Summary.identity(2), Summary.advance(2)
        edges = [(place, place + 1, identity) for place in range(size - 1)]
        edges += [(place, place + 2, identity) for place in range(size - 2)]
        edges += [(size - 1, 0, advance), (size - 1, 0, Summary(2, (0, 1), (0,)))]
        tracker = Tracker(ReachabilityGraph([2] * size, edges))

        def work() -> None:
            tracker.update(0, (0, 0, 0), 1)
            tracker.propagate()
            tracker.update(0, (0, 0, 0), -1)
            tracker.propagate()

        return count_steps(work)

    assert cost(80) < 3 * cost(40)
