"""Aggregates of columns by key, against a dictionary and a loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from timelyml import Dataflow
from timelyml.errors import ConfigError, PayloadError, RoutingError
from timelyml.operators import aggregates as module
from timelyml.operators.grouping import Groups

EVERYTHING = {
    "total": ("sum", "x"),
    "mean": ("mean", "x"),
    "least": ("min", "x"),
    "most": ("max", "x"),
    "rows": "count",
}


def defined(keys, values):
    """What aggregating means, one row at a time."""
    groups = {}
    for key, value in zip(keys, values, strict=True):
        groups.setdefault(key, []).append(value)
    return {
        key: (sum(of), math.fsum(of) / len(of), min(of), max(of), len(of))
        for key, of in groups.items()
    }


def found_in(batches, by=("k",)):
    """Aggregates by key; every block must be columns."""
    found = {}
    for _, payload in batches:
        assert all(isinstance(column, np.ndarray) for column in payload.values())
        keys = zip(*(payload[name].tolist() for name in by), strict=True)
        rows = zip(*(payload[n].tolist() for n in EVERYTHING), strict=True)
        for key, row in zip(keys, rows, strict=True):
            assert key not in found
            found[key] = row
    return found


def check(found, expected):
    """Demand equal aggregates; sums of floats may be in another order."""
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        assert found[key] == pytest.approx(row)


@pytest.mark.parametrize("rows", [10, 50_000])
def test_columns_are_aggregated_by_key(cluster, rows):
    rng = np.random.default_rng(rows)
    columns = {"k": rng.integers(-3, 40, rows), "x": rng.integers(-9, 9, rows)}
    flow = Dataflow(num_shards=3)
    flow.source(columns, batch_size=1000).aggregate("k", EVERYTHING).collect()

    found = found_in(cluster.run(flow).batches("out"))
    expected = defined(columns["k"].tolist(), columns["x"].tolist())
    check({key: row for (key,), row in found.items()}, expected)


def test_times_are_kept_apart(cluster):
    columns = {"k": np.array([1, 1, 2, 1]), "x": np.array([1.0, 2.0, 3.0, 4.0])}
    flow = Dataflow(num_shards=1)
    rows = flow.source(columns, batch_size=2, epoch_every=1)
    rows.aggregate("k", {"total": ("sum", "x")}).collect()

    found = [
        (time, payload["k"].tolist(), payload["total"].tolist())
        for time, payload in cluster.run(flow).batches("out")
    ]
    assert found == [(0, [1], [3.0]), (1, [1, 2], [4.0, 3.0])]


def test_keys_come_in_ascending_order(cluster):
    flow = Dataflow(num_shards=1)
    rows = flow.source({"k": np.array(["pear", "fig", "kiwi", "fig"])})
    rows.aggregate("k", {"n": "count"}).collect()

    ((_, payload),) = cluster.run(flow).batches("out")
    assert payload["k"].tolist() == ["fig", "kiwi", "pear"]
    assert payload["n"].tolist() == [2, 1, 1]


def test_several_columns_can_be_the_key(cluster):
    rng = np.random.default_rng(0)
    columns = {
        "a": rng.integers(0, 5, 400),
        "b": rng.choice(["x", "y", "zz"], 400),
        "x": rng.random(400),
    }
    flow = Dataflow(num_shards=3)
    flow.source(columns, batch_size=50).aggregate(["a", "b"], EVERYTHING).collect()

    found = found_in(cluster.run(flow).batches("out"), by=("a", "b"))
    keys = list(zip(columns["a"].tolist(), columns["b"].tolist(), strict=True))
    expected = defined(keys, columns["x"].tolist())
    check(found, expected)


def test_no_key_gives_one_row(cluster):
    flow = Dataflow(num_shards=3)
    rows = flow.source({"x": np.arange(100)})
    rows.aggregate([], {"total": ("sum", "x"), "n": "count"}).collect()

    ((_, payload),) = cluster.run(flow).batches("out")
    assert {n: c.tolist() for n, c in payload.items()} == {"total": [4950], "n": [100]}


def test_rows_of_arrays_are_aggregated_by_element(cluster):
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    flow = Dataflow(num_shards=2)
    rows = flow.source({"k": np.array([0, 1] * 4), "x": x})
    rows.aggregate(
        "k", {"s": ("sum", "x"), "m": ("mean", "x"), "h": ("max", "x")}
    ).collect()

    for _, payload in cluster.run(flow).batches("out"):
        for row, key in enumerate(payload["k"]):
            mine = x[int(key) :: 2]
            assert np.array_equal(payload["s"][row], mine.sum(0))
            assert np.array_equal(payload["m"][row], mine.mean(0))
            assert np.array_equal(payload["h"][row], mine.max(0))


def test_a_hot_key_crosses_the_exchange_as_one_row_per_shard(cluster):
    flow = Dataflow(num_shards=2)
    rows = flow.source({"k": np.zeros(200_000, np.int64), "x": np.ones(200_000)})
    rows.aggregate("k", {"total": ("sum", "x")}, name="hot").collect()

    run = cluster.start(flow)
    ((_, payload),) = run.result().batches("out")
    assert payload["total"].tolist() == [200_000.0]
    figures = run.metrics()
    assert figures["channels"]["hot-combine -> hot"]["records"] == 2
    for name in ("hot", "hot-combine"):
        assert figures["operators"][name]["state_entries"] == 0


def test_tiny_batches_without_end_pile_up_no_memory(cluster, monkeypatch):
    def share(shard, num_shards):
        for n in range(shard, 6000, num_shards):
            yield 0, {"k": np.array([n % 7]), "x": np.array([n])}

    flow = Dataflow(num_shards=2)
    flow.source(share).aggregate("k", EVERYTHING).collect()

    found = found_in(cluster.run(flow).batches("out"))
    expected = defined([n % 7 for n in range(6000)], range(6000))
    check({key: row for (key,), row in found.items()}, expected)


@pytest.mark.parametrize(
    ("columns", "error", "problem"),
    [
        ({"j": [1], "x": [1]}, PayloadError, "expected 'k' among them"),
        ({"k": [1]}, PayloadError, "expected 'x' among them"),
        ({"k": [1], "x": ["a"]}, PayloadError, "no sum of column 'x'; got <U1"),
        ({"k": [1.0, np.nan], "x": [1, 2]}, RoutingError, "'k'; got nan at row 1"),
        (
            {"k": np.array(["2020", "NaT"], "M8[D]"), "x": [1, 2]},
            RoutingError,
            "'k'; got NaT at row 1",
        ),
        ({"k": [[1, 2]], "x": [1]}, RoutingError, r"'k'; got rows of shape \[2\]"),
    ],
)
def test_columns_that_do_not_fit_are_named(cluster, columns, error, problem):
    flow = Dataflow(num_shards=1)
    rows = flow.source({name: np.asarray(c) for name, c in columns.items()})
    rows = rows.map_batch(lambda block: block)  # whose columns nobody knows beforehand
    rows.aggregate("k", {"total": ("sum", "x")}).collect()

    with pytest.raises(error, match=problem):
        cluster.run(flow)


def test_records_are_refused_where_columns_are_needed(cluster):
    flow = Dataflow()
    flow.source([{"k": 1, "x": 2}]).aggregate("k", EVERYTHING).collect()

    with pytest.raises(PayloadError, match="no columns by name; got list"):
        cluster.run(flow)


@pytest.mark.parametrize(
    ("aggregates", "problem"),
    [
        ({"a": "sum"}, "cannot make column 'a'; got 'sum'"),
        ({"a": ("median", "x")}, "cannot make column 'a'"),
        ({"a": ("sum",)}, "cannot make column 'a'"),
        ({"k": "count"}, "two columns of one name: .'k'"),
        ({}, "got none; expected at least one"),
    ],
)
def test_aggregates_that_mean_nothing_are_refused(aggregates, problem):
    with pytest.raises(ConfigError, match=problem):
        Dataflow().source({"k": np.arange(2)}).aggregate("k", aggregates)


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.lists(
        st.lists(st.tuples(st.integers(-4, 4), st.integers(-50, 50)), max_size=8),
        max_size=8,
    ),
    num_shards=st.integers(1, 3),
    direct=st.integers(0, 9),
    most=st.integers(1, 9),
)
def test_combining_changes_no_aggregate(blocks, num_shards, direct, most):
    def share(shard, shards):
        for records in blocks[shard::shards]:
            rows = np.asarray(records, np.int64).reshape(-1, 2)
            yield 0, {"k": rows[:, 0], "x": rows[:, 1]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "DIRECT_ROWS", direct)
        patch.setattr(module, "MOST_ROWS", most)
        flow = Dataflow(num_shards=num_shards)
        flow.source(share).aggregate("k", EVERYTHING).collect()
        found = found_in(flow.run().batches("out"))

    records = [record for of_block in blocks for record in of_block]
    expected = defined([k for k, _ in records], [x for _, x in records])
    check({key: row for (key,), row in found.items()}, expected)


keys_of_any_kind = st.one_of(
    hnp.arrays(np.int8, st.integers(1, 30)),
    hnp.arrays(np.uint64, st.integers(1, 30)),
    hnp.arrays(np.int64, st.integers(1, 30)),
    hnp.arrays(np.int64, st.integers(1, 30), elements=st.integers(5, 9)),
    hnp.arrays(np.float64, st.integers(1, 30), elements=st.floats(-2, 2)),
    hnp.arrays("U2", st.integers(1, 30)),
    hnp.arrays(np.bool_, st.integers(1, 30)),
)


@settings(max_examples=200, deadline=None)
@given(keys_of_any_kind, st.integers(0, 2**32))
def test_groups_equal_their_definition(keys, seed):
    x = np.random.default_rng(seed).integers(-99, 99, len(keys))
    groups = Groups([keys], len(keys))

    expected = defined(keys.tolist(), x.tolist())
    assert groups.keys[0].dtype == keys.dtype
    assert groups.keys[0].tolist() == sorted(expected)
    rows = zip(
        groups.sums(x).tolist(),
        groups.least(x).tolist(),
        groups.greatest(x).tolist(),
        groups.counts.tolist(),
        strict=True,
    )
    for key, (total, least, most, count) in zip(sorted(expected), rows, strict=True):
        whole = expected[key]
        assert (total, least, most, count) == (whole[0], *whole[2:])


def test_integer_sums_are_exact_beyond_what_floats_hold():
    big = np.array([2**60, 1, 2**60, 1])
    groups = Groups([np.array([0, 0, 0, 0])], 4)

    assert groups.sums(big).tolist() == [2**61 + 2]


def test_times_have_extremes():
    days = np.array(["2020-01-03", "2020-01-01", "2020-01-02"], "M8[D]")
    groups = Groups([np.array([5, 5, 7])], 3)

    assert groups.least(days).tolist() == [days[1].item(), days[2].item()]


def test_nan_values_count_as_nan():
    groups = Groups([np.array([0, 0, 1])], 3)
    x = np.array([1.0, np.nan, 2.0])

    for found in (groups.sums(x), groups.least(x), groups.greatest(x)):
        assert np.array_equal(found, [np.nan, 2.0], equal_nan=True)


def test_signed_and_unsigned_rows_are_aggregated_as_integers():
    flow = Dataflow(num_shards=1)
    signed = {"k": np.array([1, -2]), "x": np.array([2**62 + 1, -1])}
    unsigned = {"k": np.array([1, 3], np.uint64), "x": np.array([1, 7], np.uint64)}
    rows = flow.source(signed).concat(flow.source(unsigned))
    rows.aggregate("k", {"total": ("sum", "x"), "most": ("max", "x")}).collect()

    ((_, found),) = flow.run().batches("out")
    assert {name: values.tolist() for name, values in found.items()} == {
        "k": [-2, 1, 3],
        "total": [-1, 2**62 + 2, 7],
        "most": [-1, 2**62 + 1, 7],
    }
