"""Results that are read while the run goes on."""

from __future__ import annotations

import asyncio

import pytest

from timelyml import Dataflow
from timelyml.errors import RunStoppedError


def squares(number=20):
    flow = Dataflow(num_shards=1)
    numbers = flow.source(range(number), batch_size=1, epoch_every=1)
    numbers.map(lambda n: n * n).collect("squares")
    return flow


def test_batches_come_in_order_and_end_with_the_run(cluster):
    run = cluster.start(squares())

    found = list(run.results("squares"))
    assert found == [(n, [n * n]) for n in range(20)]
    assert run.result().batches("squares") == found


def test_batches_come_before_the_run_ends(cluster):
    flow = Dataflow(num_shards=1)
    flow.input("numbers", num_shards=1).map(str).collect()

    with cluster.start(flow) as run:
        results = iter(run.results("out"))
        for n in range(5):
            run.input("numbers").send([n])
            run.input("numbers").advance_to(n + 1)
            assert next(results) == (n, [str(n)])
    assert list(results) == []


def test_batches_come_to_asyncio(cluster):
    async def read():
        run = cluster.start(squares())
        return [batch async for batch in run.results("squares")]

    assert asyncio.run(read()) == [(n, [n * n]) for n in range(20)]


def test_an_async_reader_lets_others_run(cluster):
    async def main():
        flow = Dataflow(num_shards=1)
        flow.input("numbers", num_shards=1).collect()
        run = cluster.start(flow)
        asyncio.get_running_loop().call_later(0.05, run.input("numbers").close)
        return [batch async for batch in run.results("out")]

    assert asyncio.run(main()) == []


def test_two_readers_each_get_everything(cluster):
    run = cluster.start(squares(5))

    first, second = run.results("squares"), run.results("squares")
    assert list(first) == list(second) == [(n, [n * n]) for n in range(5)]


def test_what_is_not_kept_is_forgotten(cluster):
    run = cluster.start(squares())

    assert len(list(run.results("squares", keep=False))) == 20
    assert run.batches("squares") == []


def test_a_reader_may_leave_and_come_back(cluster):
    run = cluster.start(squares(6))
    results = run.results("squares")

    for time, _ in results:
        if time == 2:
            break
    assert [time for time, _ in results] == [3, 4, 5]
    run.result()


def test_a_failure_comes_after_the_times_that_were_complete(cluster):
    flow = Dataflow(num_shards=1)
    numbers = flow.input("numbers", num_shards=1)
    numbers.map(lambda n: 6 // n).probe("done").collect()

    run = cluster.start(flow)
    run.input("numbers").send([3])
    run.input("numbers").advance_to(1)
    results = iter(run.results("out"))
    assert next(results) == (0, [2])
    run.input("numbers").send([0])
    with pytest.raises(ZeroDivisionError, match="'map' failed"):
        next(results)


def test_a_cancelled_run_ends_its_readers(cluster):
    flow = Dataflow()
    flow.input("numbers").collect()
    run = cluster.start(flow)
    run.cancel()

    with pytest.raises(RunStoppedError, match="cancelled"):
        list(run.results("out"))


def test_an_unknown_name_is_refused(cluster):
    run = cluster.start(squares(1))

    with pytest.raises(KeyError, match="expected one of 'squares'"):
        run.results("cubes")
    run.result()
