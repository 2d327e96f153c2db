"""Two streams, joined by key: of one time, and across times."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.operators.test_distinct import in_epochs
from timelyml import Dataflow
from timelyml.errors import ConfigError, GraphError, PayloadError
from timelyml.operators import join_columns

PRICES = [("fig", 3), ("kiwi", 2), ("fig", 4)]
STOCK = [("fig", 10), ("plum", 7), ("fig", 11)]


def joined(left, right, how):
    """The definition: every two records of equal keys; None for a partner."""
    found = [(k, a, b) for k, a in left for other, b in right if k == other]
    if how != "inner":
        keys = {k for k, _ in right}
        found += [(k, a, None) for k, a in left if k not in keys]
    if how == "outer":
        keys = {k for k, _ in left}
        found += [(k, None, b) for k, b in right if k not in keys]
    return Counter(found)


@pytest.mark.parametrize("how", ["inner", "left", "outer"])
def test_records_of_one_time_are_joined(cluster, how):
    flow = Dataflow(num_shards=3)
    left, right = flow.source(in_epochs([PRICES])), flow.source(in_epochs([STOCK]))
    left.join(right, how=how).collect()

    assert Counter(cluster.run(flow)["out"]) == joined(PRICES, STOCK, how)


def test_records_of_two_times_do_not_meet(cluster):
    flow = Dataflow(num_shards=2)
    left = flow.source(in_epochs([[("a", 1)], [("a", 2)]]))
    right = flow.source(in_epochs([[], [("a", 9)]]))
    left.join(right, how="outer", name="join").collect()

    run = cluster.start(flow)
    assert run.result().batches("out") == [
        (0, [("a", 1, None)]),
        (1, [("a", 2, 9)]),
    ]
    assert run.metrics()["operators"]["join"]["state_entries"] == 0


def test_whole_records_are_joined_by_functions_or_fields(cluster):
    flow = Dataflow(num_shards=2)
    users = flow.source([{"id": 1, "name": "Ann"}, {"id": 2, "name": "Bo"}])
    visits = flow.source([{"user": 1, "page": "/"}, {"user": 1, "page": "/x"}])
    users.join(visits, key="id", right_key="user").map(
        lambda r: (r[0], r[1]["name"], r[2]["page"])
    ).collect("fields")
    users.join(visits, key=lambda u: u["id"], right_key=lambda v: v["user"]).map(
        lambda r: (r[0], r[1]["name"], r[2]["page"])
    ).collect("functions")

    found = cluster.run(flow)
    expected = [(1, "Ann", "/"), (1, "Ann", "/x")]
    assert found["fields"] == found["functions"] == expected


def test_one_hot_key_streams_its_results(cluster):
    flow = Dataflow(num_shards=2)
    left = flow.source([("hot", n) for n in range(400)])
    right = flow.source([("hot", n) for n in range(300)])
    left.join(right).map(lambda r: 1).fold(0, lambda a, b: a + b).collect()

    assert cluster.run(flow)["out"] == [400 * 300]


def rows_of(batches):
    """Joined rows as tuples of plain values, NaN as None."""
    found = []
    for _, payload in batches:
        assert all(isinstance(column, np.ndarray) for column in payload.values())
        rows = zip(*(c.tolist() for c in payload.values()), strict=True)
        found += [tuple(None if v != v else v for v in row) for row in rows]  # noqa: PLR0124  NaN
    return Counter(found)


@pytest.mark.parametrize("how", ["inner", "left", "outer"])
@pytest.mark.parametrize("rows_per_block", [2, 65536])
def test_columns_are_joined_to_columns(cluster, how, rows_per_block, monkeypatch):
    monkeypatch.setattr(join_columns, "ROWS_PER_BLOCK", rows_per_block)
    rng = np.random.default_rng(1)
    left = {"k": rng.integers(0, 9, 30), "a": np.arange(30.0)}
    right = {"k": rng.integers(4, 13, 20), "b": np.arange(20.0)}
    flow = Dataflow(num_shards=2)
    flow.source(left).gather().map_batch(lambda p: p).join(
        flow.source(right).gather().map_batch(lambda p: p),
        key="k",
        how=how,
        num_shards=1,
    ).collect()

    expected = joined(
        list(zip(*(c.tolist() for c in left.values()), strict=True)),
        list(zip(*(c.tolist() for c in right.values()), strict=True)),
        how,
    )
    assert rows_of(cluster.run(flow).batches("out")) == expected


def test_columns_of_one_name_get_a_suffix(cluster):
    flow = Dataflow(num_shards=1)
    left = flow.source({"k": np.array([1, 2]), "x": np.array([10, 20])})
    right = flow.source({"k": np.array([2, 1]), "x": np.array([7, 8])})
    left.join(right, key="k", suffix="_b").collect()

    ((_, payload),) = cluster.run(flow).batches("out")
    assert {name: c.tolist() for name, c in payload.items()} == {
        "k": [1, 2],
        "x": [10, 20],
        "x_b": [8, 7],
    }


def test_a_column_without_nan_needs_a_value_for_none(cluster):
    flow = Dataflow(num_shards=1)
    left = flow.source({"k": np.array([1, 2])})
    right = flow.source({"k": np.array([1]), "n": np.array([5])})
    left.join(right, key="k", how="left").collect()

    with pytest.raises(
        PayloadError, match=r"no value for|without a value for column 'n'"
    ):
        cluster.run(flow)

    flow = Dataflow(num_shards=1)
    left = flow.source({"k": np.array([1, 2])})
    right = flow.source({"k": np.array([1]), "n": np.array([5])})
    left.join(right, key="k", how="left", fill={"n": -1}).collect()
    ((_, payload),) = cluster.run(flow).batches("out")
    assert payload["n"].tolist() == [5, -1]


def test_what_a_column_cannot_hold_does_not_fill_it():
    flow = Dataflow(num_shards=1)
    left = flow.source({"k": np.array([1, 2])})
    right = flow.source({"k": np.array([1]), "n": np.array([5], np.uint64)})
    left.join(right, key="k", how="left", fill={"n": -1}).collect()

    with pytest.raises(PayloadError, match=r"cannot fill column 'n'; got -1 .* uint64"):
        flow.run()


def test_keys_of_two_kinds_are_refused_by_name(cluster):
    flow = Dataflow(num_shards=1)
    left = flow.source({"k": np.array([1, 2])})
    right = flow.source({"k": np.array(["1", "2"])})
    left.join(right, key="k").collect()

    with pytest.raises(PayloadError, match="keys of two kinds; got 'k' of int64"):
        cluster.run(flow)


TWO_KINDS = {
    "units of time": (
        np.array(["2020-01-01", "2020-01-02", "2020-01-03"], "M8[D]"),
        np.array(["2020-01-01T00", "2020-01-02T01", "2020-01-03T00"], "M8[ns]"),
    ),
    "signs": (np.array([1, 2**60], np.uint64), np.array([-1, 1, 2**60 + 1])),
    "floats": (np.array([1, 2**53 + 1]), np.array([1.0, 2.0**53])),
}


@pytest.mark.parametrize("across_times", [False, True])
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize(("lefts", "rights"), TWO_KINDS.values(), ids=TWO_KINDS)
def test_keys_of_two_types_meet_exactly_if_they_are_equal(
    lefts, rights, num_shards, across_times
):
    flow = Dataflow(num_shards=num_shards)
    left = flow.source({"k": lefts, "x": np.arange(len(lefts))})
    right = flow.source({"k": rights, "y": np.arange(len(rights))})
    left.join(right, key="k", across_times=across_times).collect()

    found = {(int(row["x"]), int(row["y"])) for row in flow.run()["out"]}
    times = lefts.dtype.kind == "M"
    pairs = itertools.product(enumerate(lefts), enumerate(rights))
    assert found == {
        (x, y)
        for (x, a), (y, b) in pairs
        if (a == b if times else a.item() == b.item())
    }
    assert found


def test_records_of_all_times_meet_once_at_the_later_one(cluster):
    flow = Dataflow(num_shards=2)
    left = flow.source(in_epochs([[("a", 1)], [], [("a", 2), ("b", 3)]]))
    right = flow.source(in_epochs([[], [("a", 8)], [("b", 9)], [("a", 7)]]))
    left.join(right, across_times=True).collect()

    found = {}
    for time, payload in cluster.run(flow).batches("out"):
        found.setdefault(time, Counter()).update(payload)
    assert found == {
        1: Counter([("a", 1, 8)]),
        2: Counter([("a", 2, 8), ("b", 3, 9)]),
        3: Counter([("a", 1, 7), ("a", 2, 7)]),
    }


def test_what_is_too_old_to_meet_anything_is_forgotten(cluster):
    flow = Dataflow(num_shards=2)
    epochs = [[(n, "left")] for n in range(500)]
    others = [[(n - 1, "right")] for n in range(500)]
    left, right = flow.source(in_epochs(epochs)), flow.source(in_epochs(others))
    left.join(right, across_times=True, ttl_epochs=2, name="join").collect()

    run = cluster.start(flow)
    assert len(run.result()["out"]) == 499
    assert run.metrics()["operators"]["join"]["state_entries"] == 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"how": "full"}, "how='full'; expected 'inner'"),
        ({"ttl_epochs": 3}, "ttl_epochs without across_times"),
        ({"how": "left", "across_times": True}, "across times without end"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, problem):
    flow = Dataflow()
    with pytest.raises(ConfigError, match=f"'join' cannot join like this; .*{problem}"):
        flow.source([(1, 2)]).join(flow.source([(1, 3)]), **options)


def test_a_time_to_live_inside_a_scope_is_refused(cluster):
    flow = Dataflow()

    def body(stream):
        again = stream.join(stream, across_times=True, ttl_epochs=1)
        return again.map(lambda r: (r[0], r[1])).branch(lambda r: False)

    flow.source([("a", 1)]).iterate(body).collect()
    with pytest.raises(GraphError, match="a time to live inside a scope"):
        cluster.run(flow)


def meetings(lefts, rights, how, ttl):
    """The definition, by brute force: results with their times."""
    found = []
    for t, records in enumerate(lefts):
        for key, value in records:
            near = [
                (u, other)
                for u, others in enumerate(rights)
                for k, other in others
                if k == key and (ttl is None or abs(t - u) <= ttl)
            ]
            found += [(max(t, u), (key, value, other)) for u, other in near]
            if not near and how != "inner":
                found.append((t + ttl, (key, value, None)))
    if how == "outer":
        for u, others in enumerate(rights):
            for key, other in others:
                if not any(
                    k == key and abs(t - u) <= ttl
                    for t, records in enumerate(lefts)
                    for k, _ in records
                ):
                    found.append((u + ttl, (key, None, other)))
    return Counter(found)


sides = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=4), max_size=6
)


@settings(max_examples=60, deadline=None)
@given(
    lefts=sides,
    rights=sides,
    how=st.sampled_from(["inner", "left", "outer"]),
    ttl=st.none() | st.integers(0, 3),
    num_shards=st.integers(1, 3),
)
def test_a_join_across_times_equals_its_definition(lefts, rights, how, ttl, num_shards):
    how = "inner" if ttl is None else how
    flow = Dataflow(num_shards=num_shards)
    left, right = flow.source(in_epochs(lefts)), flow.source(in_epochs(rights))
    left.join(right, how=how, across_times=True, ttl_epochs=ttl).collect()

    found = Counter()
    for time, payload in flow.run().batches("out"):
        found.update((time, record) for record in payload)
    assert found == meetings(lefts, rights, how, ttl)


def columns_in_epochs(epochs, name):
    """As `in_epochs`, as columns; epochs come in blocks of two rows."""

    def read(shard, num_shards):
        for epoch, records in enumerate(epochs):
            mine = records[shard::num_shards]
            for start in range(0, max(len(mine), 1), 2):
                part = mine[start : start + 2]
                yield (
                    epoch,
                    {
                        "k": np.array([key for key, _ in part], int),
                        name: np.array([value for _, value in part], int),
                    },
                )

    return read


def joined_rows(batches):
    """Rows of joined columns with their times, -1 as None."""
    return Counter(
        (time, tuple(None if value == -1 else value for value in row))
        for time, payload in batches
        for row in zip(*(payload[name].tolist() for name in "kab"), strict=True)
    )


def joined_columns(run, lefts, rights, how, ttl, *, num_shards):
    flow = Dataflow(num_shards=num_shards)
    left = flow.source(columns_in_epochs(lefts, "a"))
    right = flow.source(columns_in_epochs(rights, "b"))
    left.join(
        right,
        key="k",
        how=how,
        across_times=True,
        ttl_epochs=ttl,
        fill={"a": -1, "b": -1},
        name="join",
    ).collect()
    return run(flow)


many_rows = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=7), max_size=7
)


@settings(max_examples=80, deadline=None)
@given(
    lefts=many_rows,
    rights=many_rows,
    how=st.sampled_from(["inner", "left", "outer"]),
    ttl=st.none() | st.integers(0, 3),
    num_shards=st.integers(1, 3),
)
def test_columns_joined_across_times_equal_the_definition(
    lefts, rights, how, ttl, num_shards
):
    how = "inner" if ttl is None else how
    began = [
        next((n for n, rows in enumerate(side) if rows), None)
        for side in (lefts, rights)
    ]
    if None in began or abs(began[0] - began[1]) > (ttl or 0):
        how = "inner"  # names of columns are not known when the first rows expire

    def run(flow):
        return flow.run()

    result = joined_columns(run, lefts, rights, how, ttl, num_shards=1)
    expected = meetings(lefts, rights, how, ttl)
    assert joined_rows(result.batches("out")) == expected
    if how == "inner":  # elsewhere a shard may know one side only
        result = joined_columns(run, lefts, rights, how, ttl, num_shards=num_shards)
        assert joined_rows(result.batches("out")) == expected


@pytest.mark.parametrize("rows_per_block", [2, 65536])
@pytest.mark.parametrize(("how", "ttl"), [("inner", None), ("left", 1), ("outer", 2)])
def test_columns_are_joined_across_times_everywhere(
    cluster, how, ttl, rows_per_block, monkeypatch
):
    monkeypatch.setattr(join_columns, "ROWS_PER_BLOCK", rows_per_block)
    random = np.random.default_rng(3)
    lefts, rights = (
        [
            [(int(k), int(v)) for k, v in random.integers(0, 5, (n, 2))]
            for n in (6, 0, 3, 12, 1)
        ]
        for _ in range(2)
    )
    result = joined_columns(cluster.run, lefts, rights, how, ttl, num_shards=1)

    assert joined_rows(result.batches("out")) == meetings(lefts, rights, how, ttl)


def test_columns_that_are_too_old_to_meet_anything_are_forgotten(cluster):
    flow = Dataflow(num_shards=2)
    lefts = [[(n, n)] for n in range(100)]
    rights = [[(n - 1, n)] for n in range(100)]
    left = flow.source(columns_in_epochs(lefts, "a"))
    right = flow.source(columns_in_epochs(rights, "b"))
    options = {"key": "k", "across_times": True, "ttl_epochs": 2}
    left.join(right, **options, name="join").count().collect()

    run = cluster.start(flow)
    assert sum(run.result()["out"]) == 99
    kept = run.metrics()["operators"]["join"]["state_entries"]
    assert kept <= 2 * 2  # which columns there are, on each shard


def test_records_among_columns_make_records_of_all(cluster):
    epochs = [[(1, 10), (2, 20)], [(1, 11)], [(2, 21)]]

    def read(shard, num_shards):
        blocks = list(columns_in_epochs(epochs, "a")(shard, num_shards))
        for epoch, block in blocks:
            rows = zip(*(c.tolist() for c in block.values()), strict=True)
            as_records = [{"k": k, "a": a} for k, a in rows]
            yield epoch, block if epoch != 1 else as_records

    flow = Dataflow(num_shards=2)
    left = flow.source(read)
    right = flow.source(columns_in_epochs([[], [], [(1, 5), (2, 6)]], "b"))
    left.join(
        right, key="k", how="outer", across_times=True, ttl_epochs=5, num_shards=1
    ).map(lambda r: (int(r[0]), int(r[1]["a"]), int(r[2]["b"]))).collect()

    assert sorted(cluster.run(flow)["out"]) == [
        (1, 10, 5),
        (1, 11, 5),
        (2, 20, 6),
        (2, 21, 6),
    ]


@pytest.mark.parametrize("as_columns", [True, False])
def test_rounds_of_a_loop_are_joined_across_times(cluster, as_columns):
    flow = Dataflow(num_shards=2)
    rows = flow.source({"k": np.array([1, 1, 2]), "n": np.array([3, 2, 1])})

    def body(inside):
        if as_columns:
            joined = inside.join(inside, key="k", across_times=True)
            pairs = joined.map(lambda r: (int(r["k"]), int(r["n"]), int(r["n_right"])))
        else:
            records = inside.map(lambda r: (int(r["k"]), int(r["n"])))
            pairs = records.join(records, across_times=True)
        fewer = inside.map_batch(lambda c: {"k": c["k"], "n": c["n"] - 1})
        return fewer.filter(lambda c: c["n"] > 0, by_batch=True), pairs

    rows.iterate(body).collect("pairs")

    rounds = [[(1, 3), (1, 2), (2, 1)], [(1, 2), (1, 1)], [(1, 1)]]
    everything = [row for each in rounds for row in each]
    expected = [
        (k, a, b) for k, a in everything for other, b in everything if k == other
    ]
    assert Counter(cluster.run(flow)["pairs"]) == Counter(expected)
