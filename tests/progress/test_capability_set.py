"""Sets of capabilities, against their definition: the minimal times of what is held."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyml.errors import CapabilityError, TimeError
from timelyml.progress import TIME_LIMIT, CapabilitySet, CapabilityTable, Timestamp

from .oracles import before, depths, minimal, times


class Output:
    """One output port, with what its worker reports of it."""

    def __init__(self) -> None:
        self.counts: Counter[Timestamp] = Counter()
        self.table = CapabilityTable(self._record)

    def _record(self, location: int, time: Timestamp, delta: int) -> None:
        self.counts[time] += delta

    def mint(self, time: Timestamp, location: int = 0):
        return self.table.mint(location, time, "map.py:7")

    def held(self) -> list[Timestamp]:
        """Each time that is held, as often as it is."""
        return [h.time for h in self.table.holdings() for _ in range(h.count)]


many_times = depths.flatmap(lambda depth: st.lists(times(depth), max_size=8))
two_lists = depths.flatmap(
    lambda depth: st.tuples(
        st.lists(times(depth), max_size=6), st.lists(times(depth), max_size=4)
    )
)


@given(many_times)
def test_it_holds_the_minimal_times_once_each_and_nothing_else(inserted):
    output = Output()
    rights = CapabilitySet()
    for number, time in enumerate(inserted, 1):
        rights.insert(output.mint(time))
        assert sorted(output.held()) == sorted(minimal(inserted[:number]))
        assert list(rights.times) == sorted(minimal(inserted[:number]))
    rights.release()
    assert output.table.is_empty


@given(two_lists)
def test_a_downgrade_keeps_the_frontier_if_all_of_it_is_allowed(case):
    inserted, frontier = case
    output = Output()
    rights = CapabilitySet(map(output.mint, inserted))
    is_allowed = all(any(before(i, t) for i in inserted) for t in minimal(frontier))
    if is_allowed:
        rights.downgrade(frontier)
    else:
        with pytest.raises(
            CapabilityError, match=r"cannot be downgraded .* got .* exp"
        ):
            rights.downgrade(frontier)
    expected = minimal(frontier if is_allowed else inserted)
    assert sorted(output.held()) == sorted(rights.times) == sorted(expected)
    output.table.settle()
    assert {time for time, count in output.counts.items() if count} == expected


@given(two_lists)
def test_it_gives_out_what_any_of_them_allows(case):
    inserted, asked = case
    output = Output()
    rights = CapabilitySet(map(output.mint, inserted))
    for time in asked:
        if any(before(i, time) for i in inserted):
            with rights.delayed(time, "here.py:1") as capability:
                assert (capability.time, capability.site) == (time, "here.py:1")
        else:
            with pytest.raises(CapabilityError, match="cannot be delayed to a time"):
                rights.delayed(time)
    assert sorted(output.held()) == sorted(minimal(inserted))


def test_a_with_block_releases_all_of_them_even_after_an_error():
    output = Output()
    rights = CapabilitySet(map(output.mint, [(1, 4), (2, 0)]))
    with pytest.raises(ZeroDivisionError, match="mine"), rights:
        raise ZeroDivisionError("mine")
    assert (len(rights), output.table.is_empty) == (0, True)


def test_a_downgrade_to_what_is_no_time_changes_nothing():
    output = Output()
    with CapabilitySet([output.mint((1, 0))]) as rights:
        with pytest.raises(TimeError, match="timestamp"):
            rights.downgrade([(3, 0), (2, TIME_LIMIT)])
        assert output.held() == [(1, 0)] == list(rights.times)


def test_it_refuses_what_it_cannot_own():
    output = Output()
    mine, released, other = output.mint(3), output.mint(1), output.mint(2, location=1)
    released.release()
    rights = CapabilitySet([mine])
    for capability, why in [
        (released, "that was released"),
        (mine, "has .* already"),
        (other, "of another output"),
    ]:
        with pytest.raises(CapabilityError, match=why):
            rights.insert(capability)
    assert (rights.times, mine.is_held, other.is_held) == ((3,), True, True)
