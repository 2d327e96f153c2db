"""Breadth-first search and PageRank, against networkx."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.graph_algorithms.__main__ import random_graph
from examples.graph_algorithms.breadth_first import breadth_first
from examples.graph_algorithms.page_rank import page_rank
from timelyml import Dataflow


def as_columns(edges):
    pairs = np.asarray(edges, np.int64).reshape(-1, 2)
    return {"source": pairs[:, 0], "target": pairs[:, 1]}


def as_networkx(graph, num_vertices):
    found = nx.MultiDiGraph()
    found.add_nodes_from(range(num_vertices))
    found.add_edges_from(zip(*(c.tolist() for c in graph.values()), strict=True))
    return found


def in_epochs(columns_by_epoch):
    """Each shard has every n-th row of each epoch."""

    def source(shard, num_shards):
        for columns in columns_by_epoch:
            yield {name: c[shard::num_shards] for name, c in columns.items()}

    return source


def values_by_time(result, key, value):
    found = {}
    for time, payload in result.batches("out"):
        rows = zip(payload[key].tolist(), payload[value].tolist(), strict=True)
        mine = found.setdefault(time, {})
        for vertex, of_vertex in rows:
            assert vertex not in mine
            mine[vertex] = of_vertex
    return found


def search(place, graphs, roots, *, num_shards=None):
    flow = Dataflow(num_shards=num_shards)
    edges = flow.source(in_epochs(graphs))
    starts = flow.source(in_epochs([{"vertex": np.asarray(r)} for r in roots]))
    breadth_first(edges, starts).collect()
    run = place.start(flow)
    found = values_by_time(run.result(), "vertex", "distance")
    return found, run


def distances(graph, num_vertices, roots):
    """The shortest of the distances from each root, by networkx."""
    found = {}
    for root in roots:
        lengths = nx.single_source_shortest_path_length(
            as_networkx(graph, num_vertices), root
        )
        for vertex, length in lengths.items():
            found[vertex] = min(found.get(vertex, length), length)
    return found


@pytest.mark.parametrize("num_shards", [None, 5])
def test_search_finds_the_shortest_distances(cluster, num_shards):
    graphs = [random_graph(300, 700, seed) for seed in range(3)]
    roots = [[0], [7, 200], [299]]

    found, _ = search(cluster, graphs, roots, num_shards=num_shards)

    assert found == {
        epoch: distances(graph, 300, of_epoch)
        for epoch, (graph, of_epoch) in enumerate(zip(graphs, roots, strict=True))
    }


def test_a_long_path_is_walked_to_its_end(cluster):
    path = as_columns([(n, n + 1) for n in range(200)])

    found, run = search(cluster, [path], [[0]], num_shards=3)

    assert found == {0: {n: n for n in range(201)}}
    assert run.metrics()["operators"]["visit"]["state_entries"] == 0


def rank(place, graphs, num_vertices, *, num_shards=None):
    flow = Dataflow(num_shards=num_shards)
    page_rank(flow.source(in_epochs(graphs)), num_vertices, 1e-10).collect()
    run = place.start(flow)
    found = values_by_time(run.result(), "vertex", "rank")
    for name in ("sweep", "judge"):
        assert run.metrics()["operators"][name]["state_entries"] == 0, name
    return found


@pytest.mark.parametrize("num_shards", [None, 5])
def test_ranks_are_those_of_networkx(cluster, num_shards):
    graphs = [random_graph(200, 500, seed) for seed in range(2)]

    found = rank(cluster, graphs, 200, num_shards=num_shards)

    for epoch, graph in enumerate(graphs):
        expected = nx.pagerank(as_networkx(graph, 200), tol=1e-12, max_iter=500)
        assert found[epoch].keys() == expected.keys()
        for vertex, value in expected.items():
            # Both stop when a step moves the ranks by about 1e-10.
            assert found[epoch][vertex] == pytest.approx(value, abs=1e-9)


def test_vertices_without_edges_and_shards_without_vertices(cluster):
    graph = as_columns([(0, 1)])

    found = rank(cluster, [graph], 3, num_shards=7)

    expected = nx.pagerank(as_networkx(graph, 3), tol=1e-12)
    assert found[0] == pytest.approx(expected, abs=1e-9)


def test_ranks_do_not_depend_on_timing(cluster):
    graph = random_graph(100, 400, 5)

    first = rank(cluster, [graph], 100, num_shards=4)

    assert rank(cluster, [graph], 100, num_shards=4) == first  # to the last bit


@settings(max_examples=25, deadline=None)
@given(
    edges=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30),
    roots=st.sets(st.integers(0, 9), min_size=1, max_size=3),
    num_shards=st.integers(1, 4),
)
def test_any_small_graph_is_searched(edges, roots, num_shards):
    graph = as_columns(edges)
    flow = Dataflow(num_shards=num_shards)
    starts = flow.source(in_epochs([{"vertex": np.array(sorted(roots))}]))
    breadth_first(flow.source(in_epochs([graph])), starts).collect()

    found = values_by_time(flow.run(), "vertex", "distance")
    assert found == {0: distances(graph, 10, roots)}
