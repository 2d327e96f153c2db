"""Every kind of bad input ends in a clear error or in the right answer, in every mode.

What is tested elsewhere is listed in `ELSEWHERE`; a test here sees that it is there.
"""

from __future__ import annotations

import ast
import resource
import threading
from pathlib import Path

import numpy as np
import pytest

from timelyml import Cluster, Dataflow, Logic
from timelyml.errors import (
    DeadlineError,
    OperatorError,
    PayloadError,
    ReentryError,
    RoutingError,
    RunStoppedError,
    TimelyError,
)
from timelyml.runtime.operator import WAIT

TESTS = Path(__file__).parent

ELSEWHERE = {
    "a worker killed with SIGKILL": (
        "runtime/test_processes.py",
        "test_a_killed_worker_ends_every_run_within_seconds_and_is_replaced",
    ),
    "a worker that never starts": (
        "runtime/test_processes.py",
        "test_a_worker_that_never_comes_is_named_at_the_deadline",
    ),
    "a peer stopped with SIGSTOP for longer than the time-out": (
        "runtime/test_processes.py",
        "test_a_stopped_worker_is_given_up_after_its_heartbeat_timeout",
    ),
    "an input moved backwards": (
        "runtime/test_runs.py",
        "test_an_input_cannot_move_backwards",
    ),
    "a source moved backwards": (
        "operators/test_sources.py",
        "test_epochs_of_a_function_cannot_go_back",
    ),
    "a destination outside the shards, of an exchange": (
        "operators/test_routing.py",
        "test_a_destination_that_does_not_exist_is_refused",
    ),
    "a destination outside the shards, of a direct edge": (
        "operators/test_routing.py",
        "test_send_rows_refuses_destinations_that_do_not_fit",
    ),
    "one hot key, of a join": (
        "operators/test_join.py",
        "test_one_hot_key_streams_its_results",
    ),
    "one hot key, of records": (
        "operators/test_keyed.py",
        "test_a_hot_key_crosses_the_exchange_once_per_shard",
    ),
    "one hot key, of columns": (
        "operators/test_aggregates.py",
        "test_a_hot_key_crosses_the_exchange_as_one_row_per_shard",
    ),
    "a flat_map that yields without end": (
        "operators/test_records.py",
        "test_an_endless_generator_keeps_neither_results_nor_others_back",
    ),
    "a graph that differs between workers": (
        "runtime/test_controller.py",
        "test_a_worker_that_built_another_graph_is_named_with_the_first_difference",
    ),
    "a graph that differs between workers, in earnest": (
        "runtime/test_own_rules.py",
        "test_a_graph_that_differs_between_workers_is_refused_with_the_difference",
    ),
    "Ctrl-C in the middle": (
        "runtime/test_programs.py",
        "test_ctrl_c_drains_the_run_then_interrupts_the_program",
    ),
    "Ctrl-C twice": (
        "runtime/test_programs.py",
        "test_a_second_ctrl_c_gives_up_what_cannot_be_drained",
    ),
}


@pytest.mark.parametrize(("file", "name"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_it_is_tested_elsewhere(file, name):
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if hasattr(node, "name")}


class TroubleError(Exception):
    """What the users of these tests raise."""


def fails(*_):
    raise TroubleError("no luck")


def fails_late(shard, delivery):
    shard.notify_at(delivery.time)


def fails_as_it_goes(*_):
    yield [0]
    raise TroubleError("no luck")


FAILING = {
    "map": lambda rows: rows.map(fails, name="bad"),
    "flat_map": lambda rows: rows.flat_map(fails, name="bad"),
    "generator": lambda rows: rows.flat_map(fails_as_it_goes, name="bad"),
    "filter": lambda rows: rows.filter(fails, name="bad"),
    "reduce": lambda rows: rows.reduce(lambda n: 0, fails, name="bad"),
    "on_batch": lambda rows: rows.unary(fails, name="bad"),
    "on_notify": lambda rows: rows.unary_notify(fails_late, fails, name="bad"),
    "on_frontier": lambda rows: rows.unary_frontier(fails_late, fails, name="bad"),
    "sink": lambda rows: rows.sink(fails, name="bad"),
    "sink on_notify": lambda rows: rows.sink(fails_late, on_notify=fails, name="bad"),
}


@pytest.mark.parametrize("add", FAILING.values(), ids=FAILING)
def test_a_function_that_raises_ends_the_run_with_its_own_error(cluster, add):
    flow = Dataflow(num_shards=1)
    add(flow.source([1, 2]))

    with pytest.raises(
        TroubleError, match=r"operator 'bad\S* failed on .*no luck"
    ) as got:
        cluster.run(flow)

    error = got.value
    assert isinstance(error, OperatorError)
    assert isinstance(error.__cause__, TroubleError)
    assert error.__cause__.args == ("no luck",)
    assert error.operator.startswith("bad")
    assert (error.worker, error.shard) == (0, 0)
    assert error.time in (0, None)  # a frontier is of no one time
    assert 'raise TroubleError("no luck")' in error.traceback_text


def test_a_routing_function_that_raises_names_the_operator_that_sent(cluster):
    flow = Dataflow(num_shards=2)
    flow.source([1], name="numbers").exchange(fails).collect()

    with pytest.raises(TroubleError, match="operator 'numbers' failed on worker"):
        cluster.run(flow)


def test_a_sink_that_raises_leaves_whole_epochs_of_the_others(cluster):
    def choosy(shard, delivery):
        if delivery.time == 3:
            fails()

    flow = Dataflow(num_shards=1)
    rows = flow.source(range(50), batch_size=5, epoch_every=1)
    rows.collect()
    rows.sink(choosy, name="choosy")
    run = cluster.start(flow)

    with pytest.raises(TroubleError, match=r"'choosy' failed .* at time 3"):
        run.result()
    assert all(len(block) == 5 for _, block in run.batches("out"))


BAD_PAYLOADS = {
    "columns differ": {"a": np.zeros(3), "b": np.zeros(4)},
    "object array": np.array([1, "x"], object),
    "object column": {"a": np.zeros(2), "b": np.array([1, None], object)},
    "0-d array": np.array(7),
    "0-d column": {"a": np.zeros(2), "b": np.array(7)},
    "number": 7,
    "text": "rows",
}

bad_payloads = pytest.mark.parametrize(
    "payload", BAD_PAYLOADS.values(), ids=BAD_PAYLOADS
)


@bad_payloads
def test_what_is_no_payload_is_refused_where_an_operator_sends_it(cluster, payload):
    def send(shard, delivery):
        shard.output().send(delivery.time, payload)

    flow = Dataflow(num_shards=1)
    flow.source([1]).unary(send, name="bad").collect()

    with pytest.raises(
        PayloadError, match=r"operator 'bad' failed .*; got .*; expected"
    ):
        cluster.run(flow)


@bad_payloads
def test_what_is_no_payload_is_refused_where_a_source_yields_it(cluster, payload):
    flow = Dataflow(num_shards=1)
    flow.source(lambda shard, count: [payload], name="bad").collect()

    with pytest.raises(
        PayloadError, match=r"operator 'bad' failed .*; got .*; expected"
    ):
        cluster.run(flow)


@bad_payloads
def test_what_is_no_payload_is_refused_where_the_driver_sends_it(payload):
    flow = Dataflow()
    flow.input("rows").collect()
    with flow.start() as run, pytest.raises(PayloadError, match=r"got .*; expected"):
        run.input("rows").send(payload)


@pytest.mark.parametrize(
    "payload",
    [np.zeros(0), np.zeros((0, 3)), {"a": np.zeros(0), "b": np.zeros((0, 2))}, []],
    ids=str,
)
def test_zero_rows_are_nothing_and_hold_nothing_back(cluster, payload):
    def send(shard, delivery):
        shard.output().send(delivery.time, payload)

    flow = Dataflow(num_shards=2)
    rows = flow.source(lambda shard, count: [payload, payload], name="empty")
    rows.exchange(lambda row: 0).count().collect("of source")
    sent = flow.source([1, 2]).unary(send)
    sent.exchange(lambda row: 0).fold(0, lambda n, _: n + 1).collect("of operator")
    flow.input("rows").count().probe("seen").collect("of driver")
    run = cluster.start(flow)
    run.input("rows").send(payload)
    run.input("rows").advance_to(1)
    run.probe("seen").wait_until(0, 20)
    run.input("rows").close()

    assert dict(run.result()) == {"of source": [], "of operator": [], "of driver": []}


NAN = float("nan")
pairs = [(1.0, 1), (NAN, 2), (NAN, 3)]

BY_NAN = {
    "exchange": lambda rows: rows.exchange(lambda pair: pair[0]),
    "key_by": lambda rows: rows.key_by(lambda pair: pair[0]),
    "reduce": lambda rows: rows.reduce(lambda pair: pair[0], lambda a, b: a),
    "count": lambda rows: rows.count(lambda pair: pair[0]),
    "distinct": lambda rows: rows.distinct(lambda pair: pair[0]),
    "join": lambda rows: rows.join(rows),
    "join across": lambda rows: rows.join(rows, across_times=True),
    "state_machine": lambda rows: rows.state_machine(lambda k, v, s: (s, [])),
}


READERS = {"exchange": "out", "key_by": "out", "join across": "join"}


@pytest.mark.parametrize("case", BY_NAN)
def test_a_nan_key_is_refused_by_name(cluster, case):
    flow = Dataflow(num_shards=2)
    BY_NAN[case](flow.source(pairs)).collect()

    reader = READERS.get(case, case)
    with pytest.raises(RoutingError, match=f"were routed to '{reader}': .* got nan"):
        cluster.run(flow)


COLUMNS_BY_NAN = {
    "key_by": lambda rows: rows.key_by("k"),
    "aggregate": lambda rows: rows.aggregate("k", {"n": "count"}),
    "join": lambda rows: rows.join(rows, key="k"),
}


@pytest.mark.parametrize("add", COLUMNS_BY_NAN.values(), ids=COLUMNS_BY_NAN)
def test_a_nan_in_a_key_column_is_refused_by_name(cluster, add):
    flow = Dataflow(num_shards=2)
    rows = {"k": np.array([1.0, np.nan, np.nan]), "x": np.arange(3)}
    add(flow.source(rows, num_shards=1)).collect()

    with pytest.raises(RoutingError, match=r"got nan at row 1"):
        cluster.run(flow)


def test_rows_that_are_nan_are_told_apart_by_their_bits(cluster):
    flow = Dataflow(num_shards=2)
    rows = flow.source({"k": np.array([1.0, np.nan, 1.0, np.nan])}, num_shards=1)
    rows.distinct("k").map(lambda row: str(row["k"])).collect()

    assert sorted(cluster.run(flow)["out"]) == ["1.0", "nan"]


@pytest.mark.parametrize("as_columns", [False, True])
def test_one_hot_key_gives_the_right_answer(cluster, as_columns):
    flow = Dataflow(num_shards=4)
    if as_columns:
        rows = flow.source({"k": np.zeros(50_000, int), "x": np.arange(50_000)})
        rows.aggregate("k", {"x": ("sum", "x")}).map(
            lambda row: int(row["x"])
        ).collect()
    else:
        rows = flow.source(range(50_000))
        spread = rows.rebalance().map(lambda x: ("hot", x))
        spread.reduce(
            lambda pair: pair[0], lambda a, b: a + b, value=lambda pair: pair[1]
        ).map(lambda pair: pair[1]).collect()

    assert cluster.run(flow)["out"] == [sum(range(50_000))]


def tiny_batches(num_batches, *, in_one_epoch):
    """Blocks of one row from each of two shards, summed on the shard of their value."""

    def read(shard, count):
        for n in range(shard, num_batches, count):
            block = np.array([n])
            yield (0, block) if in_one_epoch else block

    def watch(shard, delivery):
        seen = shard.state["seen"] = shard.state.get("seen", 0) + 1
        if seen % (num_batches // 20) == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            shard.emit("resident", pages * resource.getpagesize())

    flow = Dataflow(num_shards=2)
    rows = flow.source(read)
    rows.sink(watch, name="watch")
    rows = rows.exchange(lambda block: block // 2 % 2, by_batch=True)
    sums = rows.accumulate(0, lambda total, block: total + int(block.sum()))
    sums.gather().fold(0, lambda total, n: total + n).collect()
    return flow


def check_tiny_batches(cluster, num_batches, *, in_one_epoch):
    flow = tiny_batches(num_batches, in_one_epoch=in_one_epoch)
    resident = []
    run = cluster.start(
        flow,
        timeout_s=3000,
        credit_bytes=4096,
        on_message=lambda *message: resident.append(message[-1]),
    )

    assert sum(run.result()["out"]) == num_batches * (num_batches - 1) // 2
    metrics = run.metrics()
    assert metrics["queued_bytes_peak"] <= 4096
    # What is kept of an epoch that is not complete, or of results: a few pointers each.
    assert len(resident) == 20
    assert max(resident) - min(resident) <= (64 << 20) + 400 * num_batches
    left = {name: each["state_entries"] for name, each in metrics["operators"].items()}
    left.pop("watch")
    assert sum(left.values()) <= 4  # where the source's shards are, and its columns


@pytest.mark.parametrize("in_one_epoch", [True, False])
def test_many_tiny_batches_are_only_many(cluster, in_one_epoch):
    check_tiny_batches(cluster, 5_000, in_one_epoch=in_one_epoch)


@pytest.mark.slow
@pytest.mark.parametrize("in_one_epoch", [True, False])
def test_a_million_tiny_batches_are_only_many(cluster, in_one_epoch):
    check_tiny_batches(cluster, 1_000_000, in_one_epoch=in_one_epoch)


def check_one_large_batch(cluster, size_bytes):
    """One block crosses from shard 0 to shard 1, and another from the driver."""

    def read(shard, count):
        return [np.ones((size_bytes // 4096, 512))] if shard == 0 else []

    def size(rows):
        return [(rows.nbytes, float(rows[:, -1].sum()))]

    flow = Dataflow(num_shards=2)
    rows = flow.source(read)
    rows.exchange(lambda block: np.ones(len(block), int), by_batch=True).map_batch(
        size
    ).collect("crossed")
    flow.input("fed", num_shards=1).map_batch(size).collect("received")
    run = cluster.start(flow, timeout_s=600)
    run.input("fed").send(np.ones((size_bytes // 4096, 512)))
    run.input("fed").close()

    expected = [(size_bytes, size_bytes / 4096)]
    assert dict(run.result()) == {"crossed": expected, "received": expected}


def test_one_batch_larger_than_all_credit_arrives(cluster):
    check_one_large_batch(cluster, 48 << 20)


@pytest.mark.slow
def test_one_batch_of_a_gigabyte_arrives(cluster):
    check_one_large_batch(cluster, 1 << 30)


def never_done(shard, delivery):
    """A consumer that is slower than any source: it takes its first block for ever."""
    while True:
        yield WAIT


def settled(run):
    """The figures of a run, once nothing in it moves any more."""
    seen = None
    for _ in range(200):
        run.record.wait_until(lambda: False, 0.1)
        metrics = run.metrics()
        moved = {name: each["records"] for name, each in metrics["channels"].items()}
        if moved == seen and any(moved.values()):
            return metrics
        seen = moved
    raise AssertionError(f"the run goes on and on: {seen}")


@pytest.mark.parametrize("as_columns", [False, True])
def test_a_fast_source_waits_for_a_slow_consumer(cluster, as_columns):
    def read(shard, count):
        while True:
            yield 0, np.zeros(1000, np.uint8) if as_columns else [b"x" * 1000]

    flow = Dataflow(num_shards=2)
    rows = flow.source(read).exchange(lambda row: 1)
    logic = Logic(on_batch=never_done)
    flow.operator(
        logic, inputs=[rows.map_batch(lambda rows: rows)], outputs=0, name="slow"
    )
    run = cluster.start(flow, credit_bytes=10_000)

    metrics = settled(run)
    run.cancel()

    peak, waiting = metrics["queued_bytes_peak"], metrics["bytes_waiting_for_credit"]
    assert peak <= 10_000
    # What was being sent when the credit was gone: a block of each operator and shard.
    assert waiting <= 50_000


def send_many(handle, block, count, *, timeout_s):
    for _ in range(count):
        handle.send(block, timeout_s=timeout_s)


def test_a_driver_waits_for_a_slow_consumer(cluster, monkeypatch):
    monkeypatch.setattr("timelyml.runtime.inputs.INPUT_LIMIT_BYTES", 10_000)
    flow = Dataflow()
    rows = flow.input("rows", num_shards=1)
    flow.operator(Logic(on_batch=never_done), inputs=[rows], outputs=0)
    run = cluster.start(flow, credit_bytes=10_000)
    block = np.zeros(1000, np.uint8)

    for _ in range(10):
        run.input("rows").send(block, timeout_s=20)
    with pytest.raises(DeadlineError, match="input 'rows' had no credit in time"):
        send_many(run.input("rows"), block, 30, timeout_s=0.5)
    run.cancel()


def test_a_flat_map_without_end_is_held_back_and_can_be_given_up(cluster):
    def forever(n):
        while True:
            yield b"x" * 1000

    flow = Dataflow(num_shards=2)
    many = flow.source([0]).flat_map(forever, name="forever").exchange(lambda row: 1)
    flow.operator(Logic(on_batch=never_done), inputs=[many], outputs=0)
    run = cluster.start(flow, credit_bytes=16 << 20)

    metrics = settled(run)
    run.cancel()

    assert metrics["queued_bytes_peak"] <= 16 << 20
    with pytest.raises(RunStoppedError, match="was cancelled"):
        run.result()


def doubled():
    flow = Dataflow()
    flow.source(range(5)).map(lambda n: 2 * n).collect()
    return flow


def fed():
    flow = Dataflow()
    flow.input("numbers").map(lambda n: n + 1).collect()
    return flow


def test_a_second_run_while_the_first_goes_on(cluster):
    first = cluster.start(fed())
    first.input("numbers").send([1])

    assert cluster.run(doubled())["out"] == [0, 2, 4, 6, 8]
    assert doubled().run()["out"] == [0, 2, 4, 6, 8]
    first.input("numbers").close()
    assert first.result()["out"] == [2]


@pytest.mark.parametrize("attempt", range(3))
def test_runs_of_several_threads_share_a_cluster(cluster, attempt):
    flow = Dataflow(num_shards=3)
    numbers = flow.source(range(2000), batch_size=5, epoch_every=4)
    numbers.exchange(lambda n: n).map(lambda n: 2 * n).collect()
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(sorted(cluster.run(flow)["out"])))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert found == [[2 * n for n in range(2000)]] * 4


def test_a_flow_may_run_another_in_its_own_function(cluster):
    def inner(n):
        flow = Dataflow()
        flow.source([n, n]).map(lambda m: m + 1).collect()
        return sum(flow.run()["out"])

    flow = Dataflow(num_shards=1)
    flow.source([1, 2]).map(inner).collect()

    assert cluster.run(flow)["out"] == [4, 6]


@pytest.mark.parametrize("mode", ["inline", "threads"])
def test_a_listener_that_waits_for_its_own_cluster_is_told_so(mode):
    flow = Dataflow()
    flow.source([1]).sink(lambda shard, delivery: shard.emit("got", 1))
    with Cluster(1, mode=mode) as cluster:

        def listen(*_):
            doubled().run(cluster=cluster)

        with pytest.raises(
            OperatorError, match=r"ReentryError.* waits for itself"
        ) as got:
            flow.run(cluster=cluster, on_message=listen)
        assert isinstance(got.value.__cause__, ReentryError)
        assert doubled().run(cluster=cluster)["out"] == [0, 2, 4, 6, 8]


def test_a_listener_may_cancel_its_run(cluster):
    def read(shard, count):
        while True:
            yield [shard]

    flow = Dataflow()
    flow.source(read).sink(lambda shard, delivery: shard.emit("got", delivery.time))
    runs = []
    ready = threading.Event()

    def listen(*_):
        ready.wait(20)
        runs[0].cancel()

    runs.append(cluster.start(flow, on_message=listen))
    ready.set()

    with pytest.raises(RunStoppedError, match="was cancelled"):
        runs[0].result()


def next_of_none(_):
    return next(iter(()))


@pytest.mark.parametrize(
    "use",
    [
        lambda stream: stream.map(next_of_none),
        lambda stream: stream.filter(next_of_none),
        lambda stream: stream.flat_map(next_of_none),
        lambda stream: stream.count(next_of_none),
        lambda stream: stream.reduce(next_of_none, max),
        lambda stream: stream.distinct(next_of_none),
        lambda stream: stream.exchange(next_of_none).map(abs),
    ],
    ids=["map", "filter", "flat_map", "count", "reduce", "distinct", "exchange"],
)
def test_a_function_that_raises_stop_iteration_ends_no_block_silently(cluster, use):
    flow = Dataflow()
    use(flow.source(range(2000), batch_size=2000)).collect()

    with pytest.raises(TimelyError, match=r"failed on worker .*StopIteration"):
        cluster.run(flow)
