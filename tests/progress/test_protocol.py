from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timelyml.errors import ProgressProtocolError
from timelyml.progress import (
    ProgressAccumulator,
    ProgressBatch,
    ProgressInbox,
    ProgressLog,
    ReachabilityGraph,
    Summary,
    Tracker,
)

from .oracles import graphs
from .test_tracker import batches


def chain(num_workers: int = 1) -> Tracker:
    """Two locations, one edge, a capability per worker at the first one."""
    graph = ReachabilityGraph([0, 0], [(0, 1, Summary.identity(0))])
    return Tracker(graph, [(0, 0, num_workers)])


def apply(tracker: Tracker, batch: ProgressBatch | None) -> None:
    assert batch is not None
    tracker.update_many(batch.changes)
    tracker.propagate()


def test_a_buffer_that_can_move_a_frontier_goes_as_a_whole() -> None:
    log = ProgressLog(sender=2, generation=7)
    log.record(0, 0, -1)
    log.record(0, 3, 1)
    log.record(1, 9, 2)
    log.record(1, 9, -1)
    batch = log.take(chain())
    assert batch == ProgressBatch(7, 2, 0, ((0, 0, -1), (0, 3, 1), (1, 9, 1)))
    assert log.is_empty


def test_a_buffer_without_a_decrease_that_matters_stays_as_a_whole() -> None:
    tracker = chain()
    log = ProgressLog(0, 0)
    log.record(1, 4, 1)  # an increase holds back nothing by itself
    assert log.take(tracker) is None
    log.record(0, 5, -1)  # dominated: location 0 is held at 0
    assert log.take(tracker) is None
    log.record(0, 0, -1)
    batch = log.take(tracker)
    assert batch is not None
    assert set(batch.changes) == {(1, 4, 1), (0, 5, -1), (0, 0, -1)}
    assert batch.sequence == 0
    assert log.take(tracker) is None
    assert log.is_empty


def test_a_held_buffer_is_tested_again_when_a_frontier_has_moved() -> None:
    tracker = chain()
    tracker.update(1, 5, 1)
    tracker.propagate()
    log = ProgressLog(0, 0)
    log.record(1, 5, -1)
    assert log.take(tracker) is None
    tracker.update(0, 0, -1)
    tracker.propagate()
    apply(tracker, log.take(tracker))
    assert tracker.is_empty()


def test_a_decrease_is_redundant_while_another_pointstamp_leads_to_it() -> None:
    tracker = chain()
    tracker.update(1, 0, 1)  # location 0 at time 0 leads to this one too
    tracker.propagate()
    log = ProgressLog(0, 0)
    log.record(1, 0, -1)
    assert log.take(tracker) is None


def test_changes_that_cancel_are_never_sent() -> None:
    log = ProgressLog(0, 0)
    log.record(0, 5, 1)
    assert log.take(chain()) is None
    log.record(0, 5, -1)
    assert log.take(chain()) is None
    assert log.is_empty
    assert log.take(chain(), force=True) is None


def test_force_sends_what_would_stay() -> None:
    log = ProgressLog(0, 0)
    log.record(0, 5, 1)
    log.record(0, 6, -1)
    tracker = chain()
    assert log.take(tracker) is None
    batch = log.take(tracker, force=True)
    assert batch is not None
    assert batch.changes == ((0, 5, 1), (0, 6, -1))
    log.record(0, 7, 1)
    batch = log.take(tracker, force=True)
    assert batch is not None
    assert (batch.sequence, batch.changes) == (1, ((0, 7, 1),))


@settings(max_examples=150)
@given(st.data())
def test_a_buffer_is_sent_exactly_if_some_net_decrease_is_global(
    data: st.DataObject,
) -> None:
    graph = data.draw(graphs())
    tracker, log = Tracker(graph), ProgressLog(0, 0)
    buffered: Counter[tuple[int, object]] = Counter()
    sequence = 0
    recorded = data.draw(batches(graph))
    received = data.draw(batches(graph))
    for index, changes in enumerate(recorded):
        for location, time, delta in changes:
            log.record(location, time, delta)
            buffered[location, time] += delta
        is_due = any(
            count < 0 and tracker.is_global(location, time)  # type: ignore[arg-type]
            for (location, time), count in buffered.items()
        )
        batch = log.take(tracker)
        assert (batch is not None) == is_due
        if batch is not None:
            net = {stamp: count for stamp, count in buffered.items() if count}
            assert {(place, time): n for place, time, n in batch.changes} == net
            assert batch.sequence == sequence
            sequence += 1
            buffered.clear()
            tracker.update_many(batch.changes)
        assert log.is_empty == (not any(buffered.values()))
        tracker.update_many(received[index] if index < len(received) else [])
        tracker.propagate()


@given(st.permutations([(sender, seq) for sender in (0, 1) for seq in range(4)]))
def test_batches_are_delivered_in_sequence_per_sender(
    arrivals: list[tuple[int, int]],
) -> None:
    inbox = ProgressInbox(generation=3)
    delivered: dict[int, list[int]] = {0: [], 1: []}
    seen: set[tuple[int, int]] = set()
    for sender, sequence in arrivals:
        seen.add((sender, sequence))
        for ready in inbox.accept(ProgressBatch(3, sender, sequence, ())):
            delivered[ready.sender].append(ready.sequence)
        prefix = delivered[sender]
        assert prefix == list(range(len(prefix)))
        assert (sender, len(prefix)) not in seen  # nothing ready is kept back
        assert inbox.num_early == len(seen) - sum(map(len, delivered.values()))
    assert delivered == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}


def test_a_duplicate_is_refused_whether_applied_or_kept() -> None:
    inbox = ProgressInbox(generation=3)
    assert inbox.accept(ProgressBatch(3, 1, 0, ()))
    with pytest.raises(ProgressProtocolError, match=r"sender 1 .* sequence 0 again"):
        inbox.accept(ProgressBatch(3, 1, 0, ()))
    assert inbox.accept(ProgressBatch(3, 1, 2, ())) == []
    with pytest.raises(ProgressProtocolError, match=r"sender 1 .* sequence 2 again"):
        inbox.accept(ProgressBatch(3, 1, 2, ()))
    assert [b.sequence for b in inbox.accept(ProgressBatch(3, 1, 1, ()))] == [1, 2]


def test_a_batch_of_another_generation_is_refused() -> None:
    foreign = ProgressBatch(2, 0, 0, ())
    for accept in (ProgressInbox(3).accept, ProgressAccumulator(3).accept):
        with pytest.raises(ProgressProtocolError, match="generation 2; expected gen"):
            accept(foreign)


def test_an_accumulator_merges_only_prefixes() -> None:
    accumulator = ProgressAccumulator(generation=1)
    tracker = chain(num_workers=2)
    accumulator.accept(ProgressBatch(1, 0, 1, ((0, 0, -1),)))
    assert accumulator.settle(tracker, force=True) == ([], None)
    assert not accumulator.is_empty
    accumulator.accept(ProgressBatch(1, 1, 0, ((0, 0, -1), (1, 0, 4))))
    accumulator.accept(ProgressBatch(1, 0, 0, ((1, 0, -4), (1, 7, 1))))
    _, batch = accumulator.settle(tracker)
    assert batch is not None
    assert (batch.sender, batch.sequence) == (-1, 0)
    assert set(batch.changes) == {(0, 0, -2), (1, 7, 1)}
    assert accumulator.is_empty


def test_an_accumulator_holds_what_cannot_move_a_frontier() -> None:
    accumulator = ProgressAccumulator(generation=1)
    tracker = chain()
    accumulator.accept(ProgressBatch(1, 0, 0, ((1, 5, 1),)))
    assert accumulator.settle(tracker) == ([], None)
    accumulator.accept(ProgressBatch(1, 1, 0, ((0, 0, -1),)))
    moved, batch = accumulator.settle(tracker)
    assert moved == [(0, 0, -1), (1, 0, -1), (1, 5, 1)]
    assert batch is not None
    assert set(batch.changes) == {(1, 5, 1), (0, 0, -1)}
    accumulator.accept(ProgressBatch(1, 0, 1, ((1, 5, -1),)))
    moved, second = accumulator.settle(tracker)
    assert moved == [(1, 5, -1)]
    assert second is not None
    assert second.sequence == 1


def test_an_accumulator_waits_for_the_last_worker_that_holds_a_frontier() -> None:
    accumulator = ProgressAccumulator(generation=1)
    tracker = chain(num_workers=3)
    for worker in range(2):
        accumulator.accept(ProgressBatch(1, worker, 0, ((0, 0, -1), (0, 1, 1))))
        assert accumulator.settle(tracker) == ([], None)
    accumulator.accept(ProgressBatch(1, 2, 0, ((0, 0, -1), (0, 1, 1))))
    _, batch = accumulator.settle(tracker)
    assert batch is not None
    assert set(batch.changes) == {(0, 0, -3), (0, 1, 3)}
