from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyml.errors import TimeError
from timelyml.progress import (
    Timestamp,
    check_time,
    depth_of,
    epoch_of,
    join,
    less_equal,
    less_than,
    meet,
    minimum,
)

from .oracles import before, depths, times

triples = depths.flatmap(lambda depth: st.tuples(*[times(depth, 3)] * 3))
Triple = tuple[Timestamp, Timestamp, Timestamp]


@given(triples)
def test_less_equal_is_the_componentwise_order(triple: Triple) -> None:
    a, b, _ = triple
    assert less_equal(a, b) == before(a, b)
    assert less_than(a, b) == (before(a, b) and a != b)


@given(triples)
def test_less_equal_is_a_partial_order(triple: Triple) -> None:
    a, b, c = triple
    assert less_equal(a, a)
    assert not (less_equal(a, b) and less_equal(b, a)) or a == b
    assert not (less_equal(a, b) and less_equal(b, c)) or less_equal(a, c)


@given(triples)
def test_the_order_of_python_is_a_linear_extension(triple: Triple) -> None:
    a, b, _ = triple
    assert not less_equal(a, b) or a <= b  # type: ignore[operator]  # one depth


@given(triples)
def test_join_and_meet_are_the_closest_bounds(triple: Triple) -> None:
    a, b, c = triple
    assert before(a, join(a, b))
    assert before(b, join(a, b))
    assert not (before(a, c) and before(b, c)) or before(join(a, b), c)
    assert before(meet(a, b), a)
    assert before(meet(a, b), b)
    assert not (before(c, a) and before(c, b)) or before(c, meet(a, b))


@given(depths.flatmap(lambda depth: st.tuples(st.just(depth), times(depth))))
def test_the_minimum_of_a_depth_is_before_all_of_its_times(
    sample: tuple[int, Timestamp],
) -> None:
    depth, time = sample
    assert less_equal(minimum(depth), time)
    assert depth_of(time) == depth
    assert less_equal(epoch_of(minimum(depth)), epoch_of(time))


@pytest.mark.parametrize("function", [less_equal, join, meet])
def test_times_of_different_depth_are_refused(function: object) -> None:
    for pair in [(1, (1, 2)), ((1, 2), 1), ((1, 2), (1, 2, 3))]:
        with pytest.raises(TimeError, match="different scopes"):
            function(*pair)  # type: ignore[operator]  # any of three functions


@pytest.mark.parametrize(
    ("time", "depth"),
    [(-1, 0), (2**63, 0), (True, 0), (1.0, 0), ((1,), 0), (1, 1), ((1, -1), 1)],
)
def test_malformed_times_are_refused(time: object, depth: int) -> None:
    with pytest.raises(TimeError, match="input 'x' has no such timestamp; got"):
        check_time(time, depth, "input 'x'")


@given(depths.flatmap(lambda depth: st.tuples(st.just(depth), times(depth))))
def test_well_formed_times_are_returned(sample: tuple[int, Timestamp]) -> None:
    depth, time = sample
    assert check_time(time, depth, "input") is time
