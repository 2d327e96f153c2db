"""A shard goes on elsewhere as if nothing had happened, without its operator's help.

One run is left where its sources wait, its shards are taken as bytes, and another run,
with other workers, begins with them. Together they give what one run gives.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.runtime.moved import (
    MANY,
    NUM_SHARDS,
    Site,
    asked,
    columns,
    list_all,
    opened_gate,
    records,
    share_the_work,
)
from timelyml import Dataflow, Session, Tumbling, ml
from timelyml.errors import CapabilityError, PayloadError
from timelyml.graph import Exchange
from timelyml.ml import compute
from timelyml.progress import CapabilitySet


@pytest.fixture
def gate():
    yield from opened_gate()


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


def kept_in_a_set(stream):
    """All capabilities of a user's operator in one set."""

    def on_batch(shard, delivery):
        rights = shard.state.setdefault("rights", CapabilitySet())
        rights.insert(shard.retain(delivery.time))
        kept = shard.state_of("kept").setdefault(delivery.time, [])
        kept.extend(delivery.payload)

    def on_frontier(shard):
        kept = shard.state_of("kept")
        for time in sorted(kept):
            if not shard.frontier().less_equal(time):
                total = sum(value for _, value in kept.pop(time))
                shard.output().send(time, [total])
        if "rights" in shard.state:
            shard.state["rights"].downgrade(kept)

    return stream.unary_frontier(on_batch, on_frontier, states=("state", "kept"))


def counting_layer(state, rows):
    """Momentum over the mean of the rows, as an optimiser would keep it."""
    updates, moments = optax.trace(0.9).update(rows["value"].mean(), state)
    return moments, {"value": jnp.full(rows["value"].shape, updates)}


def first_moments(shard):
    return optax.trace(0.9).init(jnp.float32(shard))


def counted_rounds(stream):
    """Records that go to all shards in turn, by what comes out on each."""
    spread = stream.rebalance().unary(
        lambda shard, delivery: shard.output().send(
            delivery.time, [(shard.index, len(delivery.payload))]
        )
    )
    return spread.reduce(lambda p: p[0], lambda a, b: a + b, value=lambda p: p[1])


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
    "rebalance": counted_rounds,
    "map_async": lambda s: s.map_async(asked, limit=MANY),
    "map_async, as they come": lambda s: s.map_async(asked, limit=MANY, ordered=False),
    "user": kept_by_the_user,
    "set": kept_in_a_set,
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
    layer, tokens = ml.MoE(num_experts=4, d_ff=4), rows.map_batch(tokens_of)
    mixed = tokens.moe(
        layer, layer.init(jax.random.key(0), np.ones((2, 2), np.float32))
    )
    mixed.map(str).collect("mixed")
    return flow


def tokens_of(block):
    return np.stack([block["value"], block["key"].astype(np.float32)], axis=1)


def float_of(row):
    return float(row["value"])


def records_flow(make):
    flow = Dataflow(num_shards=NUM_SHARDS)
    list_all(make(flow.source(records)))
    return flow


@pytest.mark.parametrize("stop_at", [1, 3])
@pytest.mark.parametrize(
    "make", [*FLOWS.values(), None], ids=[*FLOWS, "columns and jax"]
)
def test_two_runs_that_share_the_work_give_what_one_run_gives(make, stop_at, gate):
    graph = (columns_flow() if make is None else records_flow(make)).build()

    whole, together = share_the_work(graph, gate, stop_at)

    assert whole
    assert together == whole


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
