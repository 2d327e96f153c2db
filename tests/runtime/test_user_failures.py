"""What user code may do wrong: it fails its own run, by name, and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from timelyml import Cluster, Dataflow
from timelyml.errors import OperatorError
from timelyml.runtime.operator import Logic

TIMEOUT_S = 30.0


class LeavingError(BaseException):
    """What `except Exception` does not catch."""


def flow_of(fn, data=range(4), *, num_shards=2):
    """source -> spread over workers -> fn -> 'out'"""
    flow = Dataflow(num_shards=num_shards)
    flow.source(data).exchange(lambda x: x).map(fn, name="work").collect()
    return flow


def check_usable(cluster):
    """Later runs of the same workers are as if nothing had happened."""
    result = cluster.run(flow_of(lambda x: x + 1))
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
