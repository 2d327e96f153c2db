"""Definitions by brute force, and strategies, for the tests of progress."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from timelyml.progress import ReachabilityGraph, Summary, Timestamp

# Coordinates that the closure below follows. Pointstamps start at 0..2, edges add
# at most 1, graphs have at most 6 locations: what matters stays well below.
BOUND = 9


def coordinates(time: Timestamp) -> tuple[int, ...]:
    return (time,) if isinstance(time, int) else time


def before(a: Timestamp, b: Timestamp) -> bool:
    """The partial order by its definition."""
    pairs = zip(coordinates(a), coordinates(b), strict=True)
    return all(x <= y for x, y in pairs)


def minimal(times: Iterable[Timestamp]) -> set[Timestamp]:
    distinct = set(times)
    return {
        time
        for time in distinct
        if not any(other != time and before(other, time) for other in distinct)
    }


def minimal_of_counts(counts: Counter[Timestamp]) -> set[Timestamp]:
    return minimal(time for time, count in counts.items() if count > 0)


def net(changes: Iterable[tuple[Timestamp, int]]) -> dict[Timestamp, int]:
    total: Counter[Timestamp] = Counter()
    for time, delta in changes:
        total[time] += delta
    return {time: count for time, count in total.items() if count}


def reachable(
    graph: ReachabilityGraph, starts: Iterable[tuple[int, Timestamp]]
) -> list[set[Timestamp]]:
    """Every time, up to BOUND, that could occur at each location, edge by edge."""
    found: list[set[Timestamp]] = [set() for _ in graph.depths]
    todo = list(starts)
    while todo:
        location, time = todo.pop()
        if time in found[location] or max(coordinates(time)) > BOUND:
            continue
        found[location].add(time)
        for source, target, summary in graph.edges:
            if source == location:
                result = summary.results_in(time)
                if result is not None:
                    todo.append((target, result))
    return found


def frontiers(
    graph: ReachabilityGraph, stamps: Counter[tuple[int, Timestamp]]
) -> list[set[Timestamp]]:
    """The frontier of each location by its definition."""
    live = [stamp for stamp, count in stamps.items() if count > 0]
    return [minimal(times) for times in reachable(graph, live)]


def within_bound(times: Iterable[Timestamp]) -> set[Timestamp]:
    return {time for time in times if max(coordinates(time)) <= BOUND}


def stuck_cycles(
    num_locations: int, edges: Sequence[tuple[int, int, Summary]]
) -> list[list[int]]:
    """Simple cycles whose composed summary, begun anywhere, has a fixed point."""
    found = []

    def extend(path: list[int], indices: list[int]) -> None:
        for index, (source, target, _) in enumerate(edges):
            if source != path[-1] or target < path[0]:
                continue
            if target == path[0]:
                if any_turn_repeats([edges[i][2] for i in [*indices, index]]):
                    found.append(list(path))
            elif target not in path:
                extend([*path, target], [*indices, index])

    for start in range(num_locations):
        extend([start], [])
    return found


def any_turn_repeats(cycle: list[Summary]) -> bool:
    """Whether a walk around the cycle can come back to the pointstamp it left."""
    for turn in range(len(cycle)):
        turned = cycle[turn:] + cycle[:turn]
        depth = turned[-1].target_depth
        for coords in itertools.product(range(3), repeat=depth + 1):
            time: Timestamp | None = coords if depth else coords[0]
            start = time
            for summary in turned:
                assert time is not None
                time = summary.results_in(time)
            if time == start:
                return True
    return False


def times(depth: int, largest: int = 5) -> st.SearchStrategy[Timestamp]:
    number = st.integers(0, largest)
    return st.tuples(*[number] * (depth + 1)) if depth else number


depths = st.integers(0, 2)


@st.composite
def summaries(draw: st.DrawFn, source: int, target: int, largest: int = 2) -> Summary:
    number = st.integers(0, largest)
    keep = draw(st.integers(1, min(source, target) + 1))
    add = tuple(draw(number) for _ in range(keep))
    append = tuple(draw(number) for _ in range(target + 1 - keep))
    return Summary(keep, add, append)


@st.composite
def any_edges(
    draw: st.DrawFn, max_locations: int = 6
) -> tuple[list[int], list[tuple[int, int, Summary]]]:
    """Depths and arbitrary edges; cycles may be stuck."""
    sizes = draw(st.lists(depths, min_size=1, max_size=max_locations))
    end = st.integers(0, len(sizes) - 1)
    edges = []
    for source, target in draw(st.lists(st.tuples(end, end), max_size=9)):
        shape = summaries(sizes[source], sizes[target], largest=1)
        edges.append((source, target, draw(shape)))
    return sizes, edges


@st.composite
def graphs(draw: st.DrawFn) -> ReachabilityGraph:
    """Graphs in which every cycle advances; the edges that break that are left out."""
    sizes, edges = draw(any_edges())
    kept: list[tuple[int, int, Summary]] = []
    for edge in edges:
        if not stuck_cycles(len(sizes), [*kept, edge]):
            kept.append(edge)
    return ReachabilityGraph(sizes, kept)


def nested_loops() -> ReachabilityGraph:
    """An outer loop around an inner one, with entry and exit, port by port.

    0 input of the flow; 1, 2 outer head; 3, 4 inner body; 5, 6 outer tail; 7 exit.
    """
    identity, advance = Summary.identity, Summary.advance
    return ReachabilityGraph(
        [0, 1, 1, 2, 2, 1, 1, 0],
        [
            (0, 1, Summary.enter(0)),
            (1, 2, identity(1)),
            (2, 3, Summary.enter(1)),
            (3, 4, identity(2)),
            (4, 3, advance(2)),
            (4, 5, Summary.leave(2)),
            (5, 6, identity(1)),
            (6, 1, advance(1)),
            (6, 7, Summary.leave(1)),
        ],
    )
