"""State by key, stepped in order of time."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.operators.test_distinct import in_epochs
from timelyml import Dataflow
from timelyml.errors import GraphError


def remember(key, value, state):
    """Send everything that the key has had so far."""
    seen = (*(state or ()), value)
    return seen, [(key, seen)]


def test_state_is_kept_by_key_over_times(cluster):
    flow = Dataflow(num_shards=2)
    stream = flow.source(in_epochs([[("a", 1), ("b", 2)], [("a", 3)], [("b", 4)]]))
    stream.state_machine(remember).collect()

    assert sorted(cluster.run(flow)["out"]) == [
        ("a", (1,)),
        ("a", (1, 3)),
        ("b", (2,)),
        ("b", (2, 4)),
    ]


def test_results_have_the_times_of_their_values(cluster):
    flow = Dataflow(num_shards=1)
    numbers = flow.source([("k", 1), ("k", 2)], batch_size=1, epoch_every=1)
    numbers.state_machine(remember).collect()

    assert cluster.run(flow).batches("out") == [
        (0, [("k", (1,))]),
        (1, [("k", (1, 2))]),
    ]


def test_values_of_one_time_come_by_producer(cluster):
    flow = Dataflow(num_shards=3)
    stream = flow.source(lambda shard, _: [[("k", (shard, n)) for n in range(2)]])
    stream.state_machine(remember).collect()

    *_, (_, last) = cluster.run(flow)["out"]
    assert last == tuple((shard, n) for shard in range(3) for n in range(2))


def test_none_forgets_the_key(cluster):
    def until_full(key, value, state):
        total = (state or 0) + value
        return (None, [(key, total)]) if total >= 10 else (total, [])

    flow = Dataflow(num_shards=2)
    stream = flow.source(in_epochs([[("a", 4)], [("a", 7)], [("a", 1)], [("a", 9)]]))
    stream.state_machine(until_full, name="fill").collect()

    run = cluster.start(flow)
    assert run.result()["out"] == [("a", 11), ("a", 10)]
    assert run.metrics()["operators"]["fill"]["state_entries"] == 0


def test_the_key_may_be_a_function_or_a_field(cluster):
    def number(key, record, state):
        return (state or 0) + 1, [(key, record["n"], state or 0)]

    flow = Dataflow(num_shards=2)
    records = [{"user": "u", "n": 1}, {"user": "v", "n": 2}, {"user": "u", "n": 3}]
    stream = flow.source(records)
    stream.state_machine(number, key="user").collect("field")
    stream.state_machine(number, key=lambda r: r["n"] % 2).collect("function")

    found = cluster.run(flow)
    assert sorted(found["field"]) == [("u", 1, 0), ("u", 3, 1), ("v", 2, 0)]
    assert sorted(found["function"]) == [(0, 2, 0), (1, 1, 0), (1, 3, 1)]


def test_a_state_is_forgotten_when_its_time_to_live_is_over(cluster):
    epochs = [[("a", 0)], [("b", 1)], [("a", 2)], [], [], [("a", 5)], [("b", 6)]]
    flow = Dataflow(num_shards=2)
    flow.source(in_epochs(epochs)).state_machine(remember, ttl_epochs=2).collect()

    assert cluster.run(flow)["out"] == [
        ("a", (0,)),
        ("b", (1,)),
        ("a", (0, 2)),
        ("a", (5,)),
        ("b", (6,)),
    ]


def test_a_million_keys_seen_once_are_not_kept(cluster):
    def once(shard, num_shards):
        for start in range(shard * 100, 20_000, num_shards * 100):
            yield [(key, 0) for key in range(start, start + 100)]

    flow = Dataflow(num_shards=2)
    flow.source(once).state_machine(remember, ttl_epochs=3, name="once").probe("end")

    run = cluster.start(flow)
    run.result()
    assert run.metrics()["operators"]["once"]["state_entries"] <= 2 * 100 * 8


def test_what_cannot_be_called_is_refused():
    with pytest.raises(GraphError, match="'state_machine' needs a function"):
        Dataflow().source([1]).state_machine(7)


@settings(max_examples=40, deadline=None)
@given(
    epochs=st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=5),
        max_size=8,
    ),
    num_shards=st.integers(1, 3),
    ttl=st.none() | st.integers(0, 3),
)
def test_a_state_machine_equals_its_definition(epochs, num_shards, ttl):
    flow = Dataflow(num_shards=num_shards)
    stream = flow.source(in_epochs(epochs))
    stream.state_machine(remember, ttl_epochs=ttl).collect()

    expected, states = defaultdict(list), {}
    for epoch, records in enumerate(epochs):
        for shard in range(num_shards):
            for key, value in records[shard::num_shards]:
                state, last = states.get(key, (None, epoch))
                if ttl is not None and last + ttl < epoch:
                    state = None
                seen, results = remember(key, value, state)
                states[key] = seen, epoch
                expected[key] += [(epoch, result) for result in results]
    found = defaultdict(list)
    for time, payload in flow.run().batches("out"):
        for result in payload:
            found[result[0]].append((time, result))
    assert found == expected
