"""Equal records, once in each time or once in all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.operators.test_aggregation import by_time
from timelyml import Dataflow
from timelyml.errors import ConfigError


def in_epochs(epochs):
    """A source whose shards share the records of each epoch."""

    def share(shard, num_shards):
        yield from (records[shard::num_shards] for records in epochs)

    return share


def test_equal_records_of_a_time_are_sent_once(cluster):
    flow = Dataflow(num_shards=3)
    stream = flow.source(in_epochs([[1, 2, 1, 3, 2], [3, 3, 3], []]))
    stream.distinct().collect()

    found = by_time(cluster.run(flow).batches("out"))
    assert {time: sorted(records) for time, records in found.items()} == {
        0: [1, 2, 3],
        1: [3],
    }


def test_the_first_record_of_a_key_is_the_one_that_is_sent(cluster):
    flow = Dataflow(num_shards=1)
    flow.source(["fig", "kiwi", "plum", "pea"]).distinct(len).collect()

    assert cluster.run(flow)["out"] == ["fig", "kiwi"]


def test_results_come_before_the_time_is_over(cluster):
    flow = Dataflow(num_shards=1)
    flow.input("numbers", num_shards=1).distinct().unary(
        lambda shard, delivery: shard.emit("seen", list(delivery.payload))
    )
    seen = []
    with cluster.start(flow, on_message=lambda *message: seen.append(message[-1])) as r:
        r.input("numbers").send([5, 5])
        while not seen:
            r.metrics()
    assert seen == [[5]]


@pytest.mark.parametrize(
    "columns",
    [
        np.array([3, 1, 3, 2, 1]),
        np.array([[1.0, 2.0], [1.0, 2.5], [1.0, 2.0]]),
        {"a": np.array([1, 1, 1]), "b": np.array([0.0, -0.0, 1.0])},
        {"a": np.array(["x", "y", "x"]), "b": np.array([True, True, True])},
        (np.array(["2020-01-01"] * 2, "M8[D]"), np.array([1, 1], np.uint8)),
    ],
    ids=["numbers", "matrix", "dict", "text", "times"],
)
def test_rows_of_columns_stay_columns(cluster, columns):
    flow = Dataflow(num_shards=2)
    flow.source(columns).distinct().collect()

    leaves = list(columns.values()) if isinstance(columns, dict) else columns
    leaves = leaves if isinstance(leaves, (list, tuple)) else [leaves]
    expected = {
        tuple(
            np.asarray(value).tolist().__repr__().replace("-0.0", "0.0")
            for value in row
        )
        for row in zip(*leaves, strict=True)
    }
    found = []
    for _, payload in cluster.run(flow).batches("out"):
        parts = payload.values() if isinstance(payload, dict) else payload
        parts = parts if isinstance(parts, (tuple, type({}.values()))) else [parts]
        assert all(isinstance(part, np.ndarray) for part in parts)
        found += list(zip(*parts, strict=True))
    rows = {
        tuple(
            np.asarray(value).tolist().__repr__().replace("-0.0", "0.0")
            for value in row
        )
        for row in found
    }
    assert (rows, len(found)) == (expected, len(expected))


def test_columns_are_told_apart_by_one_of_them(cluster):
    flow = Dataflow(num_shards=1)
    rows = {"user": np.array([1, 2, 1, 2]), "x": np.arange(4)}
    flow.source(rows).distinct("user").collect()

    found = cluster.run(flow)["out"]
    assert sorted((int(r["user"]), int(r["x"])) for r in found) == [(1, 0), (2, 1)]


@pytest.mark.parametrize("key", [None, "at"])
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize(("kind", "second"), [("M8", "s"), ("m8", "s"), (">M8", "ns")])
def test_times_are_told_apart_whatever_their_unit(key, num_shards, kind, second):
    days = {"at": np.array([0, 1, 2], f"{kind}[D]")}
    seconds = {"at": np.array([0, 1, 2], f"{kind}[{second}]")}  # the first is the same
    flow = Dataflow(num_shards=num_shards)
    flow.source(days).concat(flow.source(seconds)).distinct(key).collect()

    found = [row["at"] for row in flow.run()["out"]]
    assert len(found) == 5
    assert len({at.astype(f"{kind.lstrip('>')}[ns]") for at in found}) == 5


NUMBERS = {
    "bool": [False, True],
    "int8": [-1, 0, 1],
    "uint8": [0, 1, 255],
    "int64": [-1, -(2**63), 2**53 + 1, 4609434218613702656],
    "uint64": [1, 2**63, 2**64 - 1],
    "float32": [-1.0, -0.0, 1.0, 1.5, 0.1, np.inf],
    "float64": [255.0, 1.5, 0.1, -(2.0**63), 2.0**63, 2.0**64, 4609434218613702656.0],
}


@pytest.mark.parametrize("with_text", [False, True])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_numbers_are_told_apart_by_value_whatever_their_type(num_shards, with_text):
    columns = [np.array(values, kind) for kind, values in NUMBERS.items()]
    flow = Dataflow(num_shards=num_shards)
    streams = []
    for column in columns:
        text = {"s": np.full(len(column), "x")} if with_text else {}
        streams.append(flow.source({"x": column, **text}, num_shards=1))
    streams[0].concat(*streams[1:]).distinct().collect()

    expected = {value for column in columns for value in column.tolist()}
    found = [row["x"].item() for row in flow.run()["out"]]
    assert (len(found), set(found)) == (len(expected), expected)


def test_text_is_told_apart_with_moments_of_any_unit(cluster):
    days = np.array(["2024-01-01", "2024-01-02"], "M8[D]")
    flow = Dataflow(num_shards=2)
    streams = [
        flow.source({"at": days.astype(f"M8[{unit}]"), "s": np.array(["x", "y"])})
        for unit in ("D", "s", "ns")
    ]
    streams[0].concat(*streams[1:]).distinct().collect()

    found = [(row["at"].astype("M8[D]"), row["s"]) for row in cluster.run(flow)["out"]]
    assert sorted(found) == list(zip(days, ["x", "y"], strict=True))


def test_over_all_times_the_earliest_is_sent(cluster):
    flow = Dataflow(num_shards=2)
    stream = flow.source(in_epochs([[1, 2], [2, 3], [1, 4]]))
    stream.distinct(across_times=True).collect()

    found = by_time(cluster.run(flow).batches("out"))
    assert {t: sorted(r) for t, r in found.items()} == {0: [1, 2], 1: [3], 2: [4]}


def test_a_key_is_forgotten_when_its_time_to_live_is_over(cluster):
    epochs = [["a"], ["b"], ["a"], [], [], ["a"], ["b"]]
    flow = Dataflow(num_shards=2)
    stream = flow.source(in_epochs(epochs))
    stream.distinct(ttl_epochs=2, name="seen").collect()

    run = cluster.start(flow)
    found = by_time(run.result().batches("out"))
    assert found == {0: ["a"], 1: ["b"], 5: ["a"], 6: ["b"]}
    figures = run.metrics()["operators"]["seen"]
    assert figures["state_entries"] <= 8  # two keys, known and touched, per shard


def test_state_of_expired_keys_is_freed_while_others_come(cluster):
    def fresh(shard, num_shards):
        yield from ([n] for n in range(shard, 2000, num_shards))

    flow = Dataflow(num_shards=2)
    flow.source(fresh).distinct(ttl_epochs=5, name="seen").probe("done")

    run = cluster.start(flow)
    run.result()
    assert run.metrics()["operators"]["seen"]["state_entries"] < 60


def test_a_time_to_live_must_be_a_count():
    with pytest.raises(ConfigError, match="'ttl_epochs' out of range; got -1"):
        Dataflow().source([1]).distinct(ttl_epochs=-1)


@settings(max_examples=40, deadline=None)
@given(
    epochs=st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=8),
    num_shards=st.integers(1, 3),
    ttl=st.none() | st.integers(0, 3),
    as_columns=st.booleans(),
)
def test_distinct_over_times_equals_its_definition(epochs, num_shards, ttl, as_columns):
    def share(shard, shards):
        for records in epochs:
            part = records[shard::shards]
            yield np.asarray(part, np.int32) if as_columns else part

    flow = Dataflow(num_shards=num_shards)
    flow.source(share).distinct(across_times=True, ttl_epochs=ttl).collect()

    expected, last = {}, {}
    for epoch, records in enumerate(epochs):
        for n in sorted(set(records)):
            if n not in last or (ttl is not None and last[n] + ttl < epoch):
                expected.setdefault(epoch, []).append(n)
        last |= dict.fromkeys(records, epoch)
    found = {}
    for time, payload in flow.run().batches("out"):
        found.setdefault(time, []).extend(map(int, payload))
    assert {time: sorted(records) for time, records in found.items()} == expected
