"""Records that are sent on at a later time."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.operators.test_distinct import in_epochs
from timelyml import Dataflow
from timelyml.errors import TimeError


def test_records_are_sent_at_the_time_that_is_named(cluster):
    flow = Dataflow(num_shards=1)
    flow.source([5, 2, 9, 2]).delay(lambda n, time: n).collect()

    assert cluster.run(flow).batches("out") == [(2, [2, 2]), (5, [5]), (9, [9])]


def test_a_record_may_stay_where_it_is(cluster):
    flow = Dataflow(num_shards=2)
    stream = flow.source(in_epochs([[1, 2], [3]]))
    stream.delay(lambda n, time: time).collect()

    result = cluster.run(flow)
    assert sorted(result["out"]) == [1, 2, 3]
    assert {time for time, _ in result.batches("out")} == {0, 1}


def test_a_later_time_waits_for_the_frontier(cluster):
    flow = Dataflow(num_shards=1)
    numbers = flow.input("numbers", num_shards=1)
    numbers.delay(lambda n, time: 3).probe("seen").collect()

    with cluster.start(flow) as run:
        run.input("numbers").send([7])
        run.input("numbers").advance_to(2)
        run.probe("seen").wait_until(1, timeout_s=10)
        assert run.batches("out") == []
        run.input("numbers").advance_to(4)
        run.probe("seen").wait_until(3, timeout_s=10)
        assert run.batches("out") == [(3, [7])]


def test_whole_blocks_can_be_delayed(cluster):
    flow = Dataflow(num_shards=1)
    rows = flow.source(np.arange(6), batch_size=2, epoch_every=1)
    rows.delay(lambda block, time: time + 10, by_batch=True).collect()

    found = [(t, p.tolist()) for t, p in cluster.run(flow).batches("out")]
    assert found == [(10, [0, 1]), (11, [2, 3]), (12, [4, 5])]


def test_rows_of_a_block_may_go_to_several_times(cluster):
    columns = {"at": np.array([4, 1, 4, 2]), "x": np.arange(4)}
    flow = Dataflow(num_shards=1)
    flow.source(columns).delay(lambda block, time: block["at"], by_batch=True).collect()

    found = [(t, p["x"].tolist()) for t, p in cluster.run(flow).batches("out")]
    assert found == [(1, [1]), (2, [3]), (4, [0, 2])]


def test_many_records_hold_one_capability_for_each_time(cluster):
    flow = Dataflow(num_shards=1)
    numbers = flow.input("numbers", num_shards=1)
    numbers.delay(lambda n, time: 5 + n % 3).collect()

    run = cluster.start(flow)
    handle = run.input("numbers")
    for _ in range(20):
        handle.send(list(range(100)))
    handle.flush(timeout_s=10)
    while run.metrics()["operators"]["delay"]["records_in"] < 2000:
        pass
    assert run.metrics()["operators"]["delay"]["pending_notifications"] == 3
    handle.close()
    assert len(run.result()["out"]) == 2000


def test_ten_thousand_open_times_are_no_trouble(cluster):
    flow = Dataflow(num_shards=1)
    numbers = flow.source([n * 7919 % 10_007 for n in range(10_000)])
    numbers.delay(lambda n, time: n).collect()

    found = cluster.run(flow)["out"]
    assert found == sorted(found)
    assert len(found) == 10_000


def test_an_earlier_time_is_refused(cluster):
    flow = Dataflow(num_shards=1)
    flow.source([1]).delay(lambda n, _: -1).collect()

    with pytest.raises(TimeError, match="cannot send a record earlier than it came"):
        cluster.run(flow)


@pytest.mark.parametrize("time", [0.5, None, True, "x", (3, 0)])
def test_what_is_no_time_is_refused_as_such(time):
    flow = Dataflow()
    flow.source([1]).delay(lambda n, _: time, name="late").collect()

    with pytest.raises(TimeError, match=r"'late' cannot send .* what is no time; got "):
        flow.run()


@pytest.mark.parametrize("kind", [float, bool, str, "M8[s]"])
def test_epochs_of_rows_that_are_no_integers_are_not_rounded(kind):
    flow = Dataflow()
    rows = flow.source(np.arange(1, 3))
    rows.delay(lambda block, _: block.astype(kind), by_batch=True).collect()

    with pytest.raises(TimeError, match="what is no time; got dtype"):
        flow.run()


def test_a_time_beyond_the_last_one_is_refused_and_loses_nothing_silently(cluster):
    flow = Dataflow(num_shards=1)
    flow.source([2**63 - 1, 2**63]).delay(lambda n, _: n, name="late").collect()

    with pytest.raises(TimeError, match=f"'late' has no such timestamp; got {2**63};"):
        cluster.run(flow)


def test_delays_inside_a_loop_count_rounds(cluster):
    def body(stream):
        late = stream.delay(lambda n, time: (time[0], time[1] + n))
        return late.map(lambda n: n - 1).branch(lambda n: n > 0)

    flow = Dataflow(num_shards=2)
    flow.source(in_epochs([[3], [1, 2]])).iterate(body).collect()

    assert cluster.run(flow)["out"] == [0, 0, 0]


@settings(max_examples=30, deadline=None)
@given(
    epochs=st.lists(st.lists(st.integers(0, 6), max_size=6), max_size=5),
    num_shards=st.integers(1, 3),
)
def test_delay_equals_its_definition(epochs, num_shards):
    flow = Dataflow(num_shards=num_shards)
    flow.source(in_epochs(epochs)).delay(lambda n, time: time + n).collect()

    expected = defaultdict(list)
    for epoch, records in enumerate(epochs):
        for n in records:
            expected[epoch + n].append(n)
    found = defaultdict(list)
    for time, payload in flow.run().batches("out"):
        found[time] += payload
    assert {t: sorted(r) for t, r in found.items()} == {
        t: sorted(r) for t, r in expected.items()
    }
