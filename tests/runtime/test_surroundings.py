"""Runs in surroundings that are tight or odd: little credit, a running event loop."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from timelyml import Dataflow
from timelyml.testing import FlowTester

NUM_OPERATORS = 14


@pytest.mark.parametrize("seed", [0, 1])
def test_a_long_chain_gets_on_with_hardly_any_credit(seed):
    flow = Dataflow(num_shards=4)
    stream = flow.source(
        lambda shard, _: (np.arange(12) + 12 * shard for _ in range(2))
    )
    for step in range(NUM_OPERATORS):
        stream = stream.exchange(lambda n, step=step: n + step).map(lambda n: n + 1)
    stream.collect()

    with FlowTester(4, seed=seed) as tester:
        result = tester.run(flow, credit_bytes=60, max_epochs_ahead=1)

    expected = 2 * [n + NUM_OPERATORS for n in range(48)]
    assert sorted(result["out"]) == sorted(expected)


def test_a_cell_of_a_notebook_may_wait_for_a_run(cluster):
    flow = Dataflow()
    flow.source(range(4)).exchange(lambda n: n).map(lambda n: n * n).collect()

    async def cell():
        waited = cluster.run(flow)["out"]
        async with asyncio.timeout(60):
            awaited = (await cluster.start(flow))["out"]
        return sorted(waited), sorted(awaited)

    assert asyncio.run(cell()) == ([0, 1, 4, 9], [0, 1, 4, 9])


def test_the_size_of_state_is_told_by_operator(cluster):
    num_keys, num_floats = 6, 1_000

    def keep(key, value, state):
        return np.full(num_floats, value, np.float64), []

    flow = Dataflow(num_shards=3)
    numbers = flow.input("in")
    numbers.map(lambda n: (n % num_keys, n)).state_machine(keep, name="kept").probe("p")
    run = cluster.start(flow)
    run.input("in").send(list(range(30)))
    run.input("in").advance_to(1)
    run.probe("p").wait_until(0, 60)
    told = run.metrics()["operators"]
    run.input("in").close()
    run.result(60)

    array_bytes = num_keys * num_floats * 8
    assert told["kept"]["state_entries"] == num_keys
    assert array_bytes <= told["kept"]["state_bytes"] < 2 * array_bytes
    assert told["map"]["state_bytes"] < 1_000
