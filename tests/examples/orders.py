"""Runs a graph on simulated links, in the order of arrival that a seed decides."""

from __future__ import annotations

from timelyml import Result
from timelyml.graph import Graph
from timelyml.testing import FlowTester


def run_in_order(graph: Graph, seed: int, *, num_workers: int = 2, **config) -> Result:
    """Run the very worker and controller that processes run, one step at a time."""
    with FlowTester(num_workers, seed=seed) as tester:
        return tester.run(graph, **config)
