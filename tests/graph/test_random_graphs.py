from __future__ import annotations

from itertools import product

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyml.errors import CycleError, DenseEdgeError
from timelyml.graph import Graph, GraphBuilder, InputSpec, Pipeline
from timelyml.progress import Summary, less_equal

from .graphs import source
from .strategies import builders, graphs

MAX_COORDINATE = 8  # more than any drawn summary adds on its way round


@given(graphs())
def test_a_graph_whose_loops_all_advance_builds(graph):
    assert graph.reachability().stuck_cycle() is None
    assert len(graph.channels) == sum(spec.num_inputs for spec in graph.operators)


@given(graphs())
def test_channels_take_times_from_scope_to_scope(graph):
    for channel in graph.channels:
        source_spec = graph.operators[channel.source.operator]
        target_spec = graph.operators[channel.target.operator]
        time = (5,) * (source_spec.depth + 1) if source_spec.depth else 5
        moved = channel.summary.results_in(time)
        depth = len(moved) - 1 if isinstance(moved, tuple) else 0
        assert depth == target_spec.depth
        assert channel.keeps_time == (channel.summary == Summary.identity(depth)) or (
            depth != source_spec.depth
        )
        if channel.keeps_time:
            assert moved == time


@given(graphs())
def test_resolving_leaves_a_graph_as_it_is_but_for_shards(graph):
    resolved = graph.resolve(7)
    assert all(spec.num_shards is not None for spec in resolved.operators)
    assert resolved.channels == graph.channels
    assert resolved.resolve(5) == resolved
    assert graph.first_difference(graph.describe()) is None


def has_cycle_that_stays(graph: Graph) -> bool:
    """Whether some cycle, gone round once, can lead to the time it began at or before.

    By brute force: every simple cycle of ports, with every choice of summaries, from
    many times. A cycle may reset an inner coordinate, if it advances an outer one.
    """
    ports = nx.MultiDiGraph()
    for channel in graph.channels:
        start = graph.location_of_output(*channel.source)
        end = graph.location_of_input(*channel.target)
        ports.add_edge(start, end, summary=channel.summary)
    for spec in graph.operators:
        for i, row in enumerate(spec.summaries):
            for o, summaries in enumerate(row):
                start = graph.location_of_input(spec.index, i)
                end = graph.location_of_output(spec.index, o)
                for summary in summaries:
                    ports.add_edge(start, end, summary=summary)
    return any(
        stays(walk, depth_at(graph, cycle[0]))
        for cycle in nx.simple_cycles(nx.DiGraph(ports))
        for walk in walks_around(ports, cycle, depth_at(graph, cycle[0]))
    )


def walks_around(ports: nx.MultiDiGraph, cycle: list[int], depth: int) -> list[Summary]:
    walks = [Summary.identity(depth)]
    for start, end in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        steps = [edge["summary"] for edge in ports.get_edge_data(start, end).values()]
        walks = [walk.followed_by(step) for walk in walks for step in steps]
    return walks


def stays(walk: Summary, depth: int) -> bool:
    times = product(range(MAX_COORDINATE + 1), repeat=depth + 1)
    return any(
        less_equal(walk.results_in(time), time)
        for time in (each if depth else each[0] for each in times)
    )


def depth_at(graph: Graph, location: int) -> int:
    return graph.operators[graph.port_of(location).operator].depth


@given(builders(st.integers(0, 1)))
def test_a_graph_is_refused_exactly_if_a_cycle_stays(builder):
    draft = builder.draft()
    if not has_cycle_that_stays(draft):
        assert builder.build().num_locations == draft.num_locations
        return
    with pytest.raises(CycleError, match="does not advance time") as caught:
        builder.build()
    path = caught.value.path
    edges = {
        (
            draft.operators[channel.source.operator].name,
            draft.operators[channel.target.operator].name,
        )
        for channel in draft.channels
    }
    assert path[0] == path[-1]
    assert {(path[i], path[i + 1]) for i in range(len(path) - 1)} <= edges


@st.composite
def dense_graphs(draw) -> GraphBuilder:
    """An acyclic graph with random promises and random dense edges."""
    builder = GraphBuilder("dense", 2)
    streams = [source(builder, "lines", regular=draw(st.booleans()))]
    for _ in range(draw(st.integers(1, 6))):
        chosen = draw(st.lists(st.sampled_from(streams), min_size=1, max_size=2))
        streams += builder.add_operator(
            None,
            "op",
            inputs=[InputSpec(s, Pipeline(dense=draw(st.booleans()))) for s in chosen],
            regular=draw(st.booleans()),
        )
    return builder


def regular_by_definition(graph: Graph, index: int) -> bool:
    spec = graph.operators[index]
    if spec.is_source:
        return spec.regular
    return spec.regular and any(
        channel.pact.dense and regular_by_definition(graph, channel.source.operator)
        for port in range(spec.num_inputs)
        for channel in graph.channels_into(index, port)
    )


@given(dense_graphs())
def test_dense_edges_are_legal_exactly_after_regular_operators(builder):
    draft = builder.draft()
    regular = [regular_by_definition(draft, spec.index) for spec in draft.operators]
    illegal = [
        channel
        for channel in draft.channels
        if channel.pact.dense and not regular[channel.source.operator]
    ]
    if illegal:
        with pytest.raises(DenseEdgeError, match="cannot be dense") as caught:
            builder.build()
        first = illegal[0]
        assert caught.value.producer == draft.operators[first.source.operator].name
        assert caught.value.consumer == draft.operators[first.target.operator].name
    else:
        assert [spec.regular for spec in builder.build().operators] == regular
