"""The tester runs the very workers, in many orders, with time that passes at once."""

from __future__ import annotations

import threading
import time
from collections import Counter

import numpy as np
import pytest

from timelyml import Dataflow
from timelyml.errors import (
    DeadlineError,
    GraphError,
    OperatorError,
    RunStoppedError,
    TimeError,
)
from timelyml.testing import FlowTester, StuckError, run_in_orders


def arrivals():
    """Two source shards to one reader, which tells in which order blocks came."""
    flow = Dataflow(num_shards=2)
    rows = flow.source(lambda shard, count: [[(shard, n)] for n in range(20)])
    rows.gather().unary(
        lambda shard, delivery: shard.emit("came", delivery.payload[0])
    ).collect()
    return flow


def order_of(seed):
    came = []
    with FlowTester(2, seed=seed) as tester:
        tester.run(arrivals(), on_message=lambda *said: came.append(said[3]))
    return came


def test_a_seed_gives_the_same_order_every_time():
    assert order_of(3) == order_of(3)


def test_seeds_differ_in_order_but_each_producer_keeps_its_own():
    orders = [order_of(seed) for seed in range(20)]

    assert len({tuple(order) for order in orders}) > 5
    for order in orders:
        for shard in range(2):
            assert [n for s, n in order if s == shard] == list(range(20))


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_results_are_those_of_any_cluster(num_workers):
    flow = Dataflow(num_shards=4)
    words = flow.source(["to be or", "not to be"] * 10).flat_map(str.split)
    words.count(lambda word: word).collect()

    with FlowTester(num_workers, seed=1) as tester:
        found = Counter(dict(tester.run(flow)["out"]))

    assert found == Counter({"to": 20, "be": 20, "or": 10, "not": 10})


def test_nothing_happens_before_something_waits():
    flow = Dataflow()
    flow.source([1]).collect()
    with FlowTester() as tester:
        run = tester.start(flow)
        assert not run.done()
        tester.settle()
        assert run.done()
        assert run.result()["out"] == [1]


def test_inputs_and_probes_work_as_ever():
    flow = Dataflow()
    flow.input("numbers").map(lambda n: 2 * n).probe("seen").collect()
    with FlowTester(2, seed=5) as tester:
        run = tester.start(flow)
        numbers = run.input("numbers")
        numbers.send([1, 2])
        numbers.advance_to(1)
        run.probe("seen").wait_until(0)
        records = [(time, n) for time, block in run.batches("out") for n in block]
        assert records == [(0, 2), (0, 4)]
        with pytest.raises(TimeError, match="cannot move backwards"):
            numbers.advance_to(0)
        numbers.send([3])
        numbers.close()
        assert run.result()["out"] == [2, 4, 6]


def test_results_can_be_read_while_the_run_goes_on():
    flow = Dataflow()
    flow.source(range(3), batch_size=1, epoch_every=1).collect()
    with FlowTester() as tester:
        found = list(tester.start(flow).results("out"))
    assert found == [(0, [0]), (1, [1]), (2, [2])]


def delayed(delay_s):
    """Each block comes out so many seconds later."""

    def on_batch(shard, delivery):
        right = shard.retain(delivery.time)
        shard.state.setdefault("held", []).append((right, delivery.payload))
        shard.activate_after(delay_s)

    def on_activate(shard):
        for right, payload in shard.state.pop("held", []):
            with right:
                shard.output().send(right.time, payload)

    return on_batch, on_activate


def late_flow(delay_s):
    from timelyml import Logic

    on_batch, on_activate = delayed(delay_s)
    flow = Dataflow()
    logic = Logic(on_batch=on_batch, on_activate=on_activate)
    (late,) = flow.operator(logic, inputs=[flow.source([1])], states=("state",))
    late.collect()
    return flow


def test_hours_pass_at_once():
    began = time.monotonic()
    with FlowTester(seed=2) as tester:
        assert tester.run(late_flow(7200.0))["out"] == [1]
        assert tester.now == pytest.approx(7200, abs=1)
    assert time.monotonic() - began < 60  # not two hours


def test_time_can_be_moved_by_hand():
    with FlowTester(seed=2) as tester:
        run = tester.start(late_flow(10.0))
        tester.advance(9.0)
        assert not run.done()
        tester.advance(2.0)
        assert run.done()


def test_time_outs_are_in_the_testers_own_time():
    with FlowTester() as tester:
        run = tester.start(late_flow(60.0))
        with pytest.raises(DeadlineError, match="got 5 s"):
            run.result(timeout_s=5.0)
        assert tester.now == pytest.approx(5, abs=1)
        with pytest.raises(DeadlineError, match="got 2 s of time"):
            tester.run(late_flow(60.0), timeout_s=2.0)


def test_a_wait_that_never_ends_says_who_is_to_blame():
    flow = Dataflow()
    flow.input("numbers").probe("seen")
    with FlowTester() as tester:
        run = tester.start(flow)
        with pytest.raises(StuckError, match="waits for ever") as got:
            run.probe("seen").wait_until(0)
        assert "an input that the driver has not advanced" in got.value.__notes__[0]


def test_a_source_that_never_ends_is_given_up(monkeypatch):
    monkeypatch.setattr("timelyml.testing.scheduler.MAX_ACTIONS", 2000)

    def silent(shard, count):
        while True:
            yield None

    flow = Dataflow()
    flow.source(silent)
    with FlowTester() as tester:
        run = tester.start(flow)
        with pytest.raises(StuckError, match="does not get on; got 2000 actions"):
            run.result()


def test_a_failure_names_the_seed():
    flow = Dataflow()
    flow.source([0]).map(lambda n: 1 // n, name="divide").collect()
    with (
        pytest.raises(ZeroDivisionError, match="'divide' failed on worker 0") as got,
        FlowTester(3, seed=41) as tester,
    ):
        tester.run(flow)
    assert isinstance(got.value, OperatorError)
    assert "FlowTester(3, seed=41)" in got.value.__notes__[-1]


def test_runs_may_go_side_by_side():
    flow = Dataflow()
    flow.input("numbers").collect()
    with FlowTester(2, seed=8) as tester:
        first, second = tester.start(flow), tester.start(flow)
        second.input("numbers").send([2])
        first.input("numbers").send([1])
        for run in (second, first):
            run.input("numbers").close()
        assert (first.result()["out"], second.result()["out"]) == ([1], [2])


def test_what_still_runs_is_cancelled_at_the_end():
    flow = Dataflow()
    flow.input("numbers").collect()
    with FlowTester() as tester:
        run = tester.start(flow)
        tester.settle()
    assert run.done()


def test_callbacks_run_in_the_calling_thread():
    flow = Dataflow()
    flow.source([0]).map(lambda n: threading.get_ident()).collect()
    with FlowTester() as tester:
        assert tester.run(flow)["out"] == [threading.get_ident()]


def test_a_graph_that_cannot_run_is_refused_at_once():
    flow = Dataflow()
    flow.feedback(name="again")
    with FlowTester() as tester, pytest.raises(GraphError, match="again"):
        tester.start(flow)


def first_come(flow):
    """An operator that is wrong: what it sends depends on which shard was faster."""

    def on_batch(shard, delivery):
        if shard.state.setdefault(delivery.time, delivery.payload) is delivery.payload:
            shard.output().send(delivery.time, delivery.payload)

    rows = flow.source(lambda shard, count: [[shard]], num_shards=2)
    rows.gather().unary(on_batch).collect()
    return flow


def test_an_operator_that_depends_on_the_order_is_found():
    def check(result):
        assert result["out"] == [0]

    with pytest.raises(AssertionError, match=r"\[1\] == \[0\]") as got:
        run_in_orders(first_come(Dataflow()), check, seeds=range(50))
    assert "in the order of seed" in got.value.__notes__[-1]


def test_one_that_does_not_depend_on_it_passes():
    flow = Dataflow()
    rows = flow.source(np.arange(100), batch_size=7, num_shards=2)
    rows.accumulate(0.0, lambda total, x: total + float(x.sum())).gather().fold(
        0.0, lambda total, x: total + x
    ).collect()
    seen = []

    run_in_orders(flow, lambda result: seen.append(result["out"]), seeds=range(10))

    assert seen == [[4950.0]] * 10


def test_a_listener_may_cancel_but_not_wait():
    flow = Dataflow()
    flow.source([1]).sink(lambda shard, delivery: shard.emit("got", 1))
    runs = []
    with FlowTester() as tester:
        runs.append(tester.start(flow, on_message=lambda *_: runs[0].result()))
        with pytest.raises(OperatorError, match="ReentryError: a run waits for itself"):
            runs[0].result()
        runs.append(tester.start(flow, on_message=lambda *_: runs[1].cancel()))
        with pytest.raises(RunStoppedError, match="was cancelled"):
            runs[1].result()
