"""Feeding a run and watching it: input handles, probes, collected results."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from timelyml import Dataflow
from timelyml.errors import GraphError, OperatorError


def test_what_is_sent_comes_out_at_the_epoch_of_the_handle(cluster):
    flow = Dataflow()
    flow.input("numbers").collect()

    with cluster.start(flow) as run:
        handle = run.input("numbers")
        handle.send([1, 2])
        handle.advance_to(3)
        handle.send(np.arange(2))
    found = run.result().batches("out")
    assert [(time, list(payload)) for time, payload in found] == [
        (0, [1, 2]),
        (3, [0, 1]),
    ]


def test_the_shards_of_an_input_take_turns(cluster):
    def tag(shard, delivery):
        shard.output().send(delivery.time, [(shard.index, r) for r in delivery.payload])

    flow = Dataflow()
    flow.input("numbers", num_shards=3).unary(tag).collect()

    with cluster.start(flow) as run:
        for n in range(7):
            run.input("numbers").send([n])
    assert Counter(run.result()["out"]) == Counter((n % 3, n) for n in range(7))


def test_advancing_reaches_every_shard_of_an_input(cluster):
    flow = Dataflow()
    flow.input("numbers", num_shards=5).exchange(lambda n: n).map(str).probe("end")

    with cluster.start(flow) as run:
        for epoch in range(3):
            run.input("numbers").advance_to(epoch + 1)
            run.probe("end").wait_until(epoch, timeout_s=10)


def test_flush_returns_when_the_input_took_everything(cluster):
    flow = Dataflow()
    flow.input("numbers").collect()

    with cluster.start(flow) as run:
        run.input("numbers").send([1, "two", 3.0, None, ("a", b"b")])
        run.input("numbers").flush(timeout_s=10)


def test_inputs_are_closed_where_nobody_can_send(cluster):
    flow = Dataflow()
    flow.input("numbers").concat(flow.source([1])).count().collect()

    assert cluster.run(flow)["out"] == [1]


def test_stop_closes_inputs_and_keeps_what_was_sent(cluster):
    flow = Dataflow()
    flow.input("numbers").fold(0, lambda a, n: a + n).collect()

    run = cluster.start(flow)
    run.input("numbers").send([1, 2, 3])
    run.stop(timeout_s=10)
    assert sum(run.result()["out"]) == 6


def test_a_probe_passes_a_time_only_when_its_records_were_processed(cluster):
    flow = Dataflow(num_shards=2)
    spread = flow.input("numbers", num_shards=1).exchange(lambda n: n)
    spread.map(lambda n: n + 1).probe("processed").collect()

    with cluster.start(flow) as run:
        handle, probe = run.input("numbers"), run.probe("processed")
        for epoch in range(5):
            assert probe.less_equal(epoch)
            handle.send([epoch, epoch + 1])
            handle.advance_to(epoch + 1)
            probe.wait_until(epoch, timeout_s=10)
            assert not probe.less_equal(epoch)
            assert run.batches("out")[-1][0] == epoch
    assert probe.done


def test_probe_passes_its_stream_on_routing_and_all(cluster):
    flow = Dataflow(num_shards=3)
    routed = flow.source(range(6)).exchange(lambda n: n).probe()
    routed.fold(0, lambda a, n: a + n).collect()

    assert sorted(cluster.run(flow)["out"]) == [3, 5, 7]


def test_collected_records_come_in_the_order_of_times_then_shards(cluster):
    flow = Dataflow(num_shards=4)
    flow.source(lambda shard, _: [[(e, shard)] for e in range(3)]).collect()

    assert cluster.run(flow)["out"] == [(e, s) for e in range(3) for s in range(4)]


def test_collect_keeps_columns(cluster):
    flow = Dataflow(num_shards=1)
    flow.source({"x": np.arange(3, dtype=np.int16)}).collect()

    ((time, payload),) = cluster.run(flow).batches("out")
    assert (time, payload["x"].tolist(), payload["x"].dtype) == (0, [0, 1, 2], np.int16)


def test_several_streams_are_collected_under_their_names(cluster):
    flow = Dataflow()
    source = flow.source([1]).collect("first")
    source.map(str).collect("second")

    assert dict(cluster.run(flow)) == {"first": [1], "second": ["1"]}


def test_two_collects_of_one_name_are_refused():
    flow = Dataflow()
    stream = flow.source([1]).collect("same")

    with pytest.raises(GraphError, match="two operators of one name; got 'same'"):
        stream.map(str).collect("same")


def test_an_epoch_that_fails_is_not_collected_in_part(cluster):
    def fail_at_five(n):
        if n == 5:
            raise ValueError(n)
        return n

    flow = Dataflow(num_shards=1)
    stream = flow.input("numbers")
    stream.map(fail_at_five).probe("seen").collect()

    run = cluster.start(flow)
    handle = run.input("numbers")
    handle.send([1, 2])
    handle.advance_to(1)
    run.probe("seen").wait_until(0, timeout_s=10)
    handle.send([3])
    handle.flush(timeout_s=10)
    handle.send([5])
    with pytest.raises(OperatorError, match="at time 1"):
        run.result(timeout_s=10)
    assert run.batches("out") == [(0, [1, 2])]
