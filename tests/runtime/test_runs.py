"""Handles of runs, wherever the workers are: wait, feed, watch, stop, explain."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading

import numpy as np
import pytest

from tests.runtime.test_processes import wait_for
from timelyml import Cluster, Dataflow, RoundRobin
from timelyml.errors import (
    ConfigError,
    DeadlineError,
    GraphError,
    OperatorError,
    PayloadError,
    RunStoppedError,
    ShippingError,
    StateLimitError,
    TimeError,
)
from timelyml.runtime.operator import WAIT, Logic

TIMEOUT_S = 30.0


def endless(index, count):
    """One record per epoch, for ever."""
    for epoch in itertools.count():
        yield [(index, epoch)]


def doubled(name="flow"):
    """input 'in' -> x * 2 -> probe -> 'out'"""
    flow = Dataflow(name)
    flow.input("in").exchange(lambda x: x).map(lambda x: 2 * x).probe().collect()
    return flow


def hoarder():
    """An operator that keeps a capability of its first record and forgets it."""

    def on_batch(shard, delivery):
        shard.state.setdefault("kept", shard.retain(delivery.time))

    flow = Dataflow("hoard")
    (out,) = flow.operator(
        Logic(on_batch=on_batch),
        inputs=[flow.source([1])],
        name="hoarder",
        states=("state",),
    )
    out.probe().collect()
    return flow


@pytest.fixture
def processes():
    with Cluster(1) as cluster:
        yield cluster


def test_results_come_in_order_of_time_and_columns_stay_columns(cluster):
    flow = Dataflow()
    source = flow.source(np.arange(12), batch_size=2, epoch_every=1, num_shards=2)
    source.collect()
    result = cluster.run(flow)
    times = [time for time, _ in result.batches("out")]
    assert times == sorted(times)
    assert all(isinstance(payload, np.ndarray) for _, payload in result.batches("out"))
    assert sorted(result["out"]) == list(range(12))


def test_a_result_knows_its_names_and_says_which_there_are(cluster):
    flow = Dataflow()
    flow.source([]).collect("nothing")
    result = cluster.run(flow)
    assert list(result) == ["nothing"]
    assert result["nothing"] == []
    with pytest.raises(KeyError, match="expected one of 'nothing'"):
        result["out"]


def test_every_mode_runs_a_copy_of_what_was_captured(cluster):
    seen = []
    flow = Dataflow()
    flow.source(range(3)).map(lambda x: seen.append(x) or x).collect()
    assert cluster.run(flow)["out"] == [0, 1, 2]
    assert seen == []


def test_what_cannot_be_shipped_is_refused_before_anything_starts(cluster):
    lock = threading.Lock()
    flow = Dataflow()
    flow.source([1]).map(lambda x: lock, name="guarded").collect()
    with pytest.raises(ShippingError, match=r"operator 'guarded' .*_thread.lock"):
        cluster.start(flow)


def test_runs_share_a_cluster_side_by_side_with_growing_generations(cluster):
    runs = [cluster.start(doubled(f"flow-{i}")) for i in range(3)]
    for i, run in enumerate(runs):
        run.input("in").send([i, i + 10])
    for run in reversed(runs):
        run.input("in").close()
    results = [sorted(run.result(TIMEOUT_S)["out"]) for run in runs]
    assert results == [[2 * i, 2 * i + 20] for i in range(3)]
    if cluster.mode != "inline":  # there each run has a cluster of its own
        assert [run.generation for run in runs] == sorted(
            run.generation for run in runs
        )


def test_a_result_can_be_awaited(cluster):
    async def main():
        run = cluster.start(doubled())
        run.input("in").send([4])
        run.input("in").close()
        return (await run)["out"]

    assert asyncio.run(main()) == [8]


def test_a_run_is_cancelled_with_the_task_that_awaits_it(cluster):
    async def main():
        run = cluster.start(doubled())
        task = asyncio.ensure_future(awaited(run))
        await asyncio.sleep(0)  # it waits now
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return run

    run = asyncio.run(main())
    with pytest.raises(RunStoppedError, match="was cancelled"):
        run.result(TIMEOUT_S)


def test_a_shielded_run_goes_on_without_the_task_that_awaits_it(cluster):
    async def main():
        run = cluster.start(doubled())
        shielded = asyncio.ensure_future(awaited(run))
        task = asyncio.ensure_future(awaited(asyncio.shield(shielded)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        run.input("in").send([4])
        run.input("in").close()
        return (await shielded)["out"]

    assert asyncio.run(main()) == [8]


def test_an_epoch_is_delivered_once_its_input_has_moved_on(cluster):
    with cluster.start(doubled()) as run:
        numbers, probe = run.input("in"), run.probe("probe")
        for epoch in range(4):
            assert numbers.time == epoch
            numbers.send([epoch, epoch + 1])
            assert probe.less_equal(epoch)
            numbers.advance_to(epoch + 1)
            probe.wait_until(epoch, TIMEOUT_S)
            assert not probe.less_equal(epoch)
            assert probe.less_equal(epoch + 1)
            assert not probe.less_than(epoch + 1)
            delivered = [
                x for t, batch in run.batches("out") if t == epoch for x in batch
            ]
            assert sorted(delivered) == [2 * epoch, 2 * epoch + 2]
        assert not probe.done
    assert probe.done
    assert run.probe("probe").frontier == ()


def test_an_input_cannot_move_backwards(cluster):
    with cluster.start(doubled()) as run:
        numbers = run.input("in")
        numbers.advance_to(5)
        with pytest.raises(
            TimeError,
            match="input 'in' cannot move backwards; got epoch 3; expected 5 or later",
        ):
            numbers.advance_to(3)
        with pytest.raises(TimeError, match="expected an integer below"):
            numbers.advance_to(2.5)


def test_an_input_refuses_what_is_no_payload_at_the_call(cluster):
    with cluster.start(doubled()) as run, pytest.raises(PayloadError, match="records"):
        run.input("in").send(7)


def test_a_closed_input_takes_nothing_more(cluster):
    with cluster.start(doubled()) as run:
        numbers = run.input("in")
        numbers.close()
        numbers.close()
        with pytest.raises(RunStoppedError, match="input 'in' is closed"):
            numbers.send([1])


def test_arrays_that_were_sent_are_sealed_and_lists_are_copied(cluster):
    flow = Dataflow()
    flow.input("in").collect()
    with cluster.start(flow) as run:
        records, column = [1, 2], np.arange(3)
        run.input("in").send(records)
        records.append(3)
        run.input("in").send(column)
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 5
    assert sorted(run.result()["out"]) == [0, 1, 1, 2, 2]


def test_flush_returns_once_the_workers_took_everything(cluster):
    with cluster.start(doubled()) as run:
        for i in range(20):
            run.input("in").send([i])
        run.input("in").flush(timeout_s=TIMEOUT_S)
        assert run.record.outstanding_bytes["in"] == 0


def test_a_send_waits_for_epochs_that_are_too_far_ahead(cluster):
    flow = Dataflow()

    def on_batch(shard, delivery):
        shard.state[delivery.time] = shard.retain(delivery.time)

    held = flow.input("slow").unary(on_batch, name="hold", states=("state",))
    held.probe()
    run = cluster.start(flow, max_epochs_ahead=2)
    try:
        handle = run.input("slow")
        for epoch in range(2):
            handle.send([epoch])
            handle.advance_to(epoch + 1)
        assert run.input("slow").time == 2
        with pytest.raises(DeadlineError, match="input 'slow' had no credit") as got:
            handle.send([2], timeout_s=0.3)
        assert "'hold'" in got.value.explanation
    finally:
        run.cancel()


def test_filling_one_input_after_the_other_does_not_lock_up(cluster):
    flow = Dataflow()
    left, right = flow.input("left"), flow.input("right")
    left.concat(right).collect()
    with cluster.start(flow, max_epochs_ahead=2) as run:
        for name in ("left", "right"):
            handle = run.input(name)
            for epoch in range(10):
                handle.send([epoch], timeout_s=TIMEOUT_S)
                handle.advance_to(epoch + 1)
    assert run.result()["out"] == [e for e in range(10) for _ in "lr"]


def test_an_unknown_input_or_probe_names_those_there_are(cluster):
    with cluster.start(doubled()) as run:
        with pytest.raises(GraphError, match=r"no input of that name; got 'x'; .*'in'"):
            run.input("x")
        with pytest.raises(GraphError, match=r"no probe of that name; .*\['probe'\]"):
            run.probe("in")


def test_a_record_that_cannot_travel_ends_the_run_with_an_error(processes):
    flow = Dataflow()
    flow.input("in").collect()
    run = processes.start(flow.build())
    run.input("in").send([threading.Lock()])
    with pytest.raises(PayloadError, match=r"cannot be sent .*_thread\.lock|lock"):
        run.result(TIMEOUT_S)


def test_a_failed_operator_ends_its_run_only_with_the_users_own_error(cluster):
    flow = doubled("good")
    good = cluster.start(flow)
    bad = Dataflow("bad")
    bad.source([3]).map(lambda x: {}[x], name="lookup").collect()
    with pytest.raises(KeyError, match="operator 'lookup' failed on worker") as got:
        cluster.start(bad).result(TIMEOUT_S)
    assert isinstance(got.value, OperatorError)
    assert got.value.operator == "lookup"
    assert (got.value.shard, got.value.time) == (0, 0)
    assert "lambda x: {}[x]" in got.value.traceback_text
    good.input("in").send([1])
    good.input("in").close()
    assert good.result(TIMEOUT_S)["out"] == [2]


def test_an_operator_that_keeps_too_much_state_fails_its_run_by_name(cluster):
    def keep(shard, delivery):
        shard.state[delivery.time] = bytes(10_000)

    flow = Dataflow()
    numbers = flow.source(range(100), batch_size=1, epoch_every=1)
    numbers.unary(keep, name="hoarder", states=("state",)).collect()
    match = (
        r"'hoarder' failed on worker .*: StateLimitError: .* at most 100000; discard"
    )
    with pytest.raises(StateLimitError, match=match):
        cluster.run(flow, state_limit_bytes=100_000)


def test_everything_that_waits_for_a_failed_run_gets_its_error(cluster):
    flow = Dataflow()
    flow.input("in").map(lambda x: 1 // x).probe().collect()
    run = cluster.start(flow)
    run.input("in").send([0])
    with pytest.raises(ZeroDivisionError, match="failed"):
        run.probe("probe").wait_until(0, TIMEOUT_S)
    with pytest.raises(ZeroDivisionError, match="failed"):
        run.input("in").send([1])
    with pytest.raises(ZeroDivisionError, match="failed"):
        run.input("in").flush(timeout_s=TIMEOUT_S)
    with pytest.raises(ZeroDivisionError, match="failed"):
        asyncio.run(awaited(run))
    assert run.done()


async def awaited(run):
    return await run


def test_a_run_out_of_time_fails_and_names_the_capability_that_was_forgotten(cluster):
    with pytest.raises(DeadlineError, match=r"is not complete; got 0\.3 s") as got:
        cluster.run(hoarder(), timeout_s=0.3)
    explanation = got.value.explanation
    assert "time 0 at output 0 of 'hoarder': a capability on worker" in explanation
    assert "test_runs.py" in explanation
    assert "in on_batch" in explanation


def test_a_wait_out_of_time_explains_and_lets_the_run_go_on(cluster):
    run = cluster.start(hoarder())
    with pytest.raises(DeadlineError, match="is not complete in time") as got:
        run.result(timeout_s=0.3)
    assert "'hoarder'" in got.value.explanation
    with pytest.raises(DeadlineError, match="probe 'probe' did not pass time 0") as got:
        run.probe("probe").wait_until(0, timeout_s=0.1)
    assert "'hoarder'" in got.value.explanation
    with pytest.raises(DeadlineError, match="did not drain in time") as got:
        run.stop(timeout_s=0.1)
    assert "'hoarder'" in got.value.explanation
    (row,) = run.explain_stall().rows
    assert (row.operator, row.time, row.count) == ("hoarder", 0, 1)
    assert not run.done()
    run.cancel()
    assert "is over" in str(run.explain_stall())


def test_a_run_that_waits_for_the_driver_says_that_it_is_the_drivers_turn(cluster):
    with cluster.start(doubled()) as run:
        run.input("in").advance_to(4)
        with pytest.raises(DeadlineError, match="did not pass time 4"):
            run.probe("probe").wait_until(4, timeout_s=0.2)
        row = run.explain_stall().rows[0]
    assert (row.operator, row.time) == ("in", 4)
    assert "an input that the driver has not advanced or closed" in row.what


def test_stop_drains_an_endless_source_to_whole_epochs(cluster):
    flow = Dataflow()
    flow.source(endless, num_shards=2).probe().collect()
    run = cluster.start(flow)
    run.probe("probe").wait_until(5, TIMEOUT_S)
    run.stop(timeout_s=TIMEOUT_S)
    out = run.result(TIMEOUT_S)["out"]
    by_shard = [[e for shard, e in out if shard == index] for index in (0, 1)]
    assert [list(range(len(epochs))) for epochs in by_shard] == by_shard
    assert min(map(len, by_shard)) >= 6


def test_cancel_gives_up_at_once_and_leaves_whole_epochs_only(cluster):
    flow = Dataflow()
    flow.source(endless, num_shards=2).probe().collect()
    run = cluster.start(flow)
    run.probe("probe").wait_until(3, TIMEOUT_S)
    run.cancel()
    assert run.done()
    with pytest.raises(RunStoppedError, match="was cancelled"):
        run.result()
    counts = {}
    for time, batch in run.batches("out"):
        counts[time] = counts.get(time, 0) + len(batch)
    assert set(counts.values()) == {2}
    assert sorted(counts) == list(range(len(counts)))


def test_a_block_that_raises_cancels_its_run(cluster):
    flow = Dataflow()
    flow.source(endless).collect()
    with pytest.raises(LookupError, match="mine"), cluster.start(flow) as run:
        raise LookupError("mine")
    assert run.done()


def test_what_operators_send_to_the_driver_arrives_with_its_tag(cluster):
    got = []

    def on_batch(shard, delivery):
        shard.emit("size", len(delivery.payload))

    flow = Dataflow()
    flow.source([1, 2, 3]).sink(on_batch, name="measure")
    cluster.run(flow, on_message=lambda *message: got.append(message))
    assert got == [("measure", 0, "size", 3)]


def test_a_listener_that_raises_ends_the_run_with_its_error(cluster):
    def on_message(*_):
        raise LookupError("mine")

    flow = Dataflow()
    flow.source(endless).sink(lambda shard, delivery: shard.emit("x", 1))
    with pytest.raises(OperatorError, match="on_message failed: LookupError") as got:
        cluster.run(flow, on_message=on_message)
    assert isinstance(got.value.__cause__, LookupError)


def test_metrics_are_summed_over_workers_while_it_runs_and_after(cluster):
    run = cluster.start(doubled())
    run.input("in").send(list(range(10)))
    run.input("in").advance_to(1)
    run.probe("probe").wait_until(0, TIMEOUT_S)
    during = run.metrics()
    run.input("in").close()
    run.result(TIMEOUT_S)
    after = run.metrics()
    for metrics in (during, after):
        assert metrics["operators"]["map"]["records_in"] == 10
        assert set(metrics["workers"]) == set(range(cluster.num_workers))


def test_metrics_are_zeros_under_the_same_names_before_a_worker_has_begun(cluster):
    run = cluster.start(doubled())
    before = run.metrics(timeout_s=0)
    run.input("in").send([1])
    run.input("in").close()
    run.result(TIMEOUT_S)
    after = run.metrics()

    assert before["operators"]["map"]["records_in"] == 0
    assert before["operators"].keys() == after["operators"].keys()
    assert before["channels"].keys() == after["channels"].keys()
    for name, figures in before["operators"].items():
        assert figures.keys() == after["operators"][name].keys()
    for name, figures in before["channels"].items():
        assert figures.keys() == after["channels"][name].keys()
    assert before["progress"].keys() == after["progress"].keys()
    assert before.keys() <= after.keys()


@pytest.mark.parametrize("mode", ["broadcast", "accumulator"])
def test_both_progress_modes_give_the_same_result(cluster, mode):
    flow = Dataflow(num_shards=4)
    flow.source(range(50)).exchange(lambda x: x).count().collect()
    assert sum(cluster.run(flow, progress_mode=mode)["out"]) == 50


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "gpu"}, "option 'mode' cannot work; got 'gpu'"),
        ({"workers": 0}, "option 'workers' cannot work; got 0"),
        ({"workers": 2, "mode": "inline"}, "expected 1 where mode is 'inline'"),
        ({"transport": "carrier"}, "option 'transport'"),
        ({"workers": True}, "option 'workers' cannot work; got True"),
        ({"num_devices": 0}, "option 'num_devices' cannot work; got 0"),
        ({"heartbeat_timeout_s": 0}, "option 'heartbeat_timeout_s'"),
        (
            {"heartbeat_timeout_s": "9"},
            "got '9'; expected a number of seconds, above 0",
        ),
        ({"startup_timeout_s": float("nan")}, "option 'startup_timeout_s'.*got nan"),
        ({"environment": ["A=1"]}, "expected a mapping of names to text"),
        ({"environment": {"A=B": "1"}}, "'environment' cannot work; got 'A=B'"),
        ({"environment": {"A": 1}}, "got 1; expected text"),
        ({"wokers": 2}, "a cluster has no option of that name; got 'wokers'"),
    ],
)
def test_a_cluster_refuses_options_that_cannot_work(options, match):
    with pytest.raises(ConfigError, match=match):
        Cluster(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs_ahead": 0},
        {"max_epochs_ahead": True},
        {"credit_bytes": 1.5},
        {"loop_budget_bytes": -1},
        {"state_limit_bytes": 0},
        {"timeout_s": 0},
        {"timeout_s": "1"},
        {"timeout_s": -1},
        {"timeout_s": float("nan")},
        {"placement": "x"},
        {"placement": RoundRobin},
        {"progress_mode": "x"},
        {"on_message": "x"},
        {"cluster": "x"},
    ],
    ids=str,
)
def test_a_run_refuses_values_that_cannot_work(options):
    (option,) = options
    flow = Dataflow()
    flow.source([1]).collect()
    with pytest.raises(ConfigError, match=f"option '{option}' cannot work; got "):
        flow.run(**options)


def test_a_run_refuses_options_that_it_does_not_know(cluster):
    flow = doubled()
    with pytest.raises(ConfigError, match="no option of that name; got 'colour'"):
        cluster.start(flow, colour="red")


WAITS = {
    "result": lambda run, timeout_s: run.result(timeout_s),
    "stop": lambda run, timeout_s: run.stop(timeout_s=timeout_s),
    "metrics": lambda run, timeout_s: run.metrics(timeout_s),
    "explain_stall": lambda run, timeout_s: run.explain_stall(timeout_s),
    "send": lambda run, timeout_s: run.input("in").send([1], timeout_s=timeout_s),
    "flush": lambda run, timeout_s: run.input("in").flush(timeout_s=timeout_s),
    "wait_until": lambda run, timeout_s: run.probe("probe").wait_until(0, timeout_s),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
@pytest.mark.parametrize("timeout_s", ["x", -1, True, float("nan")], ids=str)
def test_a_wait_refuses_what_is_no_time(wait, timeout_s):
    with doubled().start() as run:
        match = "option 'timeout_s' cannot work; got .*; expected a number of seconds"
        with pytest.raises(ConfigError, match=match):
            wait(run, timeout_s)
        assert not run.done()


@pytest.mark.parametrize("name", ["x", 5, ["in"], None], ids=str)
def test_a_run_refuses_names_that_it_does_not_know(name):
    with doubled().start() as run:
        for ask in (run.batches, run.results):
            with pytest.raises(KeyError, match="nothing is collected under that name"):
                ask(name)
        for ask in (run.input, run.probe):
            with pytest.raises(GraphError, match="of that name; got"):
                ask(name)
    with pytest.raises(KeyError, match="nothing is collected under that name"):
        run.result()[name]
    with pytest.raises(KeyError, match="nothing is captured under that name"):
        run.result().recording(name)


@pytest.mark.parametrize("time", ["x", 1.5, (0, 0), -1, None], ids=str)
def test_a_probe_refuses_what_is_no_time_of_its_scope(time):
    with doubled().start() as run:
        probe = run.probe("probe")
        for ask in (probe.less_equal, probe.less_than, probe.wait_until):
            with pytest.raises(TimeError, match="probe 'probe'"):
                ask(time)


def test_a_cluster_says_how_a_dataflow_runs_on_it():
    with (
        Cluster(1, mode="inline") as cluster,
        pytest.raises(ConfigError, match=r"call flow\.run\(cluster=cluster\)"),
    ):
        cluster.run(doubled())


@pytest.mark.parametrize("placement", ["x", RoundRobin, 3], ids=str)
def test_an_operator_refuses_what_is_no_placement(placement):
    with pytest.raises(GraphError, match=r"operator 'source' cannot be placed; got "):
        Dataflow().source([1], placement=placement)


def test_closing_an_input_ends_a_send_that_waits_for_credit(cluster):
    def hold(shard, delivery):
        while True:
            yield WAIT

    flow = Dataflow(num_shards=1)
    flow.input("in").unary(hold)
    run = cluster.start(flow, max_epochs_ahead=2)
    sends = run.input("in")
    errors = []

    def send():
        try:
            for epoch in itertools.count():
                sends.advance_to(epoch)
                sends.send([epoch])
        except RunStoppedError as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    wait_for(lambda: sends.time == 2 and not sends._has_credit(1))
    with pytest.raises(DeadlineError, match="did not drain"):
        run.stop(timeout_s=0.1)
    thread.join(TIMEOUT_S)
    assert "input 'in' is closed" in str(errors[0])
    run.cancel()


def test_a_closed_cluster_starts_nothing_and_its_runs_say_so():
    cluster = Cluster(1, mode="inline")
    flow = Dataflow()
    flow.source(endless).collect()
    run = cluster.start(flow.build())
    cluster.close()
    cluster.close()
    with pytest.raises(RunStoppedError, match="the cluster was closed"):
        run.result(TIMEOUT_S)
    with pytest.raises(RunStoppedError, match="the cluster is closed"):
        cluster.start(flow.build())


def failing():
    """input 'in' -> 1 / x -> probe -> 'out'"""
    flow = Dataflow("failing")
    flow.input("in").map(lambda x: 1 / x).probe().collect()
    return flow


def by_result(run):
    run.input("in").close()
    run.result(TIMEOUT_S)


def by_await(run):
    async def main():
        await run

    run.input("in").close()
    asyncio.run(main())


WAYS_TO_BE_TOLD = {
    "result": by_result,
    "await": by_await,
    "results": lambda run: list(run.results("out")),
    "probe": lambda run: run.probe("probe").wait_until(0, timeout_s=TIMEOUT_S),
}


@pytest.mark.parametrize("way", WAYS_TO_BE_TOLD)
def test_an_error_that_the_block_handled_is_not_raised_at_its_end(cluster, way):
    handled = False
    with cluster.start(failing()) as run:
        run.input("in").send([0])
        try:
            WAYS_TO_BE_TOLD[way](run)
        except ZeroDivisionError:
            handled = True

    assert handled
    with pytest.raises(ZeroDivisionError, match="'map' failed"):
        run.result()  # to whom asks it is told again


def test_an_error_that_only_another_thread_was_told_of_is_raised():
    def read(run):
        run.input("in").send([0])
        with contextlib.suppress(ZeroDivisionError):
            by_result(run)

    def block():
        with failing().start() as run:
            reader = threading.Thread(target=read, args=(run,))
            reader.start()
            reader.join()

    with pytest.raises(ZeroDivisionError, match="'map' failed"):
        block()
