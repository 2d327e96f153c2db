"""Operators that wait for other threads, and free what they have outside of state."""

from __future__ import annotations

import threading

import pytest

from timelyml import Dataflow
from timelyml.errors import RunStoppedError
from timelyml.operators import OperatorBuilder
from timelyml.runtime.operator import WAIT, Logic
from timelyml.testing import eventually


def answer_later(shard, answers, delay_s=0.02):
    wake = shard.waker()

    def answer():
        answers.append("answer")
        wake()

    threading.Timer(delay_s, answer).start()


def test_a_generator_that_waits_goes_on_once_another_thread_wakes_its_shard(cluster):
    def ask(shard, delivery):
        answers = []
        num_steps = 0
        answer_later(shard, answers)
        while not answers:
            num_steps += 1
            yield WAIT
        shard.output().send(delivery.time, [num_steps])

    flow = Dataflow()
    flow.source([1]).unary(ask).collect()

    assert cluster.run(flow)["out"] == [1]


def test_an_operator_that_waits_keeps_no_other_from_working(cluster):
    def hold(shard, delivery):
        while not shard.state.get("is_let_go"):
            yield WAIT
        shard.output().send(delivery.time, delivery.payload)

    flow = Dataflow(num_shards=1)
    flow.source(["late"]).unary(hold).collect()
    flow.source(range(50), batch_size=1, epoch_every=1).map(str).probe("others")

    run = cluster.start(flow)
    run.probe("others").wait_until(49, timeout_s=10)
    assert not run.done()
    run.cancel()


def test_what_waits_takes_nothing_in(cluster):
    def hold(shard, delivery):
        while True:
            yield WAIT

    flow = Dataflow(num_shards=1)
    endless = flow.source(lambda shard, _: iter(lambda: [b"x" * 1000], None))
    endless.unary(hold)

    run = cluster.start(flow, credit_bytes=10_000, max_epochs_ahead=1000)

    def peaks():
        workers = run.metrics()["workers"].values()
        return [worker["queued_bytes_peak"] for worker in workers]

    assert eventually(lambda: max(peaks(), default=0) > 0)
    run.metrics()  # by the second answer they have gone on for as long as they can
    assert max(peaks()) <= 12_000
    run.cancel()


class Resource:
    """Notes in a file that its worker closed it."""

    def __init__(self, path):
        self.path = path

    def __call__(self, shard):
        pass

    def close(self):
        with self.path.open("a") as file:
            file.write("closed\n")


@pytest.mark.parametrize("way", ["complete", "cancelled", "failed"])
def test_every_worker_closes_each_operator_once_however_the_run_ends(
    cluster, tmp_path, way
):
    resource = Resource(tmp_path / "notes")
    flow = Dataflow()
    builder = OperatorBuilder(flow.builder, "resource")
    builder.add_input(
        flow.source([0], num_shards=1)
        .map(lambda n: 1 // n if way == "failed" else n)
        .ref
    )
    builder.build(Logic(on_start=resource, on_close=resource.close))
    flow.input("gate")

    run = cluster.start(flow)
    if way == "complete":
        run.input("gate").close()
        run.result()
    elif way == "cancelled":
        run.cancel()
        with pytest.raises(RunStoppedError, match="cancelled"):
            run.result()
    else:
        with pytest.raises(ZeroDivisionError, match="division"):
            run.result()
    cluster.check_nothing_left()
    assert resource.path.read_text() == "closed\n" * cluster.num_workers
