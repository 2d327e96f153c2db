from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timelyml.errors import GraphError
from timelyml.progress import ReachabilityGraph, Summary, Timestamp, Tracker, minimum
from timelyml.progress.components import shortest_path, strong_components

from .oracles import (
    any_edges,
    any_turn_repeats,
    graphs,
    minimal,
    nested_loops,
    reachable,
    stuck_cycles,
    times,
    within_bound,
)

Edges = list[tuple[int, int, Summary]]


@settings(max_examples=300)
@given(any_edges(max_locations=5))
def test_a_stuck_cycle_is_found_exactly_where_one_exists(
    sample: tuple[list[int], Edges],
) -> None:
    sizes, edges = sample
    graph = ReachabilityGraph(sizes, edges)
    cycle = graph.stuck_cycle()
    assert (cycle is None) == (not stuck_cycles(len(sizes), edges))
    if cycle is not None:
        turns = zip(cycle, cycle[1:] + cycle[:1], strict=True)
        choices = [
            [summary for a, b, summary in edges if (a, b) == turn] for turn in turns
        ]
        assert any(any_turn_repeats(list(path)) for path in itertools.product(*choices))
        with pytest.raises(GraphError, match="does not advance; got locations"):
            Tracker(graph)
        with pytest.raises(GraphError, match="does not advance"):
            graph.minimal_summaries(0, 0)


@given(st.data())
def test_every_edge_raises_the_sort_key(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    for source, target, summary in graph.edges:
        time = data.draw(times(graph.depths[source], 3))
        result = summary.results_in(time)
        assert result is not None
        assert graph.sort_key(source, time) < graph.sort_key(target, result)


@given(st.data())
def test_sort_keys_extend_the_partial_order_and_tell_pointstamps_apart(
    data: st.DataObject,
) -> None:
    graph = data.draw(graphs())
    locations = st.integers(0, graph.num_locations - 1)
    stamp = locations.flatmap(
        lambda place: st.tuples(st.just(place), times(graph.depths[place], 2))
    )
    a, b = data.draw(stamp), data.draw(stamp)
    assert (graph.sort_key(*a) == graph.sort_key(*b)) == (a == b)
    if a[0] == b[0] and minimal([a[1], b[1]]) == {a[1]}:
        assert graph.sort_key(*a) <= graph.sort_key(*b)


def paths(edges: Edges, start: int) -> set[int]:
    found: set[int] = set()
    todo = [start]
    while todo:
        location = todo.pop()
        new = {b for a, b, _ in edges if a == location} - found
        found |= new
        todo += new
    return found


@given(any_edges())
def test_cyclic_edges_are_those_whose_end_leads_back_to_their_start(
    sample: tuple[list[int], Edges],
) -> None:
    sizes, edges = sample
    expected = {
        index
        for index, (source, target, _) in enumerate(edges)
        if source == target or source in paths(edges, target)
    }
    assert ReachabilityGraph(sizes, edges).cyclic_edges() == expected


@settings(max_examples=60)
@given(st.data())
def test_minimal_summaries_give_the_earliest_results_of_all_paths(
    data: st.DataObject,
) -> None:
    graph = data.draw(graphs())
    a = data.draw(st.integers(0, graph.num_locations - 1))
    start: Timestamp = data.draw(times(graph.depths[a], 2))
    everything = reachable(graph, [(a, start)])
    for b in range(graph.num_locations):
        antichain = graph.minimal_summaries(a, b)
        results = [summary.results_in(start) for summary in antichain]
        earliest = minimal(time for time in results if time is not None)
        assert within_bound(earliest) == minimal(everything[b])
        for one, other in itertools.permutations(antichain, 2):
            assert not one.less_equal(other)


def test_a_loop_around_a_loop_is_accepted() -> None:
    graph = nested_loops()
    assert graph.stuck_cycle() is None
    assert graph.cyclic_edges() == {1, 2, 3, 4, 5, 6, 7}
    reset = Summary(2, (0, 1), (0,))
    assert set(graph.minimal_summaries(4, 3)) == {Summary.advance(2), reset}
    assert set(graph.minimal_summaries(0, 7)) == {Summary.identity(0)}
    assert not graph.minimal_summaries(7, 0)


def test_the_path_of_a_stuck_cycle_is_named() -> None:
    identity = Summary.identity(0)
    edges = [(0, 1, identity), (1, 2, identity), (2, 3, identity), (3, 1, identity)]
    graph = ReachabilityGraph([0] * 5, edges)
    cycle = graph.stuck_cycle()
    assert cycle is not None
    first = cycle.index(1)
    assert cycle[first:] + cycle[:first] == [1, 2, 3]


def test_leaving_and_entering_again_without_feedback_is_stuck() -> None:
    edges = [
        (0, 1, Summary.advance(1)),  # the inner counter advances, and then is reset
        (1, 2, Summary.leave(1)),
        (2, 0, Summary.enter(0)),
    ]
    cycle = ReachabilityGraph([1, 1, 0], edges).stuck_cycle()
    assert cycle is not None
    assert sorted(cycle) == [0, 1, 2]


@pytest.mark.parametrize(
    "edge",
    [
        (0, 2, Summary.identity(0)),
        (-1, 0, Summary.identity(0)),
        (0, 0, Summary.enter(0)),
        (0, 0, Summary(2, (1, 1))),
        (0, 1, Summary.identity(1)),
    ],
)
def test_an_edge_that_does_not_fit_is_refused(edge: tuple[int, int, Summary]) -> None:
    with pytest.raises(GraphError, match="edge 0 does not fit its ends"):
        ReachabilityGraph([0, 1], [edge])


def test_large_graphs_are_ranked_without_recursion() -> None:
    size = 5_000
    identity = Summary.identity(0)
    edges = [(index, index + 1, identity) for index in range(size - 1)]
    random.Random(1).shuffle(edges)
    graph = ReachabilityGraph([0] * size, edges)
    keys = [graph.sort_key(location, 0) for location in range(size)]
    assert keys == sorted(keys)
    ring = ReachabilityGraph([0] * size, [*edges, (size - 1, 0, Summary.advance(0))])
    assert ring.stuck_cycle() is None
    assert len(ring.cyclic_edges()) == size
    assert minimum(0) == 0


@given(
    st.integers(1, 7).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1))),
        )
    )
)
def test_components_are_the_classes_of_mutual_reachability_upstream_first(
    sample: tuple[int, list[tuple[int, int]]],
) -> None:
    size, pairs = sample
    successors: dict[int, list[int]] = {}
    for source, target in pairs:
        successors.setdefault(source, []).append(target)
    reach = {
        location: {
            end for end in range(size) if shortest_path(location, end, successors)
        }
        for location in range(size)
    }
    components = strong_components(range(size), successors)
    assert sorted(itertools.chain(*components)) == list(range(size))
    for index, component in enumerate(components):
        for location in component:
            mutual = {end for end in reach[location] if location in reach[end]}
            assert mutual == set(component)
            for earlier in itertools.chain(*components[:index]):
                assert earlier not in reach[location]
