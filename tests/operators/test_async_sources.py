"""Async generators as sources."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from timelyml import Dataflow
from timelyml.errors import GraphError, OperatorError
from timelyml.operators.async_reading import ITEMS_AHEAD
from timelyml.testing.leftovers import eventually


async def ticks(shard, num_shards):
    for n in range(10):
        await asyncio.sleep(0.001)
        yield [(shard, n)]


def test_every_shard_reads_its_own_async_generator(cluster):
    flow = Dataflow(num_shards=3)
    flow.source(ticks).collect()

    batches = cluster.run(flow).batches("out")
    assert batches == [(n, [(shard, n)]) for n in range(10) for shard in range(3)]


def test_items_are_payloads_with_or_without_an_epoch(cluster):
    async def rows(shard, num_shards):
        yield 0, np.arange(3)
        await asyncio.sleep(0)
        yield 0, np.arange(2)
        yield 7, np.arange(1)

    flow = Dataflow(num_shards=1)
    flow.source(rows).count().collect()

    assert cluster.run(flow).batches("out") == [(0, [5]), (7, [1])]


def test_a_fast_generator_is_read_no_further_than_it_may_send(cluster, tmp_path):
    given = tmp_path / "given"

    async def endless(shard, num_shards):
        while True:
            with given.open("ab") as file:
                file.write(b".")
            yield [1]

    flow = Dataflow(num_shards=1)
    gate = flow.input("gate", num_shards=1)
    numbers = flow.source(endless).probe("read")
    numbers.concat(gate).fold(0, max).collect()

    run = cluster.start(flow, max_epochs_ahead=3)
    run.probe("read").wait_until(2, timeout_s=10)
    run.input("gate").advance_to(1)
    run.probe("read").wait_until(3, timeout_s=10)
    is_full = eventually(lambda: given.stat().st_size > ITEMS_AHEAD)
    # Before the end, which closes the gate and so allows for more.
    size = given.stat().st_size
    run.stop(timeout_s=10)
    assert is_full
    assert size <= 5 + ITEMS_AHEAD


def test_an_error_of_the_generator_fails_the_run(cluster):
    async def broken(shard, num_shards):
        yield [1]
        raise ConnectionError("the service is gone")

    flow = Dataflow(num_shards=1)
    flow.source(broken, name="feed").collect()

    with pytest.raises(OperatorError, match=r"'feed' failed .*the service is gone"):
        cluster.run(flow)


@pytest.mark.parametrize(
    "error",
    [SystemExit("mine"), asyncio.CancelledError("mine")],
    ids=lambda error: type(error).__name__,
)
def test_a_generator_that_ends_by_an_exit_is_not_at_its_end(cluster, error):
    async def rows(shard, num_shards):
        yield [1]
        raise error

    flow = Dataflow(num_shards=1)
    flow.source(rows).collect()
    kind = type(error).__name__
    with pytest.raises(OperatorError, match=f"'source' failed on .*: {kind}: mine"):
        cluster.run(flow)


def test_a_silent_generator_can_be_cancelled(cluster):
    async def silent(shard, num_shards):
        await asyncio.Event().wait()
        yield []

    flow = Dataflow(num_shards=2)
    flow.source(silent).collect()
    run = cluster.start(flow)
    run.metrics()
    run.cancel()


def test_a_silent_generator_keeps_nothing_from_draining(cluster):
    async def silent(shard, num_shards):
        yield [1]
        await asyncio.Event().wait()

    flow = Dataflow(num_shards=1)
    flow.source(silent).probe("read").collect()
    run = cluster.start(flow)
    run.probe("read").wait_until(0, timeout_s=10)
    run.stop(timeout_s=10)
    assert run.result()["out"] == [1]


class Sensor:
    """An async iterable, read anew each time."""

    async def __aiter__(self):
        for n in range(25):
            await asyncio.sleep(0)
            yield None if n == 3 else n


def test_an_async_iterable_gives_records_to_shard_0(cluster):
    flow = Dataflow(num_shards=3)
    flow.source(Sensor(), batch_size=5, epoch_every=2).collect()

    result = cluster.run(flow)
    assert result["out"] == [None if n == 3 else n for n in range(25)]
    found = {}
    for time, payload in result.batches("out"):
        found[time] = found.get(time, 0) + len(payload)
    assert found == {0: 10, 1: 10, 2: 5}


def test_a_generator_that_was_called_already_is_refused():
    with pytest.raises(GraphError, match="pass the generator function, not its result"):
        Dataflow().source(ticks(0, 1))
