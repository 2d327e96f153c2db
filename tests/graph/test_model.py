from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import cloudpickle
import networkx as nx
import pytest
from hypothesis import given

from timelyml.errors import GraphError
from timelyml.graph import Graph, GraphBuilder, InputSpec, PortRef
from timelyml.progress import Summary

from .graphs import binary, loop_graph, sink, source, unary, word_count
from .strategies import graphs


def test_locations_number_inputs_then_outputs_of_each_operator():
    builder = GraphBuilder("flow")
    left, right = builder.add_operator("two", "source", is_source=True, num_outputs=2)
    sink(binary(left, right, "merge"))
    graph = builder.build()
    assert graph.num_locations == 7
    assert [graph.location_of_output(0, port) for port in (0, 1)] == [0, 1]
    assert [graph.location_of_input(1, port) for port in (0, 1)] == [2, 3]
    assert graph.location_of_output(1) == 4
    assert graph.location_of_input(2) == 5
    assert graph.location_of_output(2) == 6  # a sink holds times open there


@given(graphs())
def test_a_location_names_its_port(graph):
    seen = []
    for spec in graph.operators:
        for port in range(spec.num_inputs):
            location = graph.location_of_input(spec.index, port)
            assert graph.is_input(location)
            assert graph.port_of(location) == PortRef(spec.index, port)
            assert graph.describe_location(location) == f"input {port} of {spec.name!r}"
            seen.append(location)
        for port in range(spec.num_outputs):
            location = graph.location_of_output(spec.index, port)
            assert not graph.is_input(location)
            assert graph.port_of(location) == PortRef(spec.index, port)
            assert (
                graph.describe_location(location) == f"output {port} of {spec.name!r}"
            )
            seen.append(location)
    assert seen == list(range(graph.num_locations))


def test_a_port_or_location_that_does_not_exist_is_refused():
    graph = word_count()
    with pytest.raises(GraphError, match="'lines' has no such input; got 0"):
        graph.location_of_input(0)
    with pytest.raises(GraphError, match="'out' has no such output; got 1"):
        graph.location_of_output(3, 1)
    with pytest.raises(GraphError, match="'split' has no such output; got -1"):
        graph.location_of_output(1, -1)
    with pytest.raises(GraphError, match="no such location; got 7"):
        graph.port_of(7)


def test_an_operator_is_found_by_name():
    graph = word_count()
    assert graph.operator_named("count").index == 2
    with pytest.raises(
        GraphError, match=r"got 'cuont'; expected one of 'lines', 'split'"
    ):
        graph.operator_named("cuont")


@given(graphs())
def test_channels_are_found_from_both_ends(graph):
    for channel in graph.channels:
        assert graph.channels_into(*channel.target) == (channel,)
        assert channel in graph.channels_from(*channel.source)
    outgoing = [
        channel
        for spec in graph.operators
        for port in range(spec.num_outputs)
        for channel in graph.channels_from(spec.index, port)
    ]
    assert sorted(outgoing, key=lambda c: c.index) == list(graph.channels)


def ends(graph: Graph) -> list[str]:
    return [graph.describe_location(location) for location in graph.terminal_inputs()]


def test_the_ends_are_the_inputs_that_lead_nowhere():
    assert ends(word_count()) == ["input 0 of 'out'"]
    assert ends(loop_graph()) == ["input 0 of 'out'"]


def test_an_output_without_consumers_ends_at_the_inputs_that_cause_it():
    builder = GraphBuilder("flow")
    unary(source(builder), "last")
    assert ends(builder.build()) == ["input 0 of 'last'"]


def test_an_input_that_causes_no_output_is_an_end():
    builder = GraphBuilder("flow")
    lines = source(builder)
    here = Summary.identity(0)
    (joined,) = builder.add_operator(
        "join",
        "join",
        inputs=[InputSpec(lines), InputSpec(lines)],
        summaries=[[[here]], [[]]],
    )
    sink(joined)
    assert ends(builder.build()) == ["input 1 of 'join'", "input 0 of 'out'"]


def test_a_cycle_without_a_way_out_is_an_end():
    builder = GraphBuilder("flow")
    loop = builder.feedback()
    merged = binary(source(builder), loop.stream, "merge")
    loop.connect(unary(merged, "step"))
    # The first input of merge leads into the cycle and is not on it.
    assert ends(builder.build()) == ["input 1 of 'merge'", "input 0 of 'step'"]


def test_a_source_alone_has_no_ends():
    builder = GraphBuilder("flow")
    source(builder)
    assert builder.build().terminal_inputs() == ()


def port_graph(graph: Graph) -> nx.DiGraph:
    """The ports and what leads from one to the next, without the tracker's help."""
    ports = nx.DiGraph()
    ports.add_nodes_from(range(graph.num_locations))
    for channel in graph.channels:
        ports.add_edge(
            graph.location_of_output(*channel.source),
            graph.location_of_input(*channel.target),
        )
    for spec in graph.operators:
        for i, row in enumerate(spec.summaries):
            for o, summaries in enumerate(row):
                if summaries:
                    ports.add_edge(
                        graph.location_of_input(spec.index, i),
                        graph.location_of_output(spec.index, o),
                    )
    return ports


@given(graphs())
def test_from_an_end_no_input_is_reached_but_those_that_lead_back(graph):
    ports = port_graph(graph)
    reached = {
        location: {n for n in nx.descendants(ports, location) if graph.is_input(n)}
        for location in ports
        if graph.is_input(location)
    }
    expected = [
        location
        for location in sorted(reached)
        if all(location in reached[other] for other in reached[location] - {location})
    ]
    assert list(graph.terminal_inputs()) == expected


@given(graphs())
def test_cyclic_channels_are_those_on_a_cycle(graph):
    ports = port_graph(graph)
    for channel in graph.channels:
        source = graph.location_of_output(*channel.source)
        target = graph.location_of_input(*channel.target)
        assert channel.is_cyclic == nx.has_path(ports, target, source)


@pytest.mark.parametrize("build", [word_count, loop_graph])
def test_the_size_of_a_graph_does_not_depend_on_shards(build):
    graphs = [build(num_shards) for num_shards in (1000, 4096)]
    assert len({len(graph.describe()) for graph in graphs}) == 1
    assert len({len(graph.to_mermaid()) for graph in graphs}) == 1
    assert len({len(cloudpickle.dumps(graph)) for graph in graphs}) == 1
    assert len({graph.num_locations for graph in graphs}) == 1
    assert len({len(graph.channels) for graph in [*graphs, build(1)]}) == 1


def count_steps(call) -> int:
    steps = 0

    def trace(frame, event, arg):
        nonlocal steps
        if "timelyml" not in frame.f_code.co_filename:
            return None  # the collector's callbacks come when they like
        steps += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return steps


@pytest.mark.parametrize("build", [word_count, loop_graph])
def test_building_a_graph_takes_the_same_steps_whatever_the_shards(build):
    def everything(num_shards):
        graph = build(num_shards).resolve(8)
        graph.describe()
        graph.to_mermaid()
        graph.terminal_inputs()

    everything(4)  # whatever is done only once
    steps = {count_steps(lambda n=n: everything(n)) for n in (1, 4, 4096)}
    assert len(steps) == 1


class Logic:
    """Some logic; its functions do not count."""

    def __init__(self, factor: int) -> None:
        self.scale = lambda value: value * factor


def graph_with_logic(factor: int) -> Graph:
    builder = GraphBuilder("flow", 2)
    unary(source(builder), "scale", logic=Logic(factor))
    return builder.build()


def test_a_graph_survives_pickling_with_its_logic():
    graph = graph_with_logic(3)
    copy = pickle.loads(cloudpickle.dumps(graph))
    assert copy.describe() == graph.describe()
    assert copy.channels_into(1) == graph.channels_into(1)
    assert copy.location_of_output(1) == 2
    assert copy.operators[1].logic.scale(2) == 6


def test_the_fingerprint_is_that_of_the_structure():
    assert graph_with_logic(3).fingerprint() == graph_with_logic(4).fingerprint()
    assert word_count(4).fingerprint() != word_count(5).fingerprint()
    assert word_count(None).resolve(4).fingerprint() == word_count(4).fingerprint()


def test_the_fingerprint_is_the_same_in_every_process():
    tests = Path(__file__).parent.parent
    code = (
        "from graph.graphs import loop_graph, word_count;"
        "print(loop_graph().fingerprint(), word_count().fingerprint())"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(tests)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    here = f"{loop_graph().fingerprint()} {word_count().fingerprint()}\n"
    assert printed == [here, here]


def test_the_first_difference_names_the_line():
    mine, theirs = word_count(4), word_count(5)
    assert mine.first_difference(mine.describe()) is None
    difference = mine.first_difference(theirs.describe())
    assert difference is not None
    assert difference.startswith("line 2: '0 lines: source; 4 shards")
    assert difference.endswith("there")
    assert "5 shards" in difference


def test_a_missing_operator_is_the_first_difference():
    graph = word_count()
    *shorter, last = graph.describe().splitlines()
    assert graph.first_difference("\n".join(shorter)) == (
        f"line 5: {last!r} here, nothing there"
    )
