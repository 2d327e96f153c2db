"""Scripted sources: ends, failures and pauses, the same on any number of workers."""

from __future__ import annotations

import gc
import tempfile

import numpy as np
import pytest

from timelyml import Dataflow
from timelyml.errors import ConfigError, OperatorError, PayloadError
from timelyml.testing import ABORT, EOF, PAUSE, AbortedError, FlowTester, scripted
from timelyml.testing.script import Script


def flow_of(*steps):
    flow = Dataflow()
    scripted(flow, *steps).probe("at").collect()
    return flow


def test_each_payload_is_an_epoch_of_its_shard(cluster):
    flow = flow_of([[1, 2], [3]], [[10], [20], [30]], [])
    found = cluster.run(flow).batches("out")
    assert found == [(0, [1, 2]), (0, [10]), (1, [3]), (1, [20]), (2, [30])]


def test_epochs_can_be_named(cluster):
    flow = flow_of([(2, [1]), (2, [2]), (5, [3])])
    assert cluster.run(flow).batches("out") == [(2, [1]), (2, [2]), (5, [3])]


def test_columns_can_be_sent(cluster):
    flow = flow_of([{"x": np.arange(2)}])
    ((time, payload),) = cluster.run(flow).batches("out")
    assert (time, payload["x"].tolist()) == (0, [0, 1])


def test_eof_ends_its_own_shard_only(cluster):
    flow = flow_of([[1], EOF, [2]], [[10], [20], [30]])
    assert cluster.run(flow)["out"] == [1, 10, 20, 30]


def test_eof_may_come_first(cluster):
    assert cluster.run(flow_of([EOF, [1]]))["out"] == []


def test_abort_fails_the_run_on_every_worker_and_whole_epochs_stay(cluster):
    steps = [[[n]] for n in range(2)]
    flow = flow_of([*steps[0], ABORT, [2]], [*steps[1], PAUSE(600), [3]])
    run = cluster.start(flow)
    with pytest.raises(AbortedError, match="aborts on shard 0, as its script says"):
        run.result()
    assert isinstance(run.record.error, OperatorError)
    assert {time for time, _ in run.batches("out")} <= {0}


def test_a_later_run_goes_on_behind_an_abort(cluster):
    flow = flow_of([[1], ABORT, [2], ABORT, [3]])
    for _ in range(2):
        with pytest.raises(AbortedError, match="as its script says"):
            cluster.run(flow)
    assert cluster.run(flow)["out"] == [1, 2, 3]


def test_nothing_is_left_of_a_script_once_it_is_gone(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    flow = flow_of([ABORT])
    with pytest.raises(AbortedError, match="as its script says"):
        flow.run()
    assert list(tmp_path.glob("timelyml-script-*"))

    del flow
    gc.collect()
    assert not list(tmp_path.glob("timelyml-script-*"))


def test_a_pause_lets_others_work(cluster):
    flow = flow_of([[1], PAUSE(600)], [[10], [20]])
    run = cluster.start(flow)
    assert run.record.wait_until(lambda: run.probe("at").frontier == (1,), 20)
    assert run.batches("out") == [(0, [1]), (0, [10])]
    run.cancel()


def test_a_pause_is_as_long_as_it_says():
    flow = flow_of([[1], PAUSE(3.0), [2]])
    with FlowTester(2) as tester:
        run = tester.start(flow)
        tester.advance(2.5)
        assert run.batches("out") == [(0, [1])]
        tester.advance(1.0)
        assert run.result()["out"] == [1, 2]


class FakeShard:
    operator = "scripted"
    num_shards = 1
    index = 0

    def __init__(self):
        self.time = 0.0

    def now(self):
        self.time += 1.0
        return self.time


def read(steps, position):
    pieces = Script([steps]).pieces(FakeShard(), position)
    return [(piece.epoch, piece.payload) for piece in pieces if piece is not None]


@pytest.mark.parametrize(
    ("position", "rest"),
    [
        ((0, 0), [(0, [1])]),
        ((1, 1), [(1, [2])]),  # it ended at the first EOF, and goes on behind it
        ((2, 2), [(2, [3]), (3, [4])]),
        ((4, 4), []),
    ],
)
def test_a_run_that_resumes_goes_on_behind_the_end_that_it_came_to(position, rest):
    assert read([[1], EOF, [2], EOF, PAUSE(2), [3], [4]], position) == rest


def test_a_script_must_have_steps():
    with pytest.raises(ConfigError, match="'scripted' has no script"):
        scripted(Dataflow())


@pytest.mark.parametrize("step", [7, (3, 7), "text"])
def test_a_step_that_is_no_payload_is_refused_at_the_call(step):
    with pytest.raises(PayloadError, match="payload"):
        scripted(Dataflow(), [[1], step])
