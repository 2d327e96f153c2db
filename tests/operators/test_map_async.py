"""Calls of services: many at once, while the worker goes on."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timelyml import Dataflow
from timelyml.errors import (
    ConfigError,
    GraphError,
    OperatorError,
    RunStoppedError,
)
from timelyml.operators.calls import Finished
from timelyml.operators.map_async import _Order
from timelyml.testing import eventually


async def double(n):
    for _ in range(n % 5):  # so that later ones overtake it
        await asyncio.sleep(0)
    return 2 * n


def double_plainly(n):
    sum(range(20_000 * (n % 5)))  # so that later ones overtake it
    return 2 * n


class Together:
    """A service that answers once `number` calls wait for it at the same time."""

    def __init__(self, number):
        self.number = number
        self.waiting = 0
        self.event = None

    def __reduce__(self):
        return Together, (self.number,)

    async def __call__(self, n):
        if self.event is None:
            self.event = asyncio.Event()
        self.waiting += 1
        if self.waiting == self.number:
            self.event.set()
        await self.event.wait()
        return n


@pytest.mark.parametrize("fn", [double, double_plainly])
def test_results_come_in_the_order_of_the_records(cluster, fn):
    flow = Dataflow()
    flow.source(range(200)).map_async(fn, limit=16).collect()

    assert cluster.run(flow)["out"] == [2 * n for n in range(200)]


@pytest.mark.parametrize("fn", [double, double_plainly])
def test_results_may_come_as_they_are_ready(cluster, fn):
    flow = Dataflow(num_shards=3)
    numbers = flow.source(range(100)).exchange(lambda n: n)
    numbers.map_async(fn, limit=10, ordered=False).collect()

    assert sorted(cluster.run(flow)["out"]) == [2 * n for n in range(100)]


class LastFirst:
    """A service that answers the first of `number` calls after all others."""

    def __init__(self, number):
        self.number = number
        self.answered = 0
        self.event = None

    def __reduce__(self):
        return LastFirst, (self.number,)

    async def __call__(self, n):
        if self.event is None:
            self.event = asyncio.Event()
        if n == 0:
            await self.event.wait()
        self.answered += 1
        if self.answered == self.number - 1:
            self.event.set()
        return n


def test_an_early_answer_does_not_wait_unless_it_has_to(cluster):
    flow = Dataflow(num_shards=1)
    flow.source([0, 1, 2]).map_async(LastFirst(3), ordered=False).collect()

    assert cluster.run(flow)["out"] == [1, 2, 0]


def test_calls_are_out_at_the_same_time(cluster):
    flow = Dataflow(num_shards=1)
    flow.source(range(30)).map_async(Together(30), limit=30).collect()

    assert cluster.run(flow)["out"] == list(range(30))


class Meter:
    """A service that answers `number` calls together, with how many it had at most."""

    def __init__(self, number):
        self.number = number
        self.now = self.most = 0
        self.lock = threading.Lock()
        self.barrier = threading.Barrier(number)

    def __reduce__(self):
        return Meter, (self.number,)

    def __call__(self, n):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.barrier.wait(60)
        with self.lock:
            self.now -= 1
        return self.most


def test_as_many_calls_as_the_limit_are_out_and_never_more(cluster):
    flow = Dataflow(num_shards=1)
    flow.source(range(60)).map_async(Meter(3), limit=3).collect()

    found = cluster.run(flow)["out"]
    assert len(found) == 60
    assert max(found) == 3


def test_results_have_the_times_of_their_records_which_stay_open(cluster):
    flow = Dataflow(num_shards=1)
    numbers = flow.source(range(10), batch_size=2, epoch_every=1)
    numbers.map_async(double).count().collect()

    assert cluster.run(flow).batches("out") == [(time, [2]) for time in range(5)]


def test_other_operators_go_on_while_calls_are_out(cluster):
    async def never(n):
        await asyncio.Event().wait()

    flow = Dataflow(num_shards=1)
    flow.source([1]).map_async(never).collect("never")
    flow.source(range(50), batch_size=1, epoch_every=1).map(str).probe("others")

    run = cluster.start(flow)
    run.probe("others").wait_until(49, timeout_s=10)
    run.cancel()
    with pytest.raises(RunStoppedError, match="cancelled"):
        run.result()


def test_a_slow_service_holds_a_fast_source_back(cluster):
    async def slow(n):
        await asyncio.sleep(0.001)
        return 1

    flow = Dataflow(num_shards=1)
    numbers = flow.source(lambda s, n: iter(lambda: (0, [b"x" * 1000] * 10), None))
    numbers.map_async(slow, limit=4).probe("answers")

    run = cluster.start(flow, credit_bytes=50_000)
    assert eventually(
        lambda: run.metrics()["operators"]["map_async"]["batches_in"] >= 3
    )
    figures = run.metrics()
    assert figures["queued_bytes_peak"] < 70_000
    assert figures["operators"]["map_async"]["state_entries"] <= 4 + 1
    run.cancel()


def test_one_slow_call_lets_no_ordered_results_pile_up(cluster):
    async def first_is_slow(n):
        if n == 0:
            await asyncio.sleep(0.3)
        return n

    flow = Dataflow(num_shards=1)
    flow.source(range(300)).map_async(first_is_slow, limit=5, name="ask").collect()

    run = cluster.start(flow)
    most = 0
    while not run.done():
        figures = run.metrics().get("operators", {})  # none as the run ends
        most = max(most, figures.get("ask", {}).get("state_entries", 0))
    assert most <= 4 * 5 + 1
    assert run.result()["out"] == list(range(300))


def test_an_error_of_the_service_fails_the_run_with_its_line(cluster):
    async def fail(n):
        await asyncio.sleep(0)
        return 1 // n

    flow = Dataflow()
    flow.source([1, 0]).map_async(fail, name="ask").collect()

    with pytest.raises(ZeroDivisionError, match="'ask' failed") as caught:
        cluster.run(flow)
    assert "return 1 // n" in caught.value.traceback_text


async def exit_at_once(x):
    raise SystemExit("mine")


async def cancel_itself(x):
    raise asyncio.CancelledError("mine")


async def exit_in_a_task(x):
    await asyncio.create_task(exit_at_once(x))


def exit_its_thread(x):
    raise SystemExit("mine")


@pytest.mark.parametrize("on_error", ["fail", "skip"])
@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (exit_at_once, "SystemExit: mine"),
        (cancel_itself, "CancelledError: mine"),
        (exit_in_a_task, "SystemExit: mine"),
        (exit_its_thread, "SystemExit: mine"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_call_that_ends_by_an_exit_fails_the_run(cluster, fn, kind, on_error):
    flow = Dataflow()
    flow.source([1, 2]).map_async(fn, name="ask", on_error=on_error).collect()
    match = f"'ask' failed on worker 0, shard 0, at time 0: {kind}"
    with pytest.raises(OperatorError, match=match):
        cluster.run(flow)


def test_an_error_names_the_shard_and_the_time_of_its_record(cluster):
    async def fail(record):
        await asyncio.sleep(0)
        return 1 // record

    def read(shard, num_shards):
        return [[1], [1], [1 if shard < 2 else 0]]

    flow = Dataflow(num_shards=3)
    flow.source(read).map_async(fail, name="ask").collect()

    with pytest.raises(
        ZeroDivisionError, match=r"'ask' failed on .*, shard 2, at time 2"
    ):
        cluster.run(flow)


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_call_that_takes_too_long_fails(cluster, is_plain, tmp_path):
    over = tmp_path / "over"

    async def answer(n):
        if n == 0:
            await asyncio.Event().wait()
        return n

    def answer_plainly(n):
        if n == 0:
            eventually(over.exists, timeout_s=60)
        return n

    flow = Dataflow(num_shards=1)
    fn = answer_plainly if is_plain else answer
    results, failed = flow.source([0, 1, 2]).map_async(
        fn, timeout_s=0.5, limit=1, on_error="divert"
    )
    results.collect()
    failed.map(lambda f: (f.record, f.error_type, f.message)).collect("failed")

    found = cluster.run(flow, timeout_s=30)  # while the call still goes on
    over.touch()  # the thread of the call ends when its function does
    assert found["out"] == [1, 2]
    assert found["failed"] == [(0, "TimeoutError", "a call took longer than 0.5 s")]


def test_a_call_that_stops_the_loop_stops_no_other(cluster):
    async def stop(x):
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.001)
        return x

    flow = Dataflow()
    flow.source(range(20)).map_async(stop).collect()
    assert cluster.run(flow)["out"] == list(range(20))


def test_failed_calls_can_be_left_out(cluster):
    flow = Dataflow(num_shards=1)
    flow.source([2, 0, 4]).map_async(lambda n: 8 // n, on_error="skip").collect()

    assert cluster.run(flow)["out"] == [4, 2]


def test_a_plain_function_that_returns_a_coroutine_is_explained(cluster):
    flow = Dataflow()
    flow.source([1]).map_async(lambda n: double(n)).collect()  # noqa: PLW0108  the mistake

    with pytest.raises(TypeError, match="define it with async def"):
        cluster.run(flow)


def test_rows_of_columns_are_records(cluster):
    import numpy as np

    flow = Dataflow(num_shards=1)
    flow.source({"n": np.arange(3)}).map_async(lambda row: int(row["n"])).collect()

    assert cluster.run(flow)["out"] == [0, 1, 2]


def test_no_state_is_left(cluster):
    flow = Dataflow(num_shards=2)
    flow.source(range(100)).map_async(double, name="ask").collect()

    run = cluster.start(flow)
    run.result()
    assert run.metrics()["operators"]["ask"]["state_entries"] == 0


@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        ({"limit": 0}, ConfigError, "'limit' out of range; got 0"),
        ({"timeout_s": 0}, ConfigError, "'timeout_s' out of range; got 0"),
        ({"on_error": 1}, ConfigError, "'on_error' out of range; got 1"),
    ],
)
def test_options_are_checked(options, error, problem):
    with pytest.raises(error, match=problem):
        Dataflow().source([1]).map_async(double, **options)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(GraphError, match="'map_async' needs a function"):
        Dataflow().source([1]).map_async(3)


@settings(max_examples=15, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 30), max_size=30),
    limit=st.integers(1, 8),
    num_shards=st.integers(1, 3),
    is_ordered=st.booleans(),
)
def test_calling_equals_mapping(numbers, limit, num_shards, is_ordered):
    flow = Dataflow(num_shards=num_shards)
    stream = flow.source(lambda shard, n: [numbers[shard::n], numbers[shard::n]])
    stream.map_async(double, limit=limit, ordered=is_ordered).collect("calls")
    stream.map(lambda n: 2 * n).collect("mapped")

    result = flow.run()
    if is_ordered:
        assert result["calls"] == result["mapped"]
    assert sorted(result["calls"]) == sorted(result["mapped"])


@pytest.mark.parametrize("matters", [False, True])
def test_the_order_keeps_no_call_that_came_back(matters):
    order = _Order(matters=matters)
    for ticket in range(3):
        order.expect(ticket)

    assert order.num_expected == (3 if matters else 0)
    back = [Finished(ticket, None, None) for ticket in (2, 0, 1)]
    found = [each.ticket for call in back for each in order.ready([call])]
    assert found == ([0, 1, 2] if matters else [2, 0, 1])
    assert order.num_expected == 0
