from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyml.errors import PayloadError
from timelyml.exchange import (
    as_payload,
    concat,
    leaves_of,
    num_records,
    records_of,
    seal,
    size_bytes,
    slice_rows,
    take,
)


class Point(NamedTuple):
    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Tokens:
    ids: np.ndarray
    weights: dict[str, np.ndarray]


class ArrayLike:
    def __array__(self, dtype=None, copy=None):
        return np.arange(3)


def columns_of(rows: int) -> list[object]:
    ids = np.arange(rows)
    return [
        ids,
        {"b": ids, "a": ids * 1.5},
        (ids, np.ones((rows, 4), np.float32)),
        Point(ids, ids + 1),
        Tokens(ids, {"w": ids / 2, "none": None}),
        [*ids.tolist()],
        np.array([f"w{i % 7}" for i in range(rows)], "<U5"),
    ]


def same(left: object, right: object) -> bool:
    if isinstance(left, list) or isinstance(right, list):
        return left == right
    pairs = zip(leaves_of(left), leaves_of(right), strict=True)
    return type(left) is type(right) and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs
    )


@pytest.mark.parametrize("kind", range(7))
@given(cuts=st.lists(st.integers(0, 12), max_size=5))
def test_slices_of_a_payload_join_to_the_payload(kind, cuts):
    payload = columns_of(12)[kind]
    bounds = [0, *sorted(cuts), 12]
    pieces = [slice_rows(payload, start, stop) for start, stop in pairwise(bounds)]
    assert sum(map(num_records, pieces)) == 12
    assert same(concat(pieces), payload)


@pytest.mark.parametrize("kind", range(7))
def test_taken_rows_are_the_records_at_those_indices(kind):
    payload = columns_of(6)[kind]
    taken = take(payload, np.array([5, 0, 5]))
    records = list(records_of(payload))
    expected = [records[5], records[0], records[5]]
    assert str(list(records_of(taken))) == str(expected)


def test_records_have_the_shape_of_their_columns():
    ids = np.arange(2)
    assert list(records_of(ids)) == [0, 1]
    assert list(records_of({"x": ids, "y": ids + 1})) == [
        {"x": 0, "y": 1},
        {"x": 1, "y": 2},
    ]
    assert list(records_of((ids, ids + 1))) == [(0, 1), (1, 2)]
    assert list(records_of(Point(ids, ids + 1))) == [Point(0, 1), Point(1, 2)]
    assert list(records_of(Tokens(ids, {"w": ids}))) == [
        Tokens(0, {"w": 0}),
        Tokens(1, {"w": 1}),
    ]
    assert list(records_of(["a", "b"])) == ["a", "b"]


def test_a_payload_without_rows_is_a_payload():
    empty = {"x": np.zeros((0, 4)), "y": np.zeros(0)}
    assert as_payload(empty) is empty
    assert num_records(empty) == 0
    assert list(records_of(empty)) == []
    assert as_payload([]) == []


def test_a_payload_with_nan_is_a_payload():
    values = np.array([np.nan, np.inf])
    assert as_payload(values) is values


def test_array_likes_become_numpy():
    payload = as_payload({"x": ArrayLike(), "y": np.zeros(3)})
    assert type(payload["x"]) is np.ndarray
    assert np.array_equal(payload["x"], [0, 1, 2])


def test_numpy_columns_come_back_as_the_same_object():
    payload = {"x": np.arange(3)}
    assert as_payload(payload) is payload
    records = [object()]
    assert as_payload(records) is records


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (np.array(1.0), "0-d array"),
        ({"x": np.float32(1.0)}, "0-d array"),
        (np.array([object()], object), "holds Python objects"),
        (np.array(["a", "bb"], np.dtypes.StringDType()), "holds Python objects"),
        ({"x": np.zeros(2), "y": np.zeros(3)}, r"differ in length; got \[2, 3\]"),
        ((1, 2), "no array; got int"),
        ("word", "no array; got str"),
        (None, "no columns; got NoneType"),
        ({}, "no columns; got dict"),
        (np.ma.masked_array([1, 2], [0, 1]), "no array; got MaskedArray"),
        (Tokens, "no columns; got type"),
    ],
)
def test_what_is_no_payload_is_refused(value, match):
    with pytest.raises(PayloadError, match=match):
        as_payload(value)


def test_empty_lists_between_columns_are_left_out():
    ids = np.arange(3)
    assert np.array_equal(concat([[], ids, [], ids[:1]]), [0, 1, 2, 0])
    assert concat([[], ids[:0]]).dtype == ids.dtype
    assert concat([[], []]) == []
    assert concat([]) == []


def test_one_payload_joins_to_itself_without_a_copy():
    ids = np.arange(3)
    assert concat([[], ids]) is ids


@pytest.mark.parametrize(
    ("payloads", "match"),
    [
        ([[1], np.arange(2)], "1 lists of records among 2"),
        ([{"x": np.arange(2)}, {"y": np.arange(2)}], "got structures"),
        ([np.zeros((2, 3)), np.zeros((2, 4))], r"float64\[3\]"),
        ([np.arange(2), np.array(["a", "b"])], "expected one kind"),
    ],
)
def test_payloads_of_different_structure_do_not_join(payloads, match):
    with pytest.raises(PayloadError, match=match):
        concat(payloads)


def test_numbers_and_strings_of_other_widths_join():
    assert concat([np.array(["a"]), np.array(["long"])]).tolist() == ["a", "long"]
    assert concat([np.array([1], np.int8), np.array([0.5])]).tolist() == [1, 0.5]


def integers(dtype, *values):
    return np.array(values, dtype)


@pytest.mark.parametrize(
    ("signed", "unsigned", "dtype"),
    [
        ((-1, 2**62 + 1), (7, 2**63 - 1), np.int64),
        ((0, 2**62 + 1), (7, 2**63 + 1), np.uint64),
    ],
)
def test_signed_and_unsigned_integers_join_as_integers(signed, unsigned, dtype):
    both = [integers(np.int64, *signed), integers(np.uint64, *unsigned)]

    assert concat(both).tolist() == [*signed, *unsigned]
    assert concat(both[::-1]).dtype == dtype


def test_integers_that_no_type_holds_are_refused():
    both = [integers(np.int64, -1), integers(np.uint64, 2**63)]
    match = f"got -1 and {2**63} among .*; expected integers that int64 or uint64"
    with pytest.raises(PayloadError, match=match):
        concat(both)


@pytest.mark.parametrize("other", [np.array([0.5]), np.array([1j])])
def test_integers_that_a_float_cannot_hold_are_not_rounded(other):
    large = np.array([2**53 + 1], np.uint64)
    with pytest.raises(PayloadError, match=f"got {2**53 + 1} of uint64 among .*128|64"):
        concat([other, large])
    assert concat([other, large // 2])[1] == 2**52


def test_sealed_arrays_refuse_writes_also_through_their_bases():
    base = np.zeros((4, 2))
    payload = {"x": base[1:], "y": np.zeros(3)}
    assert seal(payload) is payload
    for array in (payload["x"], payload["y"], base):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 1


def test_arrays_among_records_are_sealed():
    records = [np.zeros(2), (np.zeros(2), 1), {"x": np.zeros(2)}, "word", None]
    seal(records)
    for array in (records[0], records[1][0], records[2]["x"]):
        assert not array.flags.writeable


class Stubborn:
    """A record that cannot be added to a number."""

    def __radd__(self, other):
        raise ZeroDivisionError

    def __repr__(self):  # the name of a test, which has to be the same in all processes
        return "Stubborn()"


@pytest.mark.parametrize(
    "before",
    [
        *([1], [1.5], [1, True, 2.5], [1, Stubborn()]),
        *(["word"], ["long" * 100], [(1, "word")], [1] * 20, ["word"] * 20),
    ],
    ids=repr,
)
@pytest.mark.parametrize("shape", [(), 1, 3])
def test_an_array_is_sealed_also_where_others_come_first(before, shape):
    array = np.zeros(shape)
    seal([*before, array, 2])
    assert not array.flags.writeable


def test_the_size_of_columns_is_their_bytes():
    assert size_bytes({"x": np.zeros((3, 4), np.float32), "y": np.zeros(3)}) == 72
    assert size_bytes(np.zeros(0)) == 0
    assert size_bytes([]) == 0


def test_the_size_of_records_grows_with_what_they_hold():
    assert size_bytes(["a" * 1000]) > size_bytes(["a"]) > 0
    assert size_bytes([np.zeros(1000)]) > 8000
    assert size_bytes([{"k": ["v" * 100]}]) > 100
    assert size_bytes([(1, 2)] * 10_000) == 10_000 * size_bytes([(1, 2)])


def test_the_size_of_a_deep_record_is_found_without_recursion_limits():
    record: object = []
    for _ in range(100_000):
        record = [record]
    assert size_bytes([record]) > 0
    while record:  # freed step by step: the interpreter itself would recurse
        record = record[0]


def test_a_named_tuple_made_by_collections_works_too():
    pair = namedtuple("pair", "a b")  # noqa: PYI024 - what users have
    payload = pair(np.arange(2), np.arange(2))
    assert num_records(payload) == 2
    assert type(slice_rows(payload, 0, 1)) is pair
