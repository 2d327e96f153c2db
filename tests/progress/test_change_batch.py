from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from timelyml.progress import ChangeBatch

deltas = st.lists(st.tuples(st.integers(0, 4), st.integers(-2, 2)), max_size=200)


@given(deltas, st.sampled_from([1, 3, 200]))
def test_a_batch_holds_the_net_counts(
    changes: list[tuple[int, int]], every: int
) -> None:
    batch: ChangeBatch[int] = ChangeBatch()
    counts: Counter[int] = Counter()
    for index, (key, delta) in enumerate(changes):
        batch.update(key, delta)
        counts[key] += delta
        if index % every == 0:
            expected = {key: count for key, count in counts.items() if count}
            assert dict(batch.items()) == expected
            assert len(batch) == len(expected)
            assert bool(batch) == bool(expected)


@given(deltas)
def test_draining_returns_everything_once(changes: list[tuple[int, int]]) -> None:
    batch = ChangeBatch(changes)
    expected = batch.items()
    assert batch.drain() == expected
    assert not batch
    assert batch.items() == []


def test_memory_is_that_of_the_keys_that_did_not_cancel() -> None:
    batch: ChangeBatch[int] = ChangeBatch()
    for index in range(10_000):
        batch.update(index % 5, 1)
        batch.update(5 + index, 1)
        batch.update(5 + index, -1)
        assert len(batch.counts) <= 5
    assert batch.items() == [(key, 2_000) for key in range(5)]
