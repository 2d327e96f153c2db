"""What user code may do wrong: it fails its own run, by name, and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading

import pytest

from tests.runtime import scripts
from timelyml import Cluster, Dataflow
from timelyml.errors import OperatorError, PayloadError, ShippingError
from timelyml.runtime.operator import Logic

TIMEOUT_S = 30.0


class LeavingError(BaseException):
    """What `except Exception` does not catch."""


class Sticky:
    """Pickles, and does not come back."""

    def __init__(self, x):
        self.x = x

    def __setstate__(self, state):
        raise LookupError("does not come back")


class Exiting:
    """Pickles, and exits when it comes back."""

    def __reduce__(self):
        return sys.exit, ("does not come back",)


class OddKey:
    """Comes back, and then cannot be a key."""

    is_back = False

    def __setstate__(self, state):
        self.is_back = True

    def __getstate__(self):
        return {"is_back": True}

    def __hash__(self):
        if self.is_back:
            raise LookupError("does not come back")
        return 1


class ExitingError(Exception):
    """An exception that exits when it comes back."""

    def __reduce__(self):
        return sys.exit, (3,)


class Locked:
    """Does not pickle, and exits when it is asked to."""

    def __reduce__(self):
        sys.exit("does not pickle")


def flow_of(fn, data=range(4), *, num_shards=2):
    """source -> spread over workers -> fn -> 'out'"""
    flow = Dataflow(num_shards=num_shards)
    flow.source(data).exchange(lambda x: x).map(fn, name="work").collect()
    return flow


@pytest.fixture(scope="module")
def processes():
    with Cluster(2) as cluster:
        ids = worker_ids(cluster)
        yield cluster
        assert worker_ids(cluster) == ids


def worker_ids(cluster):
    graph = flow_of(lambda x: (x % 2, os.getpid())).build()
    return dict(sorted(cluster.run(graph, timeout_s=TIMEOUT_S)["out"]))


def check_usable(cluster):
    """Later runs of the same workers are as if nothing had happened."""
    flow = flow_of(lambda x: x + 1)
    result = cluster.run(flow.build() if isinstance(cluster, Cluster) else flow)
    assert sorted(result["out"]) == [1, 2, 3, 4]


def raising(error):
    def work(x):
        if x == 3:
            raise error
        return x

    return work


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        asyncio.CancelledError("mine"),
        GeneratorExit("mine"),
        KeyboardInterrupt("mine"),
        LeavingError("mine"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_no_ordinary_exception_fails_the_operator_as_any_other(cluster, error):
    run = cluster.start(flow_of(raising(error)))
    kind = type(error).__name__
    match = rf"'work' failed on worker \d, shard 1, at time 0: {kind}: {error}"
    with pytest.raises(OperatorError, match=match) as got:
        run.result(TIMEOUT_S)
    assert got.value.worker == (1 if cluster.num_workers == 2 else 0)
    assert type(got.value.__cause__).__name__ == kind
    assert "raise error" in got.value.traceback_text
    check_usable(cluster)


def test_ctrl_c_in_the_calling_thread_is_still_ctrl_c():
    with Cluster(1, mode="inline") as cluster:
        with pytest.raises(KeyboardInterrupt):
            cluster.run(flow_of(raising(KeyboardInterrupt())).build())
        assert sorted(cluster.run(flow_of(lambda x: x).build())["out"]) == [0, 1, 2, 3]


def test_an_exit_of_the_programs_own_signal_handler_ends_the_program():
    def leave(*_):
        raise SystemExit(5)

    before = signal.signal(signal.SIGUSR1, leave)
    flow = flow_of(lambda x: os.kill(os.getpid(), signal.SIGUSR1))
    try:
        with pytest.raises(SystemExit, match="5"):
            flow.run()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_exit_when_an_operator_closes_is_told_and_ends_nothing(cluster):
    def on_close():
        raise SystemExit("mine")

    flow = Dataflow()
    logic = Logic(on_batch=lambda shard, delivery: None, on_close=on_close)
    flow.operator(logic, inputs=[flow.source([1])], num_outputs=0, name="closer")
    cluster.run(flow)
    check_usable(cluster)


BAD_RECORDS = pytest.mark.parametrize(
    ("make", "kind"),
    [
        (Sticky, LookupError),
        (lambda x: Exiting(), SystemExit),
        (lambda x: (x, {"deep": [Sticky(x)]}), LookupError),
        (lambda x: {OddKey(): x}, LookupError),
        (lambda x: {OddKey()}, LookupError),
    ],
    ids=["setstate", "exit", "deep", "key", "member"],
)


@BAD_RECORDS
@pytest.mark.parametrize("count", [1, 20])
def test_a_record_that_does_not_unpickle_fails_its_reader_and_no_link(
    processes, make, kind, count
):
    flow = Dataflow(num_shards=2)
    made = flow.source(range(count), num_shards=1).map(make, name="make")
    made.exchange(lambda record: 1, num_shards=2).map(
        lambda record: 0, name="read"
    ).collect()
    match = (
        r"'read' cannot unpickle what 'make' sent from worker 0, shard 0, on worker 1, "
        rf"shard 1, at time 0: {kind.__name__}: does not come back"
    )
    with pytest.raises(OperatorError, match=match) as got:
        processes.run(flow.build(), timeout_s=TIMEOUT_S)
    assert isinstance(got.value.__cause__, kind)
    assert "does not come back" in got.value.traceback_text
    check_usable(processes)


def test_other_runs_of_the_same_links_go_on_while_one_loses_a_record(processes):
    other = Dataflow(num_shards=2)
    other.input("in").exchange(lambda x: x).collect()
    with processes.start(other.build()) as run:
        run.input("in").send([0, 1])
        bad = Dataflow(num_shards=2)
        bad.source([1], num_shards=1).map(Sticky).exchange(
            lambda x: 1, num_shards=2
        ).collect()
        with pytest.raises(LookupError, match="does not come back"):
            processes.run(bad.build(), timeout_s=TIMEOUT_S)
        run.input("in").send([2, 3])
    assert sorted(run.result()["out"]) == [0, 1, 2, 3]


@BAD_RECORDS
def test_what_the_driver_sends_and_no_worker_unpickles_fails_its_input(
    processes, make, kind
):
    flow = Dataflow()
    flow.input("in").map(lambda x: x).collect()
    run = processes.start(flow.build(), timeout_s=TIMEOUT_S)
    run.input("in").advance_to(5)
    run.input("in").send([make(1)])
    match = (
        r"'in' cannot unpickle what the driver sent on worker 0, shard 0, at time 5: "
        rf"{kind.__name__}: does not"
    )
    with pytest.raises(OperatorError, match=match):
        run.result(TIMEOUT_S)
    check_usable(processes)


@BAD_RECORDS
def test_what_the_driver_does_not_unpickle_fails_the_operator_that_sent_it(
    processes, make, kind
):
    flow = Dataflow()
    flow.source([1]).map(make).collect("made")
    match = (
        r"'made' sent what the driver cannot unpickle on worker 0, shard 0, at time 0: "
        rf"{kind.__name__}: does not"
    )
    with pytest.raises(OperatorError, match=match):
        processes.run(flow.build(), timeout_s=TIMEOUT_S)
    check_usable(processes)


def test_a_message_that_the_driver_does_not_unpickle_fails_its_operator(processes):
    flow = Dataflow()
    flow.source([1]).sink(lambda shard, _: shard.emit("x", Sticky(1)), name="tell")
    with pytest.raises(
        LookupError, match="'tell' sent what the driver cannot unpickle"
    ):
        processes.run(flow.build(), timeout_s=TIMEOUT_S, on_message=print)
    check_usable(processes)


def test_an_exception_that_exits_where_it_comes_back_fails_the_operator(cluster):
    def fail(x):
        raise ExitingError("mine")

    run = cluster.start(flow_of(fail))
    with pytest.raises(OperatorError, match=r"'work' failed on .*: ExitingError: mine"):
        run.result(TIMEOUT_S)
    check_usable(cluster)


@pytest.mark.parametrize("make", [lambda x: threading.Lock(), lambda x: Locked()])
def test_a_record_that_does_not_pickle_fails_the_operator_that_sent_it(processes, make):
    flow = Dataflow(num_shards=2)
    made = flow.source([1], num_shards=1).map(make, name="make")
    made.exchange(lambda record: 1, num_shards=2).map(
        lambda record: 0, name="read"
    ).collect()
    match = r"'make' cannot send a record to 'read' on worker 0, shard 0, at time 0: .*"
    with pytest.raises(PayloadError, match=match + "pickle") as got:
        processes.run(flow.build(), timeout_s=TIMEOUT_S)
    assert isinstance(got.value, OperatorError)
    check_usable(processes)


@pytest.mark.parametrize("make", [lambda x: threading.Lock(), lambda x: Locked()])
def test_what_the_driver_cannot_pickle_fails_its_input(processes, make):
    flow = Dataflow()
    flow.input("in").collect()
    run = processes.start(flow.build(), timeout_s=TIMEOUT_S)
    run.input("in").send([make(1)])
    match = r"'in' cannot be sent a record on worker 0, shard 0, at time 0: .* pickle"
    with pytest.raises(PayloadError, match=match):
        run.result(TIMEOUT_S)
    check_usable(processes)


def test_a_record_that_was_spilled_and_does_not_unpickle_fails_its_reader(cluster):
    flow = Dataflow(num_shards=1)
    numbers = flow.source(range(40), batch_size=1)
    numbers.map(Sticky).iterate(
        lambda s: s.map(lambda x: x, name="again"), max_iterations=3
    ).collect()
    run = cluster.start(flow, loop_budget_bytes=1)
    with pytest.raises(
        OperatorError, match=r"failed on worker 0: .*does not come back"
    ):
        run.result(TIMEOUT_S)
    check_usable(cluster)


def test_a_listener_that_exits_ends_its_run_only(cluster):
    flow = Dataflow()
    flow.source([1]).sink(lambda shard, _: shard.emit("x", 1))
    run = cluster.start(flow, on_message=lambda *_: sys.exit("mine"))
    with pytest.raises(OperatorError, match="on_message failed: SystemExit: mine"):
        run.result(TIMEOUT_S)
    check_usable(cluster)


@pytest.mark.parametrize("value", [Sticky(1), Exiting()], ids=["setstate", "exit"])
def test_a_captured_value_that_does_not_come_back_names_its_operator(cluster, value):
    run = cluster.start(flow_of(lambda x: value))
    match = (
        r"operator 'work' cannot be rebuilt in this worker; got .*: does not come back"
    )
    with pytest.raises(ShippingError, match=match):
        run.result(TIMEOUT_S)
    check_usable(cluster)


def test_a_key_function_that_raises_names_who_sent_whereto_and_when(cluster):
    flow = Dataflow(num_shards=2)
    source = flow.source(range(6), batch_size=1, epoch_every=1, num_shards=1)
    source.exchange(lambda x: 1 // (x - 4)).collect()
    match = (
        "'source' failed on worker 0, shard 0, at time 4, "
        "while rows were routed to 'out': ZeroDivisionError"
    )
    with pytest.raises(ZeroDivisionError, match=match) as got:
        cluster.run(flow)
    assert "raised while rows were routed to 'out'" in got.value.traceback_text
    check_usable(cluster)


def test_a_full_disk_fails_the_run_that_spills_and_the_worker_goes_on(tmp_path):
    code = (
        "import resource\n"
        "from timelyml import Cluster, Dataflow\n"
        "def fill(x):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "    return x\n"
        "def flow(fn):\n"
        "    flow = Dataflow(num_shards=1)\n"
        "    numbers = flow.source(range(4000), batch_size=1).map(fn)\n"
        "    numbers.iterate(lambda s: s.map(fn, name='again'), max_iterations=3)"
        ".collect()\n"
        "    return flow.build()\n"
        "for options in ({'mode': 'inline'}, {'mode': 'processes'}):\n"
        "    with Cluster(1, **options) as cluster:\n"
        "        try:\n"
        "            cluster.run(flow(fill), loop_budget_bytes=10)\n"
        "        except Exception as error:\n"
        "            print(error)\n"
        "        print(len(cluster.run(flow(lambda x: x))['out']))\n"
    )
    code, out, err = scripts.run(code, cwd=tmp_path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[1::2] == ["4000", "4000"]
    for line in lines[::2]:
        assert "'again' cannot spill what waits for it in a loop; got File too" in line
