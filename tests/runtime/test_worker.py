"""What operators may do, and what the worker promises them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.runtime.world import World
from timelyml.errors import CapabilityError, OperatorError, PeerError, RoutingError
from timelyml.exchange import CONTROLLER, Incoming, Lane, LinkFailure
from timelyml.graph import (
    Broadcast,
    Direct,
    Exchange,
    Gather,
    GraphBuilder,
    InputSpec,
    Pipeline,
)
from timelyml.progress import Summary
from timelyml.runtime.effects import Released
from timelyml.runtime.messages import DataMessage, Start
from timelyml.runtime.operator import Logic

MODES = pytest.mark.parametrize("mode", ["broadcast", "accumulator"])
WORKERS = pytest.mark.parametrize("num_workers", [1, 3])


def source(num_epochs, payload_of):
    """Logic of a source: one payload per shard and epoch, within the epoch credit."""

    def on_start(shard):
        shard.state["capability"] = shard.initial_capability()
        shard.activate()

    def on_activate(shard):
        capability = shard.state["capability"]
        epoch = capability.time
        if epoch == num_epochs:
            capability.release()
        elif shard.can_start_epoch(epoch):
            shard.output().send(epoch, payload_of(shard.index, epoch))
            capability.downgrade(epoch + 1)
            shard.activate()

    return Logic(on_start=on_start, on_activate=on_activate)


def summing():
    """Logic of a sink that sums what each shard gets at each time."""

    def on_batch(shard, delivery):
        total = shard.state.get(delivery.time, 0)
        shard.state[delivery.time] = total + int(np.sum(delivery.payload))
        shard.notify_at(delivery.time)

    def on_notify(shard, time):
        shard.emit("collect", (time, shard.state.pop(time)))

    return Logic(on_batch=on_batch, on_notify=on_notify)


def add_source(builder, num_epochs, *, num_shards):
    """Add a source of `_rows`; returns its stream."""
    (stream,) = builder.add_operator(
        "source",
        "source",
        logic=source(num_epochs, _rows),
        states=("state",),
        is_source=True,
        num_shards=num_shards,
    )
    return stream


def add_summing(builder, spec, **options):
    """Add a sink that sums what one input brings."""
    builder.add_operator(
        "sink",
        "sink",
        inputs=[spec],
        num_outputs=0,
        logic=summing(),
        states=("state",),
        **options,
    )


def chain(logic, pact, *, payload_of, num_epochs=3, shards=(4, 4), **options):
    """A graph of one source and one operator."""
    builder = GraphBuilder("chain")
    (stream,) = builder.add_operator(
        "source",
        "source",
        logic=source(num_epochs, payload_of),
        states=("state",),
        is_source=True,
        regular=True,
        num_shards=shards[0],
    )
    builder.add_operator(
        "sink",
        "sink",
        inputs=[InputSpec(stream, pact)],
        num_outputs=0,
        logic=logic,
        states=("state",),
        num_shards=shards[1],
        **options,
    )
    return builder.build()


def _rows(shard, epoch):
    return np.arange(8) + 100 * shard + 1000 * epoch


@MODES
@WORKERS
@pytest.mark.parametrize(
    ("pact", "expected"),
    [
        (Pipeline(), lambda e, s: _rows(s, e).sum()),
        (Pipeline(dense=True), lambda e, s: _rows(s, e).sum()),
        (Gather(1), lambda e, s: sum(_rows(p, e).sum() for p in range(4))),
        (Broadcast(), lambda e, s: sum(_rows(p, e).sum() for p in range(4))),
        (Broadcast(dense=True), lambda e, s: sum(_rows(p, e).sum() for p in range(4))),
        (
            Exchange(route=lambda rows, n: rows % n),
            lambda e, s: sum(r for p in range(4) for r in _rows(p, e) if r % 4 == s),
        ),
        (
            Exchange(route=lambda rows, n: rows % n, dense=True),
            lambda e, s: sum(r for p in range(4) for r in _rows(p, e) if r % 4 == s),
        ),
    ],
    ids=lambda value: value.describe() if hasattr(value, "describe") else "",
)
def test_every_shard_has_its_rows_when_it_is_notified(
    pact, expected, num_workers, mode
):
    graph = chain(summing(), pact, payload_of=_rows)

    collected = World(num_workers).run(graph, progress_mode=mode)

    shards = [1] if isinstance(pact, Gather) else range(4)
    assert collected == [(e, s, expected(e, s)) for e in range(3) for s in shards]


def test_a_dense_consumer_starts_before_the_frontier_passes():
    def on_start(shard):
        shard.state["capability"] = shard.initial_capability()
        shard.activate()

    def on_activate(shard):  # sends epoch 0 and keeps the right to send at it
        shard.output().send(0, np.arange(3))
        shard.activate_after(0.05)
        shard.state["sent"] = shard.state.get("sent", 0) + 1
        if shard.state["sent"] == 1:
            return
        shard.state["capability"].release()

    def on_notify(shard, time):
        shard.emit("collect", (time, shard.frontier().less_equal(time)))

    builder = GraphBuilder("early")
    (stream,) = builder.add_operator(
        "source",
        "source",
        logic=Logic(
            on_start=on_start,
            on_activate=lambda shard: (
                on_activate(shard)
                if "sent" not in shard.state
                else shard.state["capability"].release()
                if shard.state["capability"].is_held
                else None
            ),
        ),
        states=("state",),
        is_source=True,
        regular=True,
        num_shards=1,
    )
    builder.add_operator(
        "sink",
        "sink",
        inputs=[InputSpec(stream, Pipeline(dense=True))],
        num_outputs=0,
        logic=Logic(
            on_batch=lambda shard, delivery: shard.notify_at(delivery.time),
            on_notify=on_notify,
        ),
    )

    assert World().run(builder.build()) == [(0, 0, True)]


@WORKERS
def test_sends_without_a_right_to_send_are_refused(num_workers):
    def on_batch(shard, delivery):
        shard.notify_at(delivery.time)
        shard.retain(delivery.time - 1)

    graph = chain(Logic(on_batch=on_batch), Pipeline(), payload_of=_rows)

    with pytest.raises(
        CapabilityError, match=r"'sink' shard . may not retain"
    ) as caught:
        World(num_workers).run(graph)

    assert isinstance(caught.value, OperatorError)
    assert caught.value.operator == "sink"


def test_the_input_frontier_justifies_nothing():
    def on_frontier(shard):
        if shard.frontier().elements:
            shard.retain(shard.frontier().elements[0])

    graph = chain(Logic(on_frontier=on_frontier), Pipeline(), payload_of=_rows)

    with pytest.raises(CapabilityError, match="may not retain"):
        World().run(graph, max_epochs_ahead=1)


def test_a_capability_allows_sends_on_its_own_output_only():
    def on_batch(shard, delivery):
        shard.state["right"] = shard.retain(delivery.time, output=0)
        shard.activate()

    def on_activate(shard):
        time = shard.state["right"].time
        shard.output(0).send(time, [1])
        shard.output(1).send(time, [1])

    builder = GraphBuilder("two ways")
    stream = add_source(builder, 1, num_shards=1)
    builder.add_operator(
        "fork",
        "fork",
        inputs=[InputSpec(stream)],
        num_outputs=2,
        logic=Logic(on_batch=on_batch, on_activate=on_activate),
        states=("state",),
    )

    with pytest.raises(
        CapabilityError, match="'fork' shard 0 may not send on output 1"
    ):
        World().run(builder.build())


def test_a_capability_gives_another_operator_no_right():
    def on_batch(shard, delivery):
        shard.output().send(delivery.time + 1, [shard.retain(delivery.time)])

    def use(shard, delivery):
        (lent,) = delivery.payload
        shard.output().send(lent.time, [1])

    builder = GraphBuilder("lent")
    stream = add_source(builder, 1, num_shards=1)
    (lent,) = builder.add_operator(
        "lend", "lend", inputs=[InputSpec(stream)], logic=Logic(on_batch=on_batch)
    )
    builder.add_operator(
        "use", "use", inputs=[InputSpec(lent)], logic=Logic(on_batch=use)
    )

    with pytest.raises(CapabilityError, match="'use' shard 0 may not send"):
        World().run(builder.build())


def test_what_arrives_before_the_start_is_kept():
    graph = chain(summing(), Exchange(route=lambda rows, n: rows % n), payload_of=_rows)
    world = World(2)
    late = world.workers[0]._transport
    held_back = []

    def receive():
        arrived = type(late).receive(late)
        if world.workers[1]._dataflows and not held_back:
            starts = [each for each in arrived if isinstance(each.message, Start)]
            held_back.extend(starts)
            arrived = [each for each in arrived if each not in starts]
        elif (
            held_back
            and not early
            and any(isinstance(each.message, DataMessage) for each in arrived)
        ):
            early.append(True)
            late.put(held_back[0], Lane.CONTROL)
        return arrived

    early = []
    late.receive = receive

    collected = world.run(graph)

    assert early  # data of the other worker came before this one had started
    assert len(collected) == 3 * 4
    assert sum(total for _, _, total in collected) == sum(
        int(_rows(shard, epoch).sum()) for shard in range(4) for epoch in range(3)
    )


def test_a_capability_kept_in_state_holds_the_frontier_until_its_release():
    def on_batch(shard, delivery):
        shard.state[delivery.time] = shard.retain(delivery.time)
        shard.activate_after(0.01)

    def on_activate(shard):
        for time in sorted(shard.state):
            with shard.state.pop(time) as capability:
                shard.output().send(capability.time, [time * 10])

    builder = GraphBuilder("late")
    stream = add_source(builder, 3, num_shards=1)
    (late,) = builder.add_operator(
        "late",
        "late",
        inputs=[InputSpec(stream)],
        logic=Logic(on_batch=on_batch, on_activate=on_activate),
        states=("state",),
    )
    add_summing(builder, InputSpec(late))

    assert World().run(builder.build()) == [(0, 0, 0), (1, 0, 10), (2, 0, 20)]


@WORKERS
def test_queued_bytes_never_pass_the_credit_in_one_huge_epoch(num_workers):
    def rows(shard):
        for _ in range(200):
            shard.output().send(0, np.zeros(1000))
            yield

    def on_batch(shard, delivery):
        yield from rows(shard)

    builder = GraphBuilder("huge")
    stream = add_source(builder, 1, num_shards=3)
    (many,) = builder.add_operator(
        "many", "many", inputs=[InputSpec(stream)], logic=Logic(on_batch=on_batch)
    )
    add_summing(
        builder,
        InputSpec(many, Exchange(route=lambda rows, n: np.arange(len(rows)) % n)),
    )
    world = World(num_workers)

    collected = world.run(builder.build(), credit_bytes=50_000)

    assert [shard for _, shard, _ in collected] == [0, 1, 2]
    for metrics in world.metrics.values():
        assert 0 < metrics["queued_bytes_peak"] <= 50_000


@MODES
@WORKERS
def test_a_loop_beyond_its_budget_spills_and_loses_nothing(num_workers, mode):
    def on_batch(shard, delivery):
        rows = delivery.payload
        _epoch, iteration = delivery.time
        if iteration < 5:
            shard.output(0).send(delivery.time, np.concatenate([rows, rows]))
        else:
            shard.output(1).send(delivery.time, rows)

    builder = GraphBuilder("loop")
    stream = add_source(builder, 2, num_shards=3)
    scope = builder.scope("doubling")
    loop = builder.feedback(scope, num_shards=3)
    again, out = builder.add_operator(
        "body",
        "body",
        inputs=[
            InputSpec(builder.enter(stream, scope)),
            InputSpec(loop.stream, Exchange(route=lambda rows, n: (rows + 1) % n)),
        ],
        num_outputs=2,
        logic=Logic(on_batch=on_batch),
    )
    loop.connect(again)
    builder.add_operator(
        "sink",
        "sink",
        inputs=[InputSpec(builder.leave(out), Gather())],
        num_outputs=0,
        logic=summing(),
        states=("state",),
    )
    world = World(num_workers)

    collected = world.run(builder.build(), loop_budget_bytes=300, progress_mode=mode)

    total = [32 * sum(int(_rows(s, e).sum()) for s in range(3)) for e in range(2)]
    assert collected == [(0, 0, total[0]), (1, 0, total[1])]
    assert sum(metrics["spilled_blocks"] for metrics in world.metrics.values()) > 0


def test_direct_sends_go_to_the_named_shard_only():
    def on_batch(shard, delivery):
        shard.output().send_to(delivery.time, 2, [shard.index])

    builder = GraphBuilder("direct")
    stream = add_source(builder, 1, num_shards=3)
    (sent,) = builder.add_operator(
        "send", "send", inputs=[InputSpec(stream)], logic=Logic(on_batch=on_batch)
    )
    add_summing(builder, InputSpec(sent, Direct()), num_shards=3)

    assert World(2).run(builder.build()) == [(0, 2, 3)]


def test_a_row_for_a_shard_that_does_not_exist_is_refused_by_name():
    graph = chain(
        summing(), Exchange(route=lambda rows, n: rows), payload_of=_rows, shards=(2, 2)
    )

    with pytest.raises(RoutingError, match=r"'source' failed .* got \d+ at row"):
        World(2).run(graph)


def test_a_sent_array_is_read_only_on_every_branch():
    def on_batch(shard, delivery):
        delivery.payload[0] = 1

    graph = chain(Logic(on_batch=on_batch), Pipeline(), payload_of=_rows)

    with pytest.raises(ValueError, match="read-only"):
        World().run(graph)


def test_gradients_may_come_back_by_a_port_that_advances_time():
    """Forward at t + 1 runs after the gradient of t: legal, since the port says so."""
    identity, advance = Summary.identity(0), Summary.advance(0)

    def on_batch(shard, delivery):
        shard.notify_at(delivery.time, ports=(delivery.port,))

    def on_notify(shard, time):
        if shard.notified_ports == (0,):
            shard.output(0).send(time, [shard.state.get("steps", 0)])
            shard.notify_at(time, ports=(1,), outputs=())
        else:
            shard.state["steps"] = shard.state.get("steps", 0) + 1

    builder = GraphBuilder("training")
    stream = add_source(builder, 4, num_shards=1)
    loop = builder.feedback(summary=identity, num_shards=1)
    (forward,) = builder.add_operator(
        "layer",
        "layer",
        inputs=[InputSpec(stream), InputSpec(loop.stream)],
        summaries=[[[identity]], [[advance]]],
        logic=Logic(on_batch=on_batch, on_notify=on_notify, in_order=True),
        states=("state",),
    )
    loop.connect(forward)
    add_summing(builder, InputSpec(forward))

    assert World().run(builder.build()) == [(t, 0, t) for t in range(4)]


def test_a_notification_asked_for_by_two_ports_may_send_what_either_leads_to():
    identity = Summary.identity(0)

    def on_batch(shard, delivery):
        shard.notify_at(delivery.time)

    def on_notify(shard, time):
        shard.output(0).send(time, ["zero"])
        shard.output(1).send(time, ["one"])

    builder = GraphBuilder("pair")
    stream = add_source(builder, 1, num_shards=1)
    outputs = builder.add_operator(
        "pair",
        "pair",
        inputs=[InputSpec(stream), InputSpec(stream)],
        num_outputs=2,
        summaries=[[[identity], []], [[], [identity]]],
        logic=Logic(on_batch=on_batch, on_notify=on_notify),
    )
    for number, output in enumerate(outputs):
        builder.add_operator(
            f"sink{number}",
            "sink",
            inputs=[InputSpec(output)],
            num_outputs=0,
            logic=Logic(on_batch=_collect),
        )

    assert World().run(builder.build()) == [(0, 0, ["zero"]), (0, 0, ["one"])]


def test_what_is_collected_on_notification_is_released_whole():
    def on_batch(shard, delivery):
        shard.notify_at(delivery.time)

    def on_notify(shard, time):
        shard.emit("collect", (time, [shard.index]))

    graph = chain(
        Logic(on_batch=on_batch, on_notify=on_notify), Broadcast(), payload_of=_rows
    )
    world = World(2)

    world.run(graph)

    released = [each for each in world.effects if isinstance(each, Released)]
    times = [each.time for each in released]
    assert times == sorted(set(times))
    assert all(len(each.items) == 4 for each in released)


def _collect(shard, delivery):
    shard.emit("collect", (delivery.time, delivery.payload))


def test_a_run_ends_at_once_on_a_worker_that_lost_a_link_before():
    world = World(2)
    world.controller.step()
    hub = world.workers[0]._transport._hub
    hub.transport(0).put(Incoming(1, LinkFailure("it was cut")), Lane.CONTROL)

    with pytest.raises(PeerError, match="worker 0 lost its link from worker 1"):
        world.run(chain(summing(), Pipeline(), payload_of=_rows))


def test_a_worker_that_lost_its_controller_leaves():
    world = World(1)
    hub = world.workers[0]._transport._hub
    hub.transport(0).put(Incoming(CONTROLLER, LinkFailure("it was cut")), Lane.CONTROL)

    world.workers[0].step()

    assert world.workers[0].is_stopped


def test_a_worker_that_cannot_reach_its_controller_leaves_whatever_it_was_doing():
    world = World(1)
    world.controller.step()
    worker = world.workers[0]
    graph = chain(summing(), Pipeline(), payload_of=_rows, num_epochs=1000)
    world.controller.start_run(world.plan(graph), world.effects.append)
    while not worker._started:
        world.controller.step()
        worker.step()
    worker._transport._hub.transport(CONTROLLER).close()

    while not worker.is_stopped:
        worker.step()

    assert worker.is_orphaned
    assert worker.num_runs == 0
