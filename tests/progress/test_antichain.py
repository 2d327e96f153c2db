from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timelyml.progress import Antichain, MutableAntichain, Summary, Timestamp
from timelyml.progress.open_times import OpenInts, OpenProducts

from .oracles import before, depths, minimal, minimal_of_counts, net, times

Changes = list[tuple[Timestamp, int]]


def change_lists(depth: int, size: int = 40) -> st.SearchStrategy[Changes]:
    return st.lists(st.tuples(times(depth, 4), st.integers(-2, 3)), max_size=size)


def batches(depth: int) -> st.SearchStrategy[list[Changes]]:
    return st.lists(change_lists(depth, size=12), max_size=10)


@given(depths.flatmap(change_lists))
def test_reported_changes_replay_to_the_minimal_elements(changes: Changes) -> None:
    frontier = MutableAntichain()
    counts: Counter[Timestamp] = Counter()
    replayed: Changes = []
    for time, delta in changes:
        counts[time] += delta
        replayed += frontier.update([(time, delta)])
        assert net(replayed) == dict.fromkeys(minimal_of_counts(counts), 1)
        assert frontier.count(time) == counts[time]


@given(depths.flatmap(batches))
def test_bulk_updates_report_net_changes_in_order(batches: list[Changes]) -> None:
    frontier = MutableAntichain()
    counts: Counter[Timestamp] = Counter()
    for batch in batches:
        old = minimal_of_counts(counts)
        for time, delta in batch:
            counts[time] += delta
        new = minimal_of_counts(counts)
        expected = dict.fromkeys(new - old, 1) | dict.fromkeys(old - new, -1)
        assert frontier.update(batch) == sorted(expected.items())
        assert frontier.elements == tuple(sorted(new))
        assert bool(frontier) == bool(new)
        assert frontier.is_empty == (not any(counts.values()))


@given(
    depths.flatmap(
        lambda depth: st.tuples(change_lists(depth), times(depth, largest=4))
    )
)
def test_questions_to_a_frontier_have_their_definition(
    sample: tuple[Changes, Timestamp],
) -> None:
    changes, time = sample
    counts: Counter[Timestamp] = Counter()
    for changed, delta in changes:
        counts[changed] += delta
    least = minimal_of_counts(counts)
    is_at_or_before = any(before(other, time) for other in least)
    is_before = any(before(other, time) and other != time for other in least)

    multiset = MutableAntichain()
    multiset.update(changes)
    antichain = Antichain(counts_to_list(counts))
    kind = OpenInts if isinstance(time, int) else OpenProducts
    view = kind()
    view.apply([(other, 1) for other in counts_to_list(counts)])

    for asked in (multiset, antichain, view.frontier):
        assert asked.less_equal(time) == is_at_or_before  # type: ignore[arg-type]
        assert asked.less_than(time) == is_before  # type: ignore[arg-type]
        assert set(asked.elements) == least


def counts_to_list(counts: Counter[Timestamp]) -> list[Timestamp]:
    return [time for time, count in counts.items() if count > 0]


@given(depths.flatmap(lambda depth: st.lists(times(depth, 4))))
def test_an_antichain_holds_the_minimal_elements_and_says_what_was_new(
    inserted: list[Timestamp],
) -> None:
    antichain: Antichain[Timestamp] = Antichain()
    for index, time in enumerate(inserted):
        is_new = not any(before(other, time) for other in inserted[:index])
        assert antichain.insert(time) == is_new
    assert set(antichain) == minimal(inserted)
    assert len(antichain) == len(minimal(inserted))
    assert antichain == Antichain(reversed(inserted))


def test_an_antichain_of_summaries_takes_their_order() -> None:
    antichain: Antichain[Summary] = Antichain(order=Summary.less_equal)
    assert antichain.insert(Summary.advance(1))
    assert antichain.insert(Summary(1, (1,), (0,)))  # next epoch, counter reset
    assert antichain.insert(Summary.identity(1))
    assert not antichain.insert(Summary.advance(1))
    assert antichain.elements == (Summary(1, (1,), (0,)), Summary.identity(1))


def test_a_negative_count_hides_the_increase_that_it_overtook() -> None:
    frontier = MutableAntichain()
    assert frontier.update([(4, 1), (2, -1)]) == [(4, 1)]
    assert frontier.update([(2, 1)]) == []
    assert frontier.update([(4, -1)]) == [(4, -1)]
    assert frontier.is_empty


def test_an_empty_frontier_lets_everything_pass() -> None:
    frontier = MutableAntichain()
    assert not frontier.less_equal(10)
    assert not frontier.less_than(10)
    assert frontier.elements == ()
    assert frontier.update([]) == []


@settings(max_examples=20)
@given(st.integers(0, 2), st.randoms(use_true_random=False))
def test_closed_times_leave_memory_while_an_early_one_stays_open(
    depth: int, random: object
) -> None:
    chooser = random
    zero: Timestamp = (0,) * (depth + 1) if depth else 0
    multiset = (OpenProducts if depth else OpenInts)()
    multiset.apply([(zero, 1)])
    for epoch in range(1, 400):
        coords = (epoch, *[chooser.randrange(9) for _ in range(depth)])  # type: ignore[attr-defined]
        time = coords if depth else epoch
        multiset.apply([(time, 1)])
        multiset.apply([(time, -1)])
    assert len(multiset.counts) < 100
    assert multiset.frontier.elements == (zero,)
    multiset.apply([(zero, -1)])
    assert not multiset.frontier
    assert not multiset.counts


@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=30)
@given(st.data())
def test_many_products_opened_and_closed_at_random_keep_their_minima(
    depth: int, data: st.DataObject
) -> None:
    pool = data.draw(st.lists(times(depth, 12), min_size=60, max_size=150, unique=True))
    order = data.draw(st.permutations(pool))
    multiset = MutableAntichain()
    present: set[Timestamp] = set()
    for index, time in enumerate([*pool, *order]):
        delta = 1 if index < len(pool) else -1
        multiset.update([(time, delta)])
        if delta > 0:
            present.add(time)
        else:
            present.discard(time)
        if index % 7 == 0:
            assert set(multiset.elements) == minimal(present)
    assert multiset.is_empty
    assert not multiset


@given(
    depths.flatmap(
        lambda depth: st.tuples(
            st.just(depth),
            st.lists(st.lists(times(depth, 3), max_size=12), max_size=12),
        )
    )
)
def test_what_is_kept_of_closed_times_is_counted_exactly(
    sample: tuple[int, list[list[Timestamp]]],
) -> None:
    depth, batches = sample
    multiset = OpenProducts() if depth else OpenInts()
    present: set[Timestamp] = set()
    for batch in batches:
        toggled = [
            (time, -1 if time in present else 1) for time in dict.fromkeys(batch)
        ]
        multiset.apply([*toggled, *((time, 0) for time in batch)])
        present ^= set(batch)
        counts = dict(multiset.counts)
        assert {time for time, count in counts.items() if count} == present
        assert multiset._num_markers == len(counts) - len(present)
        if isinstance(multiset, OpenInts):
            assert sorted(multiset._heap) == sorted(counts)
        else:
            hung = [
                time
                for groups in multiset._below.values()
                for g in groups
                for time in g
            ]
            assert sorted([*hung, *multiset.frontier.times]) == sorted(counts)
        assert set(multiset.frontier.elements) == minimal(present)


@given(
    st.integers(0, 9),
    st.integers(1, 3),
    st.tuples(st.integers(0, 9), st.integers(0, 3)),
    st.integers(0, 3),
    st.booleans(),
)
def test_the_only_open_time_gives_way_by_the_same_rules(
    only: int, count: int, other: tuple[int, int], gone: int, is_reversed: bool
) -> None:
    multiset = OpenInts()
    multiset.apply([(only, count)])
    changes = [(only, -min(gone, count)), other]

    moved = multiset.apply(changes[::-1] if is_reversed else changes)

    counts = Counter({only: count})
    for time, delta in changes:
        counts[time] += delta
    left = {time: number for time, number in counts.items() if number}
    assert {time: n for time, n in multiset.counts.items() if n} == left
    least = min(left, default=None)
    assert multiset.frontier.elements == (() if least is None else (least,))
    expected = [] if least == only else [(only, -1)]
    if least not in (None, only):
        expected.append((least, 1))
    assert moved == sorted(expected)
    assert sorted(multiset._heap) == sorted(multiset.counts)
