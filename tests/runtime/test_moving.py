"""A shard goes on elsewhere as if nothing had happened, without its operator's help.

One run is left where its sources wait, its shards are taken as bytes, and another run,
with other workers, begins with them. Together they give what one run gives.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.runtime.fakes import FakeClock
from tests.runtime.world import World
from timelyml import Dataflow, Session, Tumbling
from timelyml.errors import CapabilityError, PayloadError
from timelyml.graph import Exchange
from timelyml.ml import compute
from timelyml.runtime.config import RunConfig, ShippedRun
from timelyml.runtime.effects import Ended, Released
from timelyml.runtime.run_state import RunPlan
from timelyml.runtime.shipping import ship

NUM_SHARDS = 4
NUM_EPOCHS = 6
STEPS_TO_REST = 500
MAX_STEPS = 5000


class Gate:
    """Up to which epoch sources give anything."""

    open_until = NUM_EPOCHS


def records(shard, num_shards):
    """Three payloads of pairs in each epoch of each shard, in two steps."""
    for epoch in range(NUM_EPOCHS):
        for part in range(3):
            while (epoch, part) >= (Gate.open_until, 2):
                yield None
            keys = range(shard, shard + 5)
            yield epoch, [(key % 7, epoch + part + key) for key in keys]


def columns(shard, num_shards):
    for item in records(shard, num_shards):
        if item is None:
            yield None
        else:
            epoch, pairs = item
            keys, values = zip(*pairs, strict=True)
            yield epoch, {"key": np.array(keys), "value": np.array(values, np.float32)}


class Site(World):
    """Starts one run, and lets it go as far as it can; a step takes a millisecond."""

    def __init__(self, num_workers):
        self.clock = FakeClock()
        super().__init__(num_workers, self.clock)

    def start(self, graph, images=None):
        config = RunConfig(max_epochs_ahead=100)
        plan = RunPlan(
            1,
            graph.resolve(self.num_workers),
            config,
            ship(ShippedRun(graph, config)),
            self.num_workers,
        )
        self.controller.start_run(plan, self.effects.append)
        while not all(worker._dataflows for worker in self.workers):
            self._step()  # they start a step later, when the controller knows
        for flow, operator, shard in self._shards():
            if images is not None:
                flow.install_shard(operator, shard, images[operator, shard])

    def take_shards(self):
        """Let the run come to rest; return all its shards."""
        for _ in range(STEPS_TO_REST):
            self._step()
        return {
            (operator, shard): flow.export_shard(operator, shard)
            for flow, operator, shard in self._shards()
        }

    def finish(self):
        for _ in range(MAX_STEPS):
            self._step()
            if self.effects and isinstance(self.effects[-1], Ended):
                if self.effects[-1].error is not None:
                    raise self.effects[-1].error
                return
        raise AssertionError("the run does not end")

    def collected(self):
        """All records, as they can be compared, in order."""
        return [
            (effect.time, shard, comparable(record))
            for effect in self.effects
            if isinstance(effect, Released)
            for shard, payload in effect.items
            for record in payload
        ]

    def _step(self):
        self.clock.pass_(0.001)
        self.controller.step()
        for worker in self.workers:
            worker.step()

    def _shards(self):
        return [
            (flow, instance.index, shard)
            for worker in self.workers
            for flow in worker._dataflows.values()
            for instance in flow.instances
            for shard in instance.shards
        ]


def comparable(record):
    return repr(record)


def list_all(stream):
    """Collect whole times, sorted, by what is itself state that moves."""
    listed = stream.fold([], lambda so_far, record: [*so_far, record])
    listed.map(lambda found: sorted(found, key=repr)).collect()


def kept_by_the_user(stream):
    """Capabilities of a user's operator, one of them in two places of its state."""

    def on_batch(shard, delivery):
        if delivery.time in shard.state:
            shard.state[delivery.time][1].extend(delivery.payload)
            return
        capability = shard.retain(delivery.time)
        shard.state[delivery.time] = capability, list(delivery.payload)
        shard.state_of("latest")["capability"] = capability

    def on_frontier(shard):
        for time in sorted(shard.state):
            if not shard.frontier().less_equal(time):
                capability, kept = shard.state.pop(time)
                shard.output().send(time, [sum(value for _, value in kept)])
                capability.release()
                if shard.state_of("latest")["capability"] is capability:
                    shard.state_of("latest").clear()

    return stream.unary_frontier(on_batch, on_frontier, states=("state", "latest"))


def counting_layer(state, rows):
    """Momentum over the mean of the rows, as an optimiser would keep it."""
    updates, moments = optax.trace(0.9).update(rows["value"].mean(), state)
    return moments, {"value": jnp.full(rows["value"].shape, updates)}


def first_moments(shard):
    return optax.trace(0.9).init(jnp.float32(shard))


def looped(stream):
    def body(numbers):
        return numbers.map(lambda pair: (pair[0], pair[1] - 2)).branch(
            lambda pair: pair[1] > 0
        )

    return stream.iterate(body).count(lambda pair: pair[0])


FLOWS = {
    "fold": lambda s: s.exchange(lambda p: p[0]).fold(0, lambda a, p: a + p[1]),
    "accumulate": lambda s: s.accumulate(0, lambda a, ps: a + len(ps)),
    "count": lambda s: s.count(),
    "count by key": lambda s: s.count(lambda p: p[0]),
    "reduce": lambda s: s.reduce(lambda p: p[0], max),
    "distinct": lambda s: s.distinct(),
    "distinct across times": lambda s: s.distinct(
        lambda p: p[0], across_times=True, ttl_epochs=2
    ),
    "join": lambda s: s.join(s.filter(lambda p: p[1] % 2)),
    "join across times": lambda s: s.join(
        s.filter(lambda p: p[0] == 3), how="outer", across_times=True, ttl_epochs=1
    ),
    "state machine": lambda s: s.state_machine(
        lambda key, value, state: ((state or 0) + value, [(key, state)]), ttl_epochs=3
    ),
    "delay": lambda s: s.delay(lambda pair, time: time + pair[1] % 3),
    "tumbling": lambda s: s.window(Tumbling(3), lambda p: p[1], combine=max).results,
    "session": lambda s: s.window(Session(2), lambda p: p[1], combine=max).results,
    "late": lambda s: s.window(Tumbling(2), lambda p: p[1]).late,
    "rebalance": lambda s: s.rebalance().count(),
    "user": kept_by_the_user,
    "loop": looped,
}


def columns_flow():
    flow = Dataflow(num_shards=NUM_SHARDS)
    rows = flow.source(columns)
    list_all(rows.aggregate("key", {"n": "count", "v": ("sum", "value")}).map(str))
    learned = compute(
        rows.ref,
        counting_layer,
        init=first_moments,
        pact=Exchange(route=lambda rows, n: rows["key"] % n),
    )
    flow._stream(learned).map(float_of).collect("learned")
    return flow


def float_of(row):
    return float(row["value"])


def records_flow(make):
    flow = Dataflow(num_shards=NUM_SHARDS)
    list_all(make(flow.source(records)))
    return flow


@pytest.fixture
def gate():
    yield Gate
    Gate.open_until = NUM_EPOCHS


@pytest.mark.parametrize("stop_at", [1, 3])
@pytest.mark.parametrize(
    "make", [*FLOWS.values(), None], ids=[*FLOWS, "columns and jax"]
)
def test_two_runs_that_share_the_work_give_what_one_run_gives(make, stop_at, gate):
    graph = (columns_flow() if make is None else records_flow(make)).build()
    whole = Site(2)
    whole.start(graph)
    whole.finish()
    gate.open_until = stop_at
    first, second = Site(2), Site(3)

    first.start(graph)
    images = first.take_shards()
    gate.open_until = NUM_EPOCHS
    second.start(graph, images)
    second.finish()

    assert whole.collected()
    together = first.collected() + second.collected()
    assert sorted(together) == sorted(whole.collected())


def test_what_waits_is_taken_along(gate):
    graph = records_flow(FLOWS["delay"]).build()
    gate.open_until = 1
    site = Site(2)
    site.start(graph)

    images = site.take_shards()

    delay = graph.operator_named("delay").index
    held = [image.capabilities for (op, _), image in images.items() if op == delay]
    times = {time for each in held for _, time, _, _ in each}
    assert times == {1, 2, 3}


def test_a_capability_is_not_sent_nor_copied():
    def on_batch(shard, delivery):
        shard.output().send(delivery.time, [shard.retain(delivery.time)])

    flow = Dataflow()
    flow.source([1]).unary(on_batch).collect()

    with pytest.raises(
        (CapabilityError, PayloadError), match="cannot be sent or copied"
    ):
        flow.run(workers=1)
