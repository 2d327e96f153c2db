"""Operators whose callbacks the user writes, and what is promised to them."""

from __future__ import annotations

import itertools
import queue
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from timelyml import Dataflow, Exchange, Logic, Pipeline, Summary
from timelyml.errors import GraphError, OperatorError, TimeError
from timelyml.progress import less_equal
from timelyml.runtime.operator import CALLBACKS
from timelyml.testing import FlowTester


def test_unary_sees_time_port_payload_and_producer(cluster):
    def note(shard, delivery):
        what = delivery.time, delivery.port, delivery.source_shard, delivery.weight
        shard.output().send(delivery.time, [(shard.index, *what, *delivery.payload)])

    flow = Dataflow(num_shards=3)
    stream = flow.source(lambda shard, _: [[], [shard]] if shard else [])
    stream.unary(note, pact=Exchange.by_key(lambda n: n + 1)).collect()

    assert sorted(cluster.run(flow)["out"]) == [(0, 1, 0, 2, 1, 2), (2, 1, 0, 1, 1, 1)]


def test_unary_keeps_state_between_blocks(cluster):
    def running_total(shard, delivery):
        total = shard.state.get("total", 0)
        for n in delivery.payload:
            total += n
        shard.state["total"] = total
        shard.output().send(delivery.time, [total])

    flow = Dataflow(num_shards=2)
    stream = flow.source(range(20), batch_size=4, epoch_every=1)
    stream.exchange(lambda n: 0).unary(running_total).collect()

    sums = np.cumsum(np.arange(20)).tolist()
    assert cluster.run(flow)["out"] == sums[3::4]


def test_unary_may_be_a_generator_that_lets_others_run(cluster):
    def slowly(shard, delivery):
        for n in delivery.payload:
            shard.output().send(delivery.time, [n])
            yield

    flow = Dataflow(num_shards=1)
    flow.source(range(50), batch_size=10).unary(slowly).collect()

    assert cluster.run(flow)["out"] == list(range(50))


def yield_records(shard, delivery):
    yield delivery.payload[0]


@pytest.mark.parametrize(
    ("on_batch", "what"),
    [
        (lambda shard, delivery: 3, "returned something that is no step; got 3"),
        (lambda shard, delivery: [1, 2], r"returned .* got \[1, 2\]; expected None"),
        (yield_records, "yielded something that is no step; got 7"),
    ],
)
def test_what_is_returned_or_yielded_in_place_of_sending_is_refused(
    cluster, on_batch, what
):
    flow = Dataflow()
    flow.source([7]).unary(on_batch, name="mine").collect()

    with pytest.raises(TypeError, match=f"operator 'mine' {what}"):
        cluster.run(flow)


def test_state_must_be_declared(cluster):
    flow = Dataflow()
    flow.source([1]).unary(lambda shard, _: shard.state_of("other") and None).collect()

    with pytest.raises(OperatorError, match="no state of that name; got 'other'"):
        cluster.run(flow)


def test_states_of_several_names_are_kept_apart(cluster):
    def note(shard, delivery):
        shard.state_of("left")["x"] = 1
        assert "x" not in shard.state_of("right")
        shard.output().send(delivery.time, ["apart"])

    flow = Dataflow()
    flow.source([1]).unary(note, states=["left", "right"]).collect()

    assert cluster.run(flow)["out"] == ["apart"]


def test_sending_at_an_earlier_time_is_refused(cluster):
    def back(shard, delivery):
        shard.output().send(delivery.time - 1, delivery.payload)

    flow = Dataflow()
    stream = flow.source(range(2), batch_size=1, epoch_every=1)
    stream.filter(bool).unary(back, name="back").collect()

    with pytest.raises(OperatorError, match="'back' shard 0 may not send on output 0"):
        cluster.run(flow)


@pytest.mark.parametrize("use", ["send", "retain", "notify_at", "delayed"])
@pytest.mark.parametrize("time", [np.int64(3), 3.0, (3, 0), True, "3", 2**63])
def test_what_is_no_timestamp_is_refused(use, time):
    def on_batch(shard, delivery):
        if use == "send":
            shard.output().send(time, [1])
        elif use == "delayed":
            shard.retain(delivery.time).delayed(time)
        else:
            getattr(shard, use)(time)

    flow = Dataflow()
    flow.source([1]).unary(on_batch, name="mine").collect()

    with pytest.raises(TimeError, match=r"no such timestamp; got .*; expected an int"):
        flow.run()


def test_a_source_that_begins_before_all_time_is_refused():
    def on_start(shard):
        shard.retain(-1)

    flow = Dataflow()
    (out,) = flow.operator(Logic(on_start=on_start), is_source=True, name="mine")
    out.collect()

    with pytest.raises(
        OperatorError, match=r"'mine' shard 0 may not retain .*got time -1"
    ):
        flow.run()


def test_sending_at_a_later_time_is_allowed_and_held_for(cluster):
    def later(shard, delivery):
        shard.output().send(delivery.time + 10, delivery.payload)

    flow = Dataflow(num_shards=1)
    flow.source([1]).unary(later).count().collect()

    assert cluster.run(flow).batches("out") == [(10, [1])]


def test_unary_frontier_holds_records_until_no_more_can_come(cluster):
    def keep(shard, delivery):
        held = shard.state.setdefault(delivery.time, [])
        if not held:
            held.append(shard.retain(delivery.time))
        held.append(sorted(delivery.payload))

    def release(shard):
        frontier = shard.frontier()
        for time in sorted(t for t in shard.state if not frontier.less_equal(t)):
            capability, *payloads = shard.state.pop(time)
            with capability:
                shard.output().send(
                    time, sorted(itertools.chain.from_iterable(payloads))
                )

    flow = Dataflow(num_shards=2)
    stream = flow.source(range(24), batch_size=2, epoch_every=3)
    stream.exchange(lambda n: n).unary_frontier(keep, release).collect()

    found = defaultdict(list)
    for time, payload in cluster.run(flow).batches("out"):
        found[time].append(payload)
    expected = {
        time: [list(range(6 * time + shard, 6 * time + 6, 2)) for shard in range(2)]
        for time in range(4)
    }
    assert found == expected


def test_a_forgotten_capability_is_explained(cluster):
    def forget(shard, delivery):
        shard.state["mine"] = shard.retain(delivery.time)

    flow = Dataflow()
    flow.source([1]).unary(forget, name="hoarder").probe("end")

    run = cluster.start(flow)
    with pytest.raises(Exception, match=r"(?s)did not pass time 0.*hoarder.*forget"):
        run.probe("end").wait_until(0, timeout_s=0.3)
    run.cancel()


def test_unary_notify_is_told_once_per_time_with_everything(cluster):
    def keep(shard, delivery):
        shard.state.setdefault(delivery.time, []).extend(delivery.payload)
        shard.notify_at(delivery.time)
        shard.notify_at(delivery.time)

    def tell(shard, time):
        shard.output().send(time, [sorted(shard.state.pop(time))])

    flow = Dataflow(num_shards=3)
    stream = flow.source(lambda shard, _: [[(e, shard)] for e in range(4)])
    stream.gather().unary_notify(keep, tell).collect()

    expected = [(e, [[(e, s) for s in range(3)]]) for e in range(4)]
    assert cluster.run(flow).batches("out") == expected


def test_a_notification_may_ask_for_a_later_one(cluster):
    def begin(shard, delivery):
        shard.notify_at(delivery.time)

    def again(shard, time):
        shard.output().send(time, [time])
        if time < 3:
            shard.notify_at(time + 1)

    flow = Dataflow(num_shards=1)
    flow.source(["go"]).unary_notify(begin, again).collect()

    assert cluster.run(flow)["out"] == [0, 1, 2, 3]


def test_a_notification_before_the_delivery_is_refused(cluster):
    flow = Dataflow(num_shards=1)
    stream = flow.source(range(2), batch_size=1, epoch_every=1).filter(bool)
    stream.unary_notify(
        lambda shard, d: shard.notify_at(d.time - 1), lambda shard, time: None
    ).collect()

    with pytest.raises(OperatorError, match="may not be notified at 0"):
        cluster.run(flow)


@pytest.mark.parametrize("in_order", [False, True])
def test_notifications_in_a_loop_extend_the_partial_order(cluster, in_order):
    def begin(shard, delivery):
        shard.state.setdefault("log", [])
        shard.notify_at(delivery.time)
        shard.output().send(delivery.time, [n - 1 for n in delivery.payload if n > 1])

    def note(shard, time):
        shard.emit("notified", time)

    def body(stream):
        again = stream.unary_notify(begin, note, in_order=in_order)
        return again, again

    told = []
    flow = Dataflow(num_shards=1)
    flow.source([3, 5, 1], batch_size=1, epoch_every=1).iterate(body).collect()

    run = cluster.start(flow, on_message=lambda op, shard, tag, time: told.append(time))
    run.result()
    expected = {(e, i) for e, n in enumerate([3, 5, 1]) for i in range(n)}
    assert set(told) == expected
    assert len(told) == len(expected)
    for index, time in enumerate(told):
        assert not any(less_equal(later, time) for later in told[index + 1 :])
    if in_order:
        assert told == sorted(expected)


@pytest.mark.parametrize("seed", range(20))
def test_in_order_a_loop_tells_all_rounds_of_an_epoch_before_the_next(seed):
    def begin(shard, delivery):
        shard.notify_at(delivery.time)
        shard.output().send(delivery.time, [n - 1 for n in delivery.payload if n > 1])

    def note(shard, time):
        shard.emit("notified", (shard.index, time))

    def body(stream):
        again = stream.exchange(int).unary_notify(begin, note, in_order=True)
        return again, again

    told = []
    flow = Dataflow(num_shards=2)
    flow.source([6, 5, 8], batch_size=1, epoch_every=1).iterate(body).collect()
    with FlowTester(2, seed=seed) as tester:
        tester.run(flow, on_message=lambda *message: told.append(message[-1]))
    assert len(told) == 6 + 5 + 8
    for shard in (0, 1):
        times = [time for index, time in told if index == shard]
        assert times == sorted(times)


def test_in_order_an_earlier_block_of_a_dense_edge_is_waited_for():
    def on_batch(shard, delivery):
        held = shard.state
        if delivery.time == 0:
            held[0] = shard.retain(0)
            return
        shard.output().send(delivery.time, [delivery.time])
        if delivery.time == 2:
            with held.pop(0) as capability:
                shard.output().send(capability.time, [0])

    def keep(shard, delivery):
        shard.notify_at(delivery.time)

    told = []
    flow = Dataflow(num_shards=1)
    stream = flow.source(lambda shard, _: [[0], [1], *[None] * 9, [2]], regular=True)
    late = stream.unary(on_batch, pact=Pipeline(dense=True), regular=True)
    late.unary_notify(
        keep,
        lambda shard, time: shard.emit("notified", time),
        in_order=True,
        pact=Pipeline(dense=True),
    )
    with FlowTester(1) as tester:
        tester.run(flow, on_message=lambda *message: told.append(message[-1]))
    assert told == [0, 1, 2]


def test_binary_tells_its_streams_apart(cluster):
    def tag(shard, delivery):
        side = ("left", "right")[delivery.port]
        shard.output().send(delivery.time, [(side, n) for n in delivery.payload])

    flow = Dataflow()
    flow.source([1, 2]).binary(flow.source([3]), tag).collect()

    found = sorted(cluster.run(flow)["out"])
    assert found == [("left", 1), ("left", 2), ("right", 3)]


def test_binary_routes_each_stream_by_its_own_pact(cluster):
    def join(shard, delivery):
        mine, other = shard.state_of("0"), shard.state_of("1")
        if delivery.port:
            mine, other = other, mine
        pairs = []
        for key, value in delivery.payload:
            mine.setdefault(key, []).append(value)
            for match in other.get(key, []):
                pair = (match, value) if delivery.port else (value, match)
                pairs.append((key, *pair))
        shard.output().send(delivery.time, pairs)

    by_key = Exchange.by_key(lambda pair: pair[0])
    people = [(n % 5, f"p{n}") for n in range(15)]
    places = [(n, f"c{n}") for n in range(4)]
    flow = Dataflow(num_shards=3)
    left, right = flow.source(people), flow.source(places)
    left.binary(right, join, pacts=(by_key, by_key), states=["0", "1"]).collect()

    expected = [(k, p, c) for k, p in people for n, c in places if n == k]
    assert sorted(cluster.run(flow)["out"]) == sorted(expected)


def test_binary_notify_waits_for_the_later_of_its_streams(cluster):
    def keep(shard, delivery):
        key = delivery.time, delivery.port
        shard.state.setdefault(key, []).extend(delivery.payload)
        shard.notify_at(delivery.time)

    def both(shard, time):
        sides = [sorted(shard.state.pop((time, port), [])) for port in (0, 1)]
        shard.output().send(time, [sides])

    flow = Dataflow(num_shards=1)
    fast = flow.source(range(3), batch_size=1, epoch_every=1)
    slow = flow.input("slow", num_shards=1)
    fast.binary_notify(slow, keep, both).collect()

    with cluster.start(flow) as run:
        handle = run.input("slow")
        for epoch in range(3):
            assert all(time < epoch for time, _ in run.batches("out"))
            handle.send([10 * epoch])
            handle.advance_to(epoch + 1)
    expected = [(epoch, [[[epoch], [10 * epoch]]]) for epoch in range(3)]
    assert run.result().batches("out") == expected


def test_a_notification_may_wait_for_one_port_only(cluster):
    def ask(shard, delivery):
        if delivery.port == 0:
            shard.notify_at(delivery.time, ports=(0,))

    def tell(shard, time):
        shard.emit("told", time)

    told = queue.Queue()
    flow = Dataflow(num_shards=1)
    fast = flow.source(range(3), batch_size=1, epoch_every=1)
    slow = flow.input("slow", num_shards=1)
    fast.binary_notify(slow, ask, tell)

    with cluster.start(flow, on_message=lambda *message: told.put(message[-1])) as run:
        run.input("slow").send([1])
        assert [told.get(timeout=10) for _ in range(3)] == [0, 1, 2]


def test_binary_frontier_joins_by_the_frontiers_of_both(cluster):
    def release(shard):
        left, right = shard.frontier(0), shard.frontier(1)
        for time in sorted(shard.state):
            if not left.less_equal(time) and not right.less_equal(time):
                held = shard.state.pop(time)
                with held["capability"]:
                    shard.output().send(time, [sum(held[0]) * sum(held[1])])

    def keep(shard, delivery):
        if delivery.time not in shard.state:
            capability = shard.retain(delivery.time)
            shard.state[delivery.time] = {0: [], 1: [], "capability": capability}
        shard.state[delivery.time][delivery.port].extend(delivery.payload)

    flow = Dataflow(num_shards=1)
    left = flow.source(range(6), batch_size=2, epoch_every=1)
    right = flow.source(range(10, 16), batch_size=2, epoch_every=1)
    left.binary_frontier(right, keep, release).collect()

    assert cluster.run(flow)["out"] == [1 * 21, 5 * 25, 9 * 29]


def test_sink_gets_every_block_and_complete_times_in_order(cluster, tmp_path):
    def keep(shard, delivery):
        shard.state.setdefault(delivery.time, []).extend(delivery.payload)
        shard.notify_at(delivery.time)

    def write(shard, time):
        records = sorted(shard.state.pop(time))
        with (tmp_path / f"part-{shard.index}").open("a") as file:
            file.write(f"{time} {records}\n")

    flow = Dataflow(num_shards=2)
    stream = flow.source(range(8), batch_size=4, epoch_every=1)
    stream.exchange(lambda n: n).sink(keep, on_notify=write)

    cluster.run(flow)
    for shard in range(2):
        expected = "".join(
            f"{t} {[4 * t + shard, 4 * t + shard + 2]}\n" for t in range(2)
        )
        assert (tmp_path / f"part-{shard}").read_text() == expected


def test_an_operator_may_have_any_number_of_ports(cluster):
    def sort_out(shard, delivery):
        for n in delivery.payload:
            shard.output(n % 3).send(delivery.time, [(delivery.port, n)])

    flow = Dataflow(num_shards=1)
    inputs = [flow.source(range(3 * n, 3 * n + 3)) for n in range(4)]
    outputs = flow.operator(Logic(on_batch=sort_out), inputs=inputs, outputs=3)
    for index, stream in enumerate(outputs):
        stream.collect(f"out-{index}")

    result = cluster.run(flow)
    assert {name: sorted(records) for name, records in result.items()} == {
        f"out-{index}": [(port, 3 * port + index) for port in range(4)]
        for index in range(3)
    }


def test_an_output_is_not_held_by_an_input_that_never_reaches_it(cluster):
    def forward(shard, delivery):
        shard.output(delivery.port).send(delivery.time, delivery.payload)

    flow = Dataflow(num_shards=1)
    done = flow.source([1], name="done")
    late = flow.input("late", num_shards=1)
    identity = Summary.identity(0)
    first, second = flow.operator(
        Logic(on_batch=forward),
        inputs=[done, late],
        outputs=[{0: identity}, {1: identity}],
    )
    first.probe("first").collect("a")
    second.probe("second").collect("b")

    with cluster.start(flow) as run:
        run.probe("first").wait_until(0, timeout_s=10)
        assert run.probe("first").done
        assert run.probe("second").less_equal(0)
        run.input("late").send([2])
    assert dict(run.result()) == {"a": [1], "b": [2]}


def test_an_operator_that_delays_may_say_so(cluster):
    def later(shard, delivery):
        shard.output().send(delivery.time + 5, delivery.payload)

    flow = Dataflow(num_shards=1)
    advance = Summary.advance(0, by=5)
    stream = flow.input("numbers", num_shards=1)
    (out,) = flow.operator(
        Logic(on_batch=later), inputs=[stream], outputs=[{0: advance}]
    )
    out.probe("delayed").collect()

    with cluster.start(flow) as run:
        run.probe("delayed").wait_until(4, timeout_s=10)
        assert run.probe("delayed").frontier == (5,)
        run.input("numbers").send(["x"])
    assert run.result().batches("out") == [(5, ["x"])]


def test_sending_where_no_way_leads_is_refused(cluster):
    flow = Dataflow(num_shards=1)
    (out,) = flow.operator(
        Logic(on_batch=lambda shard, d: shard.output().send(d.time, d.payload)),
        inputs=[flow.source([1])],
        outputs=[{}],
        name="mute",
    )
    out.collect()

    with pytest.raises(OperatorError, match="'mute' shard 0 may not send"):
        cluster.run(flow)


def test_an_output_of_an_input_that_does_not_exist_is_refused():
    flow = Dataflow()

    with pytest.raises(
        GraphError, match=r"depends on inputs that do not exist; got \[2\]"
    ):
        flow.operator(
            Logic(),
            inputs=[flow.source([1])],
            outputs=[{2: Summary.identity(0)}],
        )


def test_pacts_for_another_number_of_inputs_are_refused():
    flow = Dataflow()

    with pytest.raises(GraphError, match="pacts for other inputs; got 2; expected 1"):
        flow.operator(Logic(), inputs=[flow.source([1])], pacts=[None, None])


def test_a_source_of_ones_own(cluster):
    def start(shard):
        shard.state["capability"] = shard.initial_capability()
        shard.activate()

    def count_down(shard):
        capability = shard.state["capability"]
        left = 3 - capability.time
        shard.output().send(capability.time, [left])
        if left:
            capability.downgrade(capability.time + 1)
            shard.activate()
        else:
            capability.release()

    flow = Dataflow(num_shards=2)
    (out,) = flow.operator(
        Logic(on_start=start, on_activate=count_down), is_source=True, states=["state"]
    )
    out.collect()

    assert cluster.run(flow)["out"] == [3, 3, 2, 2, 1, 1, 0, 0]


def test_pipelining_between_different_numbers_of_shards_is_refused():
    flow = Dataflow(num_shards=2)

    with pytest.raises(GraphError, match="cannot be pipelined"):
        flow.source([1]).unary(lambda *_: None, pact=Pipeline(), num_shards=3)


@pytest.mark.parametrize("method", ["unary", "unary_frontier", "unary_notify", "sink"])
def test_callbacks_that_cannot_be_called_are_refused(method):
    stream = Dataflow().source([1])
    more = [3] if method in ("unary_frontier", "unary_notify") else []

    with pytest.raises(GraphError, match=f"'{method}' needs a function for 'on_batch'"):
        getattr(stream, method)(3, *more)


async def waits(*_):
    pass


def yields(*_):
    yield


@pytest.mark.parametrize("callback", CALLBACKS)
def test_a_callback_that_only_begins_when_it_is_called_is_refused(callback):
    stream = Dataflow().source([1])
    for fn in (waits, yields, 3):
        may_yield = callback in ("on_batch", "on_notify")
        if fn is yields and may_yield:
            assert stream.unary_notify(yields, yields)
            continue
        with pytest.raises(
            GraphError, match=f"'mine' needs a function for '{callback}'"
        ):
            Dataflow().operator(Logic(**{callback: fn}), name="mine", is_source=True)


@pytest.mark.parametrize("method", ["binary", "binary_frontier", "binary_notify"])
def test_what_is_no_stream_is_refused(method):
    stream = Dataflow().source([1])
    more = [print] if method != "binary" else []

    with pytest.raises(GraphError, match=r"needs a stream to read; got \[1\]"):
        getattr(stream, method)([1], print, *more)


def test_names_are_chosen_by_kind_and_stay_unique():
    flow = Dataflow()
    stream = flow.source([1])
    for _ in range(3):
        stream = stream.map(str)

    names = [operator.name for operator in flow.build().operators]
    assert names == ["source", "map", "map-2", "map-3"]
    assert len(set(names)) == len(list(pairwise(names))) + 1
