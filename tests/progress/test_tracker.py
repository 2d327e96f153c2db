from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timelyml.progress import ReachabilityGraph, Summary, Timestamp, Tracker, minimum

from .oracles import before, frontiers, graphs, nested_loops, net, times, within_bound

Stamps = Counter[tuple[int, Timestamp]]


@st.composite
def batches(
    draw: st.DrawFn, graph: ReachabilityGraph, largest: int = 2
) -> list[list[tuple[int, Timestamp, int]]]:
    """Changes of random sign: counts go negative, and come back."""
    place = st.integers(0, graph.num_locations - 1)
    change = place.flatmap(
        lambda location: st.tuples(
            st.just(location),
            times(graph.depths[location], largest),
            st.integers(-2, 2),
        )
    )
    return draw(st.lists(st.lists(change, max_size=6), max_size=6))


def check_frontiers(tracker: Tracker, stamps: Stamps) -> None:
    expected = frontiers(tracker.graph, stamps)
    for location, elements in enumerate(expected):
        view = tracker.frontier(location)
        assert within_bound(view.elements) == elements
        assert bool(view) == bool(elements)


def check_propagation(
    tracker: Tracker, batch: list[tuple[int, Timestamp, int]], stamps: Stamps
) -> None:
    """Apply one batch; the frontiers and the reported changes are as defined."""
    tracker.update_many(batch)
    locations = range(tracker.graph.num_locations)
    old = [set(tracker.frontier(location).elements) for location in locations]
    changes = tracker.propagate()
    for location, time, delta in batch:
        stamps[location, time] += delta
    check_frontiers(tracker, stamps)
    assert len({(location, time) for location, time, _ in changes}) == len(changes)
    for location in locations:
        new = set(tracker.frontier(location).elements)
        moved = net((time, d) for place, time, d in changes if place == location)
        assert moved == dict.fromkeys(new - old[location], 1) | dict.fromkeys(
            old[location] - new, -1
        )
    live = {stamp: count for stamp, count in stamps.items() if count}
    assert {(place, time): n for place, time, n in tracker.pointstamps()} == live
    assert tracker.is_empty() == (not live)


@settings(max_examples=150)
@given(st.data())
def test_frontiers_are_their_definition_on_any_graph(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    tracker = Tracker(graph)
    stamps: Stamps = Counter()
    for batch in data.draw(batches(graph)):
        check_propagation(tracker, batch, stamps)


@settings(max_examples=60)
@given(st.data())
def test_frontiers_are_their_definition_on_nested_loops(data: st.DataObject) -> None:
    graph = nested_loops()
    tracker = Tracker(graph)
    stamps: Stamps = Counter()
    for batch in data.draw(batches(graph)):
        check_propagation(tracker, batch, stamps)


@settings(max_examples=60)
@given(st.data())
def test_frontiers_are_their_definition_on_chains_of_ints(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6))
    places = st.integers(0, size - 1)
    pairs = data.draw(st.lists(st.tuples(places, places), max_size=8))
    by = st.integers(0, 1)
    edges = [
        (min(pair), max(pair), Summary.advance(0, by=data.draw(by)))
        for pair in pairs
        if pair[0] != pair[1]
    ]
    graph = ReachabilityGraph([0] * size, edges)
    tracker = Tracker(graph)
    stamps: Stamps = Counter()
    for batch in data.draw(batches(graph, largest=6)):
        check_propagation(tracker, batch, stamps)


@settings(max_examples=80)
@given(st.data())
def test_blockers_are_the_pointstamps_that_could_result_in_a_time(
    data: st.DataObject,
) -> None:
    graph = data.draw(graphs())
    tracker = Tracker(graph)
    stamps: Stamps = Counter()
    for batch in data.draw(batches(graph)):
        tracker.update_many(batch)
        for location, time, delta in batch:
            stamps[location, time] += delta
    tracker.propagate()
    location = data.draw(st.integers(0, graph.num_locations - 1))
    time = data.draw(times(graph.depths[location], 2))
    expected = set()
    for stamp, count in stamps.items():
        alone: Stamps = Counter({stamp: count})
        if any(before(least, time) for least in frontiers(graph, alone)[location]):
            expected.add((*stamp, count))
    assert set(tracker.blockers(location, time)) == expected
    assert tracker.has_passed(location, time) == (not expected)


@settings(max_examples=120)
@given(st.data())
def test_a_pointstamp_that_is_not_global_moves_no_frontier_when_it_goes(
    data: st.DataObject,
) -> None:
    graph = data.draw(graphs())
    tracker = Tracker(graph)
    stamps: Stamps = Counter()
    for batch in data.draw(batches(graph)):
        check_propagation(tracker, batch, stamps)
    live = [stamp for stamp, count in stamps.items() if count > 0]
    if not live:
        return
    stamp = data.draw(st.sampled_from(sorted(live, key=repr)))
    moves = frontiers(graph, stamps) != frontiers(graph, stamps - Counter({stamp: 99}))
    assert tracker.is_global(*stamp) or not moves


@settings(max_examples=80)
@given(st.data())
def test_the_earliest_pointstamp_is_always_global(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    tracker = Tracker(graph)
    stamps: Stamps = Counter()
    for batch in data.draw(batches(graph)):
        check_propagation(tracker, batch, stamps)
    live = [stamp for stamp, count in stamps.items() if count > 0]
    if live:
        assert tracker.is_global(*min(live, key=lambda stamp: graph.sort_key(*stamp)))


def one_loop() -> ReachabilityGraph:
    """0 source, 1 and 2 loop body (input, output), 3 exit."""
    return ReachabilityGraph(
        [0, 1, 1, 0],
        [
            (0, 1, Summary.enter(0)),
            (1, 2, Summary.identity(1)),
            (2, 1, Summary.advance(1)),
            (2, 3, Summary.leave(1)),
        ],
    )


def test_a_capability_in_a_loop_holds_the_exit_until_it_goes() -> None:
    tracker = Tracker(one_loop(), [(0, 0, 1)])
    tracker.update_many([(0, 0, -1), (2, (0, 5), 1)])
    tracker.propagate()
    assert tracker.frontier(1).elements == ((0, 6),)
    assert tracker.frontier(3).elements == (0,)
    assert tracker.has_passed(1, (0, 5))
    assert not tracker.has_passed(1, (0, 6))
    assert tracker.blockers(3, 0) == [(2, (0, 5), 1)]
    tracker.update(2, (0, 5), -1)
    tracker.propagate()
    assert all(not tracker.frontier(location) for location in range(4))
    assert tracker.is_empty()


def test_nothing_moves_before_propagate() -> None:
    tracker = Tracker(one_loop(), [(0, 0, 1)])
    view = tracker.frontier(3)
    tracker.update(0, 0, -1)
    assert view
    assert tracker.propagate()
    assert not view
    assert tracker.propagate() == []


def test_changes_that_cancel_within_a_propagation_are_not_reported() -> None:
    tracker = Tracker(one_loop(), [(0, 0, 1)])
    tracker.update_many([(0, 0, 1), (1, (0, 0), 1), (0, 0, -1)])
    assert tracker.propagate() == []
    tracker.update_many([(0, 0, -1), (0, 0, 1)])
    assert tracker.propagate() == []


def test_a_consumption_may_overtake_the_production_of_the_same_record() -> None:
    tracker = Tracker(one_loop(), [(0, 0, 1)])
    tracker.update(1, (0, 0), -1)
    assert tracker.propagate() == []
    assert not tracker.is_empty()
    tracker.update_many([(1, (0, 0), 1), (0, 0, -1)])
    tracker.propagate()
    assert tracker.is_empty()
    assert not tracker.frontier(3)


@pytest.mark.parametrize("count", [1, 3])
def test_initial_pointstamps_hold_every_frontier(count: int) -> None:
    graph = nested_loops()
    initial = [
        (place, minimum(depth), count) for place, depth in enumerate(graph.depths)
    ]
    tracker = Tracker(graph, initial)
    for location, depth in enumerate(graph.depths):
        assert tracker.frontier(location).elements == (minimum(depth),)
    for location, depth in enumerate(graph.depths):
        tracker.update(location, minimum(depth), -count)
    tracker.propagate()
    assert tracker.is_empty()


def test_what_overflows_blocks_nobody() -> None:
    last = 2**63 - 1
    graph = ReachabilityGraph([0, 0], [(0, 1, Summary.advance(0))])
    tracker = Tracker(graph, [(0, last, 1)])
    assert not tracker.frontier(1)
    assert tracker.frontier(0).elements == (last,)
