"""Reducing the records of each time."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timelyml import Dataflow
from timelyml.errors import GraphError

TEXT = [
    "the",
    "cat",
    "and",
    "the",
    "dog",
    "and",
    "the",
    "bird",
    "saw",
    "one",
    "other",
    "cat",
]


def by_time(batches):
    """Records of collected batches, by time, over all shards."""
    found = defaultdict(list)
    for time, payload in batches:
        found[time] += payload
    return dict(found)


def test_fold_reduces_each_time_to_one_value(cluster):
    flow = Dataflow(num_shards=1)
    stream = flow.source(range(10), batch_size=4, epoch_every=1)
    stream.fold(0, lambda total, n: total + n).collect()

    assert cluster.run(flow).batches("out") == [(0, [6]), (1, [22]), (2, [17])]


def test_fold_reduces_on_each_shard_by_itself(cluster):
    flow = Dataflow(num_shards=3)
    flow.source(range(9)).exchange(lambda n: n).fold(0, lambda a, n: a + n).collect()

    assert sorted(cluster.run(flow)["out"]) == [0 + 3 + 6, 1 + 4 + 7, 2 + 5 + 8]


def test_fold_may_change_its_accumulator(cluster):
    def add(seen, n):
        seen.append(n)
        return seen

    flow = Dataflow()
    flow.source(range(6), batch_size=2, epoch_every=1).fold([], add).collect()

    assert cluster.run(flow)["out"] == [[0, 1], [2, 3], [4, 5]]


def test_fold_takes_rows_of_columns(cluster):
    flow = Dataflow()
    rows = flow.source({"x": np.arange(5), "w": np.full(5, 0.5)}).gather()
    rows.fold(0.0, lambda total, row: total + row["x"] * row["w"]).collect()

    assert cluster.run(flow)["out"] == [5.0]


def test_fold_after_routing_takes_records_in_the_order_of_producers(cluster):
    flow = Dataflow(num_shards=4)
    stream = flow.source(lambda shard, _: [[(shard, n)] for n in range(3)])
    stream.gather().fold([], lambda seen, pair: [*seen, pair]).collect()

    in_order = [[(shard, n) for shard in range(4)] for n in range(3)]
    assert cluster.run(flow)["out"] == in_order


def test_fold_of_a_time_without_records_sends_nothing(cluster):
    flow = Dataflow()
    stream = flow.source(range(6), batch_size=2, epoch_every=1)
    stream.filter(lambda n: n not in (2, 3)).fold(0, lambda a, n: a + n).collect()

    assert cluster.run(flow).batches("out") == [(0, [1]), (2, [9])]


def test_fold_on_a_dense_edge_sends_nothing_for_empty_blocks(cluster):
    flow = Dataflow(num_shards=2)
    rows = flow.source(np.arange(6), batch_size=1, epoch_every=1, regular=True)
    dense = rows.exchange(lambda n: 0, dense=True)
    dense.fold(0, lambda a, n: a + int(n)).collect()

    assert cluster.run(flow).batches("out") == [(0, [3]), (1, [5]), (2, [7])]


def test_reduce_counts_words(cluster):
    flow = Dataflow(num_shards=3)
    counts = flow.source(TEXT).reduce(
        lambda w: w, lambda a, b: a + b, value=lambda w: 1
    )
    counts.collect()

    assert Counter(dict(cluster.run(flow)["out"])) == Counter(TEXT)


def test_reduce_merges_what_several_producers_have_of_a_key(cluster):
    flow = Dataflow(num_shards=4)
    spread = flow.source(range(100)).exchange(lambda n: n // 10).map(lambda n: n)
    spread.reduce(lambda n: n % 10, max).collect()

    assert sorted(cluster.run(flow)["out"]) == [(key, 90 + key) for key in range(10)]


def test_reduce_keeps_times_apart(cluster):
    flow = Dataflow(num_shards=2)
    stream = flow.source(range(12), batch_size=4, epoch_every=1)
    stream.reduce(lambda n: n % 2, lambda a, b: a + b).collect()

    found = {t: dict(p) for t, p in by_time(cluster.run(flow).batches("out")).items()}
    assert found == {0: {0: 2, 1: 4}, 1: {0: 10, 1: 12}, 2: {0: 18, 1: 20}}


def test_reduce_sends_keys_in_the_order_of_producers_and_not_of_hashes(cluster):
    words = ["pear", "fig", "plum", "kiwi", "lime"]
    flow = Dataflow(num_shards=4)
    stream = flow.source(lambda shard, _: [[f"{w}-{shard}" for w in words]])
    stream.reduce(lambda w: w, max, num_shards=1).collect()

    keys = [key for key, _ in cluster.run(flow)["out"]]
    assert keys == [f"{w}-{shard}" for shard in range(4) for w in words]


def test_reduce_adds_floats_in_the_same_order_every_time(cluster):
    # Their sum depends on the order of additions, in its last bits.
    values = [0.1 * 7**n for n in range(-9, 9)]
    flow = Dataflow(num_shards=3)
    stream = flow.source(lambda shard, _: [[v * (shard + 1)] for v in values])
    stream.reduce(lambda v: 0, lambda a, b: a + b, num_shards=1).collect()

    found = [total for _, total in cluster.run(flow)["out"]]
    assert found == [v * 1 + v * 2 + v * 3 for v in values]


def test_a_combiner_that_merges_a_thousand_rows_to_one_lets_the_time_pass(cluster):
    flow = Dataflow(num_shards=2)
    rows = flow.source(np.ones(2000), batch_size=1000, epoch_every=1)
    combined = rows.map_batch(lambda block: block.sum(keepdims=True))
    combined.exchange(lambda x: 0).fold(0, lambda a, x: a + int(x)).collect()

    assert cluster.run(flow)["out"] == [2000]


def test_count_counts_records_of_either_container(cluster):
    flow = Dataflow(num_shards=1)
    flow.source(np.zeros((7, 3))).count().collect("rows")
    flow.source(["a", "b"]).count().collect("items")

    result = cluster.run(flow)
    assert (result["rows"], result["items"]) == ([7], [2])


def test_count_sends_nothing_for_empty_times(cluster):
    flow = Dataflow(num_shards=1)
    stream = flow.source(range(6), batch_size=2, epoch_every=1)
    stream.filter(lambda n: n >= 4).count().collect()

    assert cluster.run(flow).batches("out") == [(2, [2])]


def test_state_of_a_time_is_discarded_with_it(cluster):
    flow = Dataflow(num_shards=2)
    stream = flow.source(range(60), batch_size=3, epoch_every=1)
    stream.exchange(lambda n: n).fold(0, lambda a, n: a + n, name="fold").collect("a")
    stream.reduce(lambda n: n, max, name="reduce").collect("b")
    stream.count(name="count").collect("c")

    run = cluster.start(flow)
    run.result()
    for figures in run.metrics()["workers"].values():
        for name in ("fold", "reduce", "count"):
            assert figures["operators"][name]["state_entries"] == 0, name


def test_results_of_a_time_come_before_the_input_ends(cluster):
    flow = Dataflow(num_shards=2)
    sums = flow.input("numbers").reduce(lambda n: n % 3, lambda a, b: a + b)
    sums.probe("done").collect()

    with cluster.start(flow) as run:
        handle = run.input("numbers")
        handle.send([1, 4, 5])
        handle.advance_to(1)
        run.probe("done").wait_until(0, timeout_s=10)
        assert dict(by_time(run.batches("out"))[0]) == {1: 5, 2: 5}
    assert sorted(run.result()["out"]) == [(1, 5), (2, 5)]


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("fold", (0, 1)), ("reduce", (1, max)), ("reduce", (abs, 1))],
)
def test_what_cannot_be_called_is_refused(method, arguments):
    with pytest.raises(GraphError, match=f"'{method}' needs a (function|key)"):
        getattr(Dataflow().source([1]), method)(*arguments)


@settings(max_examples=25, deadline=None)
@given(
    epochs=st.lists(st.lists(st.integers(-50, 50), max_size=8), max_size=5),
    num_shards=st.integers(1, 4),
    modulus=st.integers(1, 5),
)
def test_reduce_equals_its_definition(epochs, num_shards, modulus):
    flow = Dataflow(num_shards=num_shards)

    def share(shard, shards):
        yield from ([n for n in records if n % shards == shard] for records in epochs)

    stream = flow.source(share)
    stream.reduce(lambda n: n % modulus, lambda a, b: a + b).collect()

    expected = {}
    for time, records in enumerate(epochs):
        sums = Counter()
        for n in records:
            sums[n % modulus] += n
        keys = {n % modulus for n in records}
        if keys:
            expected[time] = sorted((key, sums[key]) for key in keys)
    found = by_time(flow.run().batches("out"))
    assert {time: sorted(pairs) for time, pairs in found.items()} == expected
