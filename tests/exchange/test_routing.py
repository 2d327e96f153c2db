from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyml.errors import RoutingError
from timelyml.exchange import (
    concat,
    destinations_by_key,
    records_of,
    route,
    split_by_destination,
)
from timelyml.graph import Exchange

routed = st.integers(1, 300).flatmap(
    lambda shards: st.tuples(
        st.just(shards), st.lists(st.integers(0, shards - 1), max_size=40)
    )
)


@given(routed)
@pytest.mark.parametrize("as_columns", [False, True])
def test_each_row_lands_once_in_order_on_its_shard(as_columns, case):
    num_shards, destinations = case
    rows = list(range(len(destinations)))
    expected = defaultdict(list)
    for row, shard in zip(rows, destinations, strict=True):
        expected[shard].append(row)
    payload = np.array(rows, np.int64) if as_columns else rows
    parts = split_by_destination(payload, np.array(destinations, int), num_shards)
    assert [shard for shard, _ in parts] == sorted(expected)
    assert {shard: list(part) for shard, part in parts} == expected


def test_columns_of_a_row_stay_together():
    ids = np.arange(100)
    payload = {"id": ids, "wide": np.stack([ids, -ids], 1)}
    parts = split_by_destination(payload, ids % 7, 7)
    for shard, part in parts:
        assert np.all(part["id"] % 7 == shard)
        assert np.array_equal(part["wide"][:, 1], -part["id"])
    assert sorted(concat([part for _, part in parts])["id"]) == list(ids)


@pytest.mark.parametrize("num_shards", [256, 257, 65_536, 65_537, 100_000])
def test_the_last_shard_of_every_index_width_is_reached(num_shards):
    last = num_shards - 1
    parts = split_by_destination(np.arange(3), np.array([last, 0, last]), num_shards)
    assert [(shard, part.tolist()) for shard, part in parts] == [
        (0, [1]),
        (last, [0, 2]),
    ]


def test_rows_for_one_shard_are_not_copied():
    ids = np.arange(10)
    ((shard, part),) = split_by_destination(ids, np.full(10, 3), 4)
    assert (shard, part) == (3, part)
    assert part is ids


def test_rows_in_the_order_of_shards_are_not_copied():
    ids = np.arange(6)
    parts = split_by_destination(ids, np.array([0, 0, 1, 1, 1, 3]), 4)
    assert [shard for shard, _ in parts] == [0, 1, 3]
    assert all(np.shares_memory(part, ids) for _, part in parts)


def test_shuffled_rows_are_copied_once():
    ids = np.arange(1000)
    parts = split_by_destination(ids, ids % 3, 3)
    owners = {id(part.base) for _, part in parts}
    assert len(owners) == 1
    assert not any(np.shares_memory(part, ids) for _, part in parts)


def test_many_rows_keep_their_order_within_a_shard():
    ids = np.arange(10_000)
    for _, part in split_by_destination(ids, ids * 7919 % 13, 13):
        assert np.all(np.diff(part) > 0)


def test_a_payload_without_rows_goes_nowhere():
    assert split_by_destination(np.zeros((0, 4)), np.zeros(0), 4) == []
    assert split_by_destination([], [], 4) == []


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint32])
def test_a_destination_outside_the_shards_names_value_and_row(dtype):
    with pytest.raises(
        RoutingError, match=r"got 4 at row 1; expected 0 to 3"
    ) as caught:
        split_by_destination(np.arange(2), np.array([0, 4], dtype), 4)
    assert (caught.value.row, caught.value.destination) == (1, 4)


def test_a_negative_destination_is_refused():
    with pytest.raises(RoutingError, match="got -1 at row 0"):
        split_by_destination(["a"], [-1], 4)


@pytest.mark.parametrize(
    "destinations",
    [
        np.zeros(3, int),
        np.zeros((2, 1), int),
        np.zeros(2),
        np.zeros(2, bool),
        ["a", "b"],
        1,
    ],
)
def test_destinations_of_another_shape_or_kind_are_refused(destinations):
    with pytest.raises(RoutingError, match="expected one integer for each of 2 rows"):
        split_by_destination(np.arange(2), destinations, 4)


def test_an_exchange_by_route_gets_the_payload_and_the_shards():
    seen = []

    def by_id(payload, num_shards):
        seen.append(num_shards)
        return payload["id"] % num_shards

    parts = route(Exchange(by_id), {"id": np.arange(4)}, 2)
    assert [(shard, part["id"].tolist()) for shard, part in parts] == [
        (0, [0, 2]),
        (1, [1, 3]),
    ]
    assert seen == [2]


def test_an_exchange_by_key_sends_records_and_rows_to_the_same_shards():
    pact = Exchange.by_key(lambda record: record[0])
    records = [("a", 1.0), ("b", 2.0), ("a", 3.0), ("zebra", 4.0)]
    columns = (np.array([r[0] for r in records]), np.array([r[1] for r in records]))
    by_record = dict(route(pact, records, 5))
    by_column = {s: list(records_of(part)) for s, part in route(pact, columns, 5)}
    assert by_record == by_column


def test_a_key_that_cannot_be_hashed_names_its_row():
    with pytest.raises(RoutingError, match=r"at row 1: object, which has no stable"):
        route(Exchange.by_key(lambda r: r), [1, object()], 4)
    with pytest.raises(RoutingError, match="row 0: unhashable type"):
        destinations_by_key([[1]], 4)


@pytest.mark.parametrize(
    "key", [object(), float("nan"), (1, (2, object())), (1, (float("nan"),)), [1]]
)
def test_a_refused_key_is_told_what_to_do_once_however_deep_the_reason_lies(key):
    with pytest.raises(
        RoutingError, match=r"cannot be routed; got .* at row 1: "
    ) as got:
        route(Exchange.by_key(lambda r: r), [1, key], 4)
    parts = str(got.value).split("; ")
    assert [part.split()[0] for part in parts[:-1]] == ["a", "got", "expected"]
    assert parts[-1] in ("change the key", "filter or replace it before the exchange")
