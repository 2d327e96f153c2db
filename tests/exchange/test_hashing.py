from __future__ import annotations

import datetime as dt
import enum
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from timelyml.errors import RoutingError
from timelyml.exchange import destination_of, destinations_by_key, stable_hash


class Colour(enum.Enum):
    RED = 1


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.complex_numbers(allow_nan=False, max_magnitude=3),
    st.dates(),
    st.datetimes(),
)
keys = st.recursive(scalars, lambda inner: st.tuples(inner, inner), max_leaves=4)


def as_moments(key):
    """A day hashes as its midnight, which it equals in arrays, though not in Python."""
    if isinstance(key, tuple):
        return tuple(map(as_moments, key))
    is_day = isinstance(key, dt.date) and not isinstance(key, dt.datetime)
    return dt.datetime.combine(key, dt.time()) if is_day else key


@given(keys, keys)
def test_equal_keys_have_equal_hashes_and_others_hardly(left, right):
    assert 0 <= stable_hash(left) < 2**64
    are_equal = as_moments(left) == as_moments(right)
    assert (stable_hash(left) == stable_hash(right)) == are_equal


FULL = {"m": "ms", "u": "us", "n": "ns", "p": "ps"}
# A coarser unit and a finer one, and at most how many of it.
UNITS = {"YD": 366, "Ms": 31 * 86_400, "Ds": 86_400, "hs": 3600, "sp": 10**12}
UNITS |= {"mu": 1000, "un": 1000, "np": 1000}


@given(st.integers(-(2**31), 2**31), st.sampled_from(sorted(UNITS)))
def test_equal_moments_hash_alike_whatever_their_unit(count, units):
    assume(abs(count) * UNITS[units] < 2**63)
    coarse, fine = (FULL.get(unit, unit) for unit in units)
    moment = np.datetime64(count, coarse)
    other = moment.astype(f"M8[{fine}]")

    assert stable_hash(moment) == stable_hash(other)
    shard = destination_of(moment, 1 << 32)
    assert shard == destination_of(other, 1 << 32)
    for key in (moment, other):
        assert destinations_by_key(np.array([key]), 1 << 32) == [shard]


@pytest.mark.parametrize("unit", ["D", "s", "us"])
def test_moments_hash_as_those_of_python(unit):
    keys = np.array(["2020-02-29", "1969-12-31"], f"M8[{unit}]")
    assert [stable_hash(key) for key in keys] == [stable_hash(k) for k in keys.tolist()]


@pytest.mark.parametrize("keys", [np.array(["2020", "NaT"], "M8[D]")])
def test_a_moment_that_is_none_is_refused(keys):
    with pytest.raises(RoutingError, match="NaT at row 1; expected a moment"):
        destinations_by_key(keys, 4)
    with pytest.raises(RoutingError, match="NaT, which equals nothing"):
        stable_hash(keys[1])


@pytest.mark.parametrize(
    "equal",
    [
        [1, 1.0, True, np.int64(1), np.uint8(1), np.float16(1), np.bool_(True), 1 + 0j],
        [0, 0.0, -0.0, False, np.float32(-0.0)],
        [2**70, float(2**70), np.float64(2**70)],
        [2**63, float(2**63), np.uint64(2**63)],
        [0.1, np.float64(0.1)],
        [float(np.float32(0.1)), np.float32(0.1)],
        ["word", np.str_("word")],
        [b"word", np.bytes_(b"word")],
        [(1, "a"), (1.0, np.str_("a"))],
        [float("inf"), np.float32("inf")],
        [
            dt.datetime(2020, 1, 1, 12, tzinfo=dt.UTC),
            dt.datetime(2020, 1, 1, 13, tzinfo=dt.timezone(dt.timedelta(hours=1))),
        ],
    ],
)
def test_equal_keys_of_different_types_meet(equal):
    assert len({stable_hash(key) for key in equal}) == 1
    assert len({destination_of(key, 97) for key in equal}) == 1


@given(
    st.sampled_from("bhilBHILfd?").flatmap(
        lambda code: st.lists(
            st.floats(width=32, allow_nan=False)
            if code in "fd"
            else st.integers(0, 127 if code != "?" else 1),
            max_size=20,
        ).map(lambda values: np.array(values, code))
    ),
    st.integers(1, 1000),
)
def test_an_array_of_keys_goes_where_its_elements_go(array, num_shards):
    expected = [destination_of(key, num_shards) for key in array.tolist()]
    assert destinations_by_key(array, num_shards).tolist() == expected
    assert destinations_by_key(array.tolist(), num_shards).tolist() == expected


@pytest.mark.parametrize(
    "array",
    [
        np.array([-1, -(2**63), 2**63 - 1]),
        np.array([2**64 - 1, 0], np.uint64),
        np.array([2.0**63, -(2.0**64), 1e300, np.inf, -np.inf, 0.5, -3.0]),
        np.array([0.1, 7.0], np.float16),
        np.array([0.1, 7.0], np.longdouble),
        np.array(["a", "b", "a"]),
        np.array([b"a", b"b"]),
        np.array([1j, 2 + 0j]),
    ],
)
def test_extreme_keys_go_where_their_elements_go(array):
    expected = [destination_of(key, 7) for key in array]
    assert destinations_by_key(array, 7).tolist() == expected


def test_integers_are_spread_evenly_over_shards():
    assert destinations_by_key(np.arange(-8, 8), 4).tolist() == [0, 1, 2, 3] * 4
    assert destinations_by_key(range(8), 8).tolist() == list(range(8))


def test_strings_are_spread_over_shards():
    counts = Counter(destinations_by_key([f"key{i}" for i in range(8000)], 8).tolist())
    assert len(counts) == 8
    assert max(counts.values()) < 1.15 * min(counts.values())


def test_hashes_are_the_same_in_every_process():
    code = (
        "from timelyml.exchange import stable_hash;"
        "print([stable_hash(k) for k in (1, 2.5, 'a', b'a', None, ('x', 1))])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    here = [stable_hash(k) for k in (1, 2.5, "a", b"a", None, ("x", 1))]
    assert outputs == {f"{here}\n"}


def test_hashes_never_change():
    assert stable_hash(1) == 10451216379200822465  # splitmix64, reference output
    assert stable_hash("word") == stable_hash("word")
    assert destination_of("word", 1 << 32) == stable_hash("word") % (1 << 32)


def test_enum_members_hash_by_name():
    assert stable_hash(Colour.RED) == stable_hash(Colour.RED)


@pytest.mark.parametrize("key", [float("nan"), np.float32("nan"), ("a", float("nan"))])
def test_a_key_that_is_nan_is_refused(key):
    with pytest.raises(RoutingError, match="equals nothing"):
        stable_hash(key)


def test_nan_in_an_array_of_keys_names_its_row():
    with pytest.raises(RoutingError, match="nan at row 1"):
        destinations_by_key(np.array([1.0, np.nan]), 4)
    with pytest.raises(RoutingError, match="nan at row 1"):
        destinations_by_key([1.0, float("nan")], 4)


@pytest.mark.parametrize("key", [object(), [1], {"a": 1}, {1}])
def test_a_key_without_a_stable_hash_is_refused(key):
    with pytest.raises(RoutingError, match="no stable hash"):
        stable_hash(key)
