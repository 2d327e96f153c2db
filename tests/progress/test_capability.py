from __future__ import annotations

import tracemalloc
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyml.errors import CapabilityError, InvariantError
from timelyml.progress import (
    Capability,
    CapabilityTable,
    Holding,
    Timestamp,
    less_equal,
)

from .oracles import minimal, times


class Ledger:
    """Records what a table reports, net."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[int, Timestamp]] = Counter()
        self.num_calls = 0

    def record(self, location: int, time: Timestamp, delta: int) -> None:
        self.num_calls += 1
        self.counts[location, time] += delta

    @property
    def net(self) -> dict[tuple[int, Timestamp], int]:
        return {stamp: count for stamp, count in self.counts.items() if count}


def test_a_pointstamp_counts_once_however_many_hold_it() -> None:
    ledger = Ledger()
    table = CapabilityTable(ledger.record)
    first = table.mint(3, 5, "a.py:1")
    second = first.clone()
    third = table.mint(3, 5, "b.py:2")
    table.settle()
    assert ledger.net == {(3, 5): 1}
    first.release()
    third.release()
    table.settle()
    assert ledger.net == {(3, 5): 1}
    assert table.holds(3, 5)
    second.release()
    table.settle()
    assert ledger.net == {}
    assert table.is_empty


def test_the_initial_capability_is_counted_already() -> None:
    ledger = Ledger()
    table = CapabilityTable(ledger.record)
    initial = table.start(0, 0, "source 'x'")
    table.settle()
    assert ledger.net == {}
    initial.downgrade(4)
    table.settle()
    assert ledger.net == {(0, 0): -1, (0, 4): 1}
    initial.release()
    table.settle()
    assert ledger.net == {(0, 0): -1}
    with pytest.raises(InvariantError, match="cannot start twice"):
        table.start(0, 0, "source 'x'")


def test_an_output_that_holds_its_minimum_cannot_start() -> None:
    table = CapabilityTable(Ledger().record)
    table.mint(0, 0, "somewhere")
    with pytest.raises(InvariantError, match="cannot start twice"):
        table.start(0, 0, "source 'x'")


def test_a_capability_moves_only_to_later_times() -> None:
    table = CapabilityTable(Ledger().record)
    capability = table.mint(0, (2, 3), "map.py:7")
    for earlier in [(2, 2), (1, 9), (3, 0)]:
        with pytest.raises(CapabilityError, match=r"map.py:7 cannot be downgraded to"):
            capability.downgrade(earlier)
        with pytest.raises(
            CapabilityError, match=r"map.py:7 cannot be delayed to"
        ) as e:
            capability.delayed(earlier)
        assert e.value.requested == earlier  # type: ignore[attr-defined]
    assert capability.time == (2, 3)
    later = capability.delayed((2, 4))
    assert (later.time, later.location, later.site) == ((2, 4), 0, "map.py:7")
    capability.downgrade((5, 3))
    assert [holding.time for holding in table.holdings()] == [(2, 4), (5, 3)]


def test_a_released_capability_cannot_be_used() -> None:
    table = CapabilityTable(Ledger().record)
    capability = table.mint(0, 1, "map.py:7")
    capability.release()
    uses = {
        "cloned": capability.clone,
        "released": capability.release,
        "delayed": lambda: capability.delayed(2),
        "downgraded": lambda: capability.downgrade(2),
        "entered": capability.__enter__,
    }
    for action, use in uses.items():
        with pytest.raises(CapabilityError, match=f"map.py:7 cannot be {action}"):
            use()  # type: ignore[operator]  # mixed callables
    assert not capability.is_held
    assert "released" in repr(capability)


def test_a_with_block_releases_even_after_an_error_or_a_release() -> None:
    ledger = Ledger()
    table = CapabilityTable(ledger.record)
    with pytest.raises(ZeroDivisionError, match="mine"), table.mint(0, 1, "x"):
        raise ZeroDivisionError("mine")
    with table.mint(0, 1, "x") as capability:
        capability.release()
    assert table.is_empty
    table.settle()
    assert ledger.net == {}


def test_holdings_name_the_sites_of_creation() -> None:
    table = CapabilityTable(Ledger().record)
    table.mint(2, 7, "b.py:2")
    table.mint(2, 7, "a.py:1").clone()
    table.mint(1, (0, 3), "c.py:3")
    assert table.holdings() == [
        Holding(1, (0, 3), 1, ("c.py:3",)),
        Holding(2, 7, 3, ("a.py:1", "b.py:2")),
    ]


def test_only_the_earliest_of_what_is_held_counts() -> None:
    ledger = Ledger()
    table = CapabilityTable(ledger.record)
    held = [table.mint(0, time, "site") for time in (4, 5, 6, 9)]
    table.settle()
    assert ledger.net == {(0, 4): 1}
    for capability in held[:3]:
        capability.release()
    table.settle()
    assert ledger.net == {(0, 9): 1}
    assert ledger.num_calls == 3


def test_nothing_is_recorded_before_it_is_settled() -> None:
    ledger = Ledger()
    table = CapabilityTable(ledger.record)
    capability = table.mint(0, 3, "site")
    for time in range(4, 100):
        capability.downgrade(time)
    assert ledger.num_calls == 0
    table.settle()
    table.settle()
    assert (ledger.net, ledger.num_calls) == ({(0, 99): 1}, 1)


ACTIONS = st.sampled_from(["mint", "clone", "delay", "down", "drop", "settle"])


def scripts(depth: int) -> st.SearchStrategy[list[tuple[str, Timestamp]]]:
    return st.lists(st.tuples(ACTIONS, times(depth, 3)), max_size=40)


@given(scripts(0) | scripts(1), st.randoms(use_true_random=False))
def test_the_record_is_one_for_each_minimal_time_that_is_held(
    script: list[tuple[str, Timestamp]], random: object
) -> None:
    ledger = Ledger()
    table = CapabilityTable(ledger.record)
    held: list[Capability] = []
    for action, time in script:
        if action == "mint" or not held:
            held.append(table.mint(0, time, "site"))
            continue
        chosen = random.choice(held)  # type: ignore[attr-defined]  # random.Random
        if action == "settle":
            table.settle()
            expected = minimal(c.time for c in held)
            assert ledger.net == {(0, time): 1 for time in expected}
        elif action == "clone":
            held.append(chosen.clone())
        elif action == "drop":
            chosen.release()
            held.remove(chosen)
        elif less_equal(chosen.time, time):
            if action == "delay":
                held.append(chosen.delayed(time))
            else:
                chosen.downgrade(time)
        assert {(h.location, h.time) for h in table.holdings()} == {
            (0, capability.time) for capability in held
        }
        assert table.covers(0, time) == any(less_equal(c.time, time) for c in held)
        assert sum(h.count for h in table.holdings()) == len(held)


@pytest.mark.parametrize("times", [(0, 5), ((0, 0), (0, 5))])
def test_what_is_held_and_released_again_and_again_leaves_nothing_behind(
    times: tuple[Timestamp, Timestamp],
) -> None:
    ledger = Ledger()
    table = CapabilityTable(ledger.record)
    first, later = times
    table.start(0, first, "root")

    def hold_and_release(count: int) -> None:
        for _ in range(count):
            table.mint(0, later, "again").release()
            table.settle()

    hold_and_release(200)
    tracemalloc.start()
    try:
        hold_and_release(10_000)
        found = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    here = found.filter_traces([tracemalloc.Filter(True, "*/timelyml/progress/*")])
    assert sum(trace.size for trace in here.traces) < 20_000  # others may allocate too
    assert ledger.counts == {}
