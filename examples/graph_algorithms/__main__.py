"""Searches and ranks a random graph, over worker processes.

Run it with `python -m examples.graph_algorithms`; `--help` lists the options.
"""

from __future__ import annotations

import time
from typing import Annotated

import numpy as np
import typer

from examples.graph_algorithms.adjacency import Columns
from examples.graph_algorithms.breadth_first import breadth_first
from examples.graph_algorithms.page_rank import page_rank
from timelyml import Cluster, Dataflow


def random_graph(num_vertices: int, num_edges: int, seed: int) -> Columns:
    """Return the edges of a graph whose vertices are the more popular the lower."""
    rng = np.random.default_rng(seed)
    source = rng.integers(0, num_vertices, num_edges)
    target = (rng.random(num_edges) ** 3 * num_vertices).astype(np.int64)
    return {"source": source, "target": target}


def main(
    *,
    vertices: Annotated[int, typer.Option(min=1, help="vertices")] = 20_000,
    edges: Annotated[int, typer.Option(min=0, help="edges")] = 100_000,
    workers: Annotated[int, typer.Option(min=1, help="worker processes")] = 2,
    seed: Annotated[int, typer.Option(help="of the graph")] = 0,
) -> None:
    """Print how far the vertices are from vertex 0, and which rank highest."""
    graph = random_graph(vertices, edges, seed)
    flow = Dataflow("graph")
    stream = flow.source(graph, name="edges")
    roots = flow.source({"vertex": np.zeros(1, np.int64)}, name="roots")
    breadth_first(stream, roots).collect("distances")
    page_rank(stream, vertices).collect("ranks")
    with Cluster(workers) as cluster:
        began = time.perf_counter()
        result = flow.run(cluster=cluster)
        took = time.perf_counter() - began

    blocks = [payload for _, payload in result.batches("distances")]
    distances = np.concatenate([block["distance"] for block in blocks])
    for distance, number in enumerate(np.bincount(distances)):
        print(f"{number:8} vertices at distance {distance}")
    blocks = [payload for _, payload in result.batches("ranks")]
    ranks = np.concatenate([block["rank"] for block in blocks])
    vertex = np.concatenate([block["vertex"] for block in blocks])
    for index in np.argsort(-ranks)[:5]:
        print(f"vertex {vertex[index]:6} has rank {ranks[index]:.6f}")
    print(f"{workers} workers took {took:.2f} s")


if __name__ == "__main__":
    typer.run(main)
