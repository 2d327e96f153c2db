"""Keys, routing by them, rebalancing, and combining before the exchange."""

from __future__ import annotations

import datetime as dt
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.operators.test_aggregation import by_time
from timelyml import Dataflow
from timelyml.errors import GraphError, RoutingError
from timelyml.operators import reduction

TEXT = "the cat and the dog and the bird saw one other cat"
WORDS = TEXT.split()


def tag(shard, delivery):
    shard.output().send(delivery.time, [(shard.index, r) for r in delivery.payload])


def tag_rows(shard, delivery):
    shard.output().send(delivery.time, [(shard.index, delivery.payload)])


def test_key_by_sends_records_of_one_key_to_one_shard(cluster):
    flow = Dataflow(num_shards=3)
    flow.source(WORDS).key_by(lambda word: word).unary(tag).collect()

    found = cluster.run(flow)["out"]
    assert Counter(pair for _, pair in found) == Counter((w, w) for w in WORDS)
    shards = defaultdict(set)
    for shard, (key, _) in found:
        shards[key].add(shard)
    assert all(len(of_key) == 1 for of_key in shards.values())


def test_key_by_a_column_routes_rows_as_they_are(cluster):
    columns = {"key": np.arange(12) % 5, "x": np.arange(12.0)}
    flow = Dataflow(num_shards=3)
    flow.source(columns).key_by("key").unary(tag_rows).collect()

    rows = []
    for shard, payload in cluster.run(flow)["out"]:
        assert isinstance(payload["x"], np.ndarray)
        rows += [(int(k), float(x)) for k, x in zip(*payload.values(), strict=True)]
        assert {int(k) % 3 for k in payload["key"]} == {shard}
    assert sorted(rows) == sorted(
        zip(columns["key"].tolist(), columns["x"].tolist(), strict=True)
    )


def test_a_column_that_is_missing_is_named(cluster):
    flow = Dataflow(num_shards=2)
    flow.source({"x": np.arange(3)}).map_batch(lambda p: p).key_by("user").collect()

    with pytest.raises(KeyError, match="user"):
        cluster.run(flow)


def test_what_is_no_key_is_refused():
    with pytest.raises(GraphError, match="'key_by' needs a key; got 3"):
        Dataflow().source([1]).key_by(3)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 100])
def test_rebalance_spreads_evenly(cluster, rows):
    flow = Dataflow(num_shards=3)
    flow.source(range(rows)).rebalance().count().collect()

    counts = cluster.run(flow)["out"]
    assert sum(counts) == rows
    assert max(counts) - min([*counts, *[0] * (3 - len(counts))]) <= 1


def test_rebalance_takes_turns_over_tiny_blocks(cluster):
    flow = Dataflow(num_shards=4)
    stream = flow.source(range(40), batch_size=1)
    stream.rebalance().unary(tag).collect()

    found = cluster.run(flow)["out"]
    assert Counter(shard for shard, _ in found) == dict.fromkeys(range(4), 10)
    assert sorted(record for _, record in found) == list(range(40))


def test_rebalance_may_change_the_number_of_shards(cluster):
    flow = Dataflow(num_shards=1)
    flow.source(np.arange(50)).rebalance(num_shards=5).count().collect()

    assert cluster.run(flow)["out"] == [10] * 5


def test_rebalance_feeds_keyed_operators(cluster):
    flow = Dataflow(num_shards=2)
    flow.source(WORDS).rebalance().count(lambda word: word).collect()

    assert dict(cluster.run(flow)["out"]) == Counter(WORDS)


@pytest.mark.parametrize("container", ["records", "columns"])
def test_parts_by_block_equal_parts_by_record(cluster, container):
    numbers = np.arange(30)
    flow = Dataflow()
    data = numbers if container == "columns" else numbers.tolist()
    parts = flow.source(data).partition(
        3, lambda block: np.asarray(block) % 3, by_batch=True
    )
    for index, part in enumerate(parts):
        part.map(int).collect(str(index))
    odd, even = flow.source(data).branch(
        lambda block: np.asarray(block) % 2 == 1, by_batch=True
    )
    odd.map(int).collect("odd")
    even.map(int).collect("even")

    found = cluster.run(flow)
    for index in range(3):
        assert found[str(index)] == list(range(index, 30, 3))
    assert found["odd"] == list(range(1, 30, 2))
    assert found["even"] == list(range(0, 30, 2))


def test_parts_by_block_must_be_one_integer_per_row(cluster):
    flow = Dataflow()
    flow.source([1, 2, 3]).partition(2, lambda block: [0], by_batch=True)[0].collect()

    with pytest.raises(RoutingError, match=r"one part for each row; got shape \[1\]"):
        cluster.run(flow)


def test_count_by_key(cluster):
    flow = Dataflow(num_shards=3)
    flow.source(WORDS).count(lambda word: word).collect()

    assert dict(cluster.run(flow)["out"]) == Counter(WORDS)


def test_count_by_the_name_of_a_field(cluster):
    flow = Dataflow(num_shards=2)
    flow.source([{"user": w} for w in WORDS]).count("user").collect("dicts")
    flow.source({"n": np.arange(9) % 2}).count("n").collect("columns")

    found = cluster.run(flow)
    assert dict(found["dicts"]) == Counter(WORDS)
    assert {int(k): n for k, n in found["columns"]} == {0: 5, 1: 4}


@pytest.mark.parametrize("rows", [10, 30_000])
def test_counting_by_a_column_works_on_whole_blocks(cluster, rows):
    keys = np.random.default_rng(rows).integers(-3, 9, rows)
    flow = Dataflow(num_shards=2)
    flow.source({"k": keys}, batch_size=1000).count("k").collect()

    found = cluster.run(flow)["out"]
    assert dict(found) == Counter(keys.tolist())
    assert all(type(key) is int for key, _ in found)


def test_a_hot_key_crosses_the_exchange_once_per_shard(cluster):
    flow = Dataflow(num_shards=2)
    numbers = flow.source(lambda shard, _: [[1] * 50_000], name="numbers")
    numbers.count(lambda n: n, name="hot").collect()

    run = cluster.start(flow)
    assert run.result()["out"] == [(1, 100_000)]
    crossed = run.metrics()["channels"]["hot-combine -> hot"]
    assert crossed["records"] == 2


def test_a_few_records_do_not_wait_for_the_end_of_their_time(cluster):
    flow = Dataflow(num_shards=1)
    records = flow.input("numbers", num_shards=1)
    records.reduce(lambda n: n, max, name="max").collect()

    with cluster.start(flow) as run:
        run.input("numbers").send([1, 2, 3])
        run.input("numbers").flush(timeout_s=10)
        wait_until_consumed(run, "max", 3)
    assert run.result()["out"] == [(1, 1), (2, 2), (3, 3)]


def wait_until_consumed(run, operator, count):
    """The second operator has them, although the first could still get more."""
    for _ in range(1000):
        if run.metrics()["operators"][operator]["records_in"] >= count:
            return
    raise AssertionError(run.metrics()["operators"][operator])


def test_more_keys_than_combining_keeps_are_sent_before_the_end(cluster, monkeypatch):
    monkeypatch.setattr(reduction, "MOST_KEYS", 100)
    monkeypatch.setattr(reduction, "DIRECT_RECORDS", 10)
    flow = Dataflow(num_shards=2)
    numbers = flow.source(range(5000), batch_size=250)
    numbers.reduce(lambda n: n % 1000, lambda a, b: a + b).collect()

    expected = Counter()
    for n in range(5000):
        expected[n % 1000] += n
    assert dict(cluster.run(flow)["out"]) == expected


UNHASHABLE = {
    "reduce": lambda rows: rows.reduce(lambda r: r, lambda a, b: a),
    "count": lambda rows: rows.count(lambda r: r),
    "distinct": lambda rows: rows.distinct(),
}


@pytest.mark.parametrize("kind", UNHASHABLE)
@pytest.mark.parametrize("num_before", [0, 20])
def test_a_key_that_cannot_be_one_names_the_operator(kind, num_before, monkeypatch):
    monkeypatch.setattr(reduction, "DIRECT_RECORDS", 10)
    flow = Dataflow(num_shards=1)
    records = [*range(num_before), [7]]
    UNHASHABLE[kind](flow.source(records, batch_size=1)).collect()

    match = rf"operator '{kind}-combine' failed .*; got \[7\] .*: unhashable type"
    with pytest.raises(RoutingError, match=match):
        flow.run()


def test_a_million_records_in_tiny_batches_leave_no_state(cluster):
    flow = Dataflow(num_shards=2)
    tiny = flow.source(range(20_000), batch_size=1, epoch_every=50)
    tiny.count(lambda n: n % 3, name="tiny").collect()

    run = cluster.start(flow)
    totals = Counter()
    for key, number in run.result()["out"]:
        totals[key] += number
    assert totals == Counter(n % 3 for n in range(20_000))
    for name in ("tiny", "tiny-combine"):
        assert run.metrics()["operators"][name]["state_entries"] == 0


@settings(max_examples=30, deadline=None)
@given(
    epochs=st.lists(st.lists(st.integers(-9, 9), max_size=20), max_size=4),
    num_shards=st.integers(1, 3),
    direct=st.integers(0, 12),
    most_keys=st.integers(1, 12),
)
def test_combining_changes_no_result(epochs, num_shards, direct, most_keys):
    def share(shard, shards):
        yield from ([n for n in records if n % shards == shard] for records in epochs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "DIRECT_RECORDS", direct)
        patch.setattr(reduction, "MOST_KEYS", most_keys)
        flow = Dataflow(num_shards=num_shards)
        stream = flow.source(share)
        stream.reduce(lambda n: n % 4, lambda a, b: a + b).collect("sums")
        stream.count(lambda n: n % 4).collect("counts")
        result = flow.run()

    sums, counts = by_time(result.batches("sums")), by_time(result.batches("counts"))
    for time, records in enumerate(epochs):
        expected = defaultdict(list)
        for n in records:
            expected[n % 4].append(n)
        assert dict(sums.get(time, [])) == {k: sum(v) for k, v in expected.items()}
        assert dict(counts.get(time, [])) == {k: len(v) for k, v in expected.items()}


def test_moments_of_any_unit_are_counted_as_one_key(cluster):
    days = np.array(["1970-01-01", "1970-01-02", "NaT"], "M8[D]")
    seconds = np.array(["1970-01-01T00:00:00", "1970-01-02T00:00:01"], "M8[s]")
    fine = np.array(["1970-01-01", "1970-01-01T00:00:00.000000001"], "M8[ns]")
    far = np.array(["30000-01-01"], "M8[D]")
    units = [days, seconds, fine, far, fine.astype("M8[ps]"), far.astype("M8[s]")]
    flow = Dataflow(num_shards=2)
    sources = [flow.source({"at": column}, num_shards=1) for column in units]
    sources[0].concat(*sources[1:]).count("at").collect()

    day, nano = np.datetime64("1970-01-01", "us").item(), fine[1]
    assert dict(cluster.run(flow)["out"]) == {
        day: 4,
        day + dt.timedelta(days=1): 1,
        day + dt.timedelta(days=1, seconds=1): 1,
        None: 1,
        nano: 2,
        np.datetime64("30000-01-01", "s"): 2,
    }
