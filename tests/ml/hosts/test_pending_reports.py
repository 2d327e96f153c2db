"""What is over on a host is told in order, and in time for whoever waits for it."""

from __future__ import annotations

import random

import pytest

from timelyml.ml.hosts.messages import Done
from timelyml.ml.hosts.pending_reports import HOLD_S, PendingReports
from timelyml.ml.hosts.waiting import Over


def over(sequence, *, is_awaited=False):
    return Over(Done(sequence, 1_000, (), ()), is_awaited)


def test_what_somebody_waits_for_is_told_at_once_with_all_before_it():
    pending = PendingReports()
    pending.add([over(0), over(1)], 0.0)
    assert not pending.is_due(num_left=30, now_s=0.0)
    pending.add([over(2, is_awaited=True)], 0.0)
    assert pending.is_due(num_left=30, now_s=0.0)
    assert [each.sequence for each in pending.take()] == [0, 1, 2]
    pending.add([over(3)], 0.0)
    assert not pending.is_due(num_left=30, now_s=0.0)


def test_nothing_is_kept_for_longer_than_it_may_or_when_nothing_else_is_ordered():
    pending = PendingReports()
    assert not pending.is_due(num_left=0, now_s=1.0)
    pending.add([over(0)], 1.0)
    pending.add([over(1)], 1.0 + HOLD_S / 2)
    assert pending.due_s == 1.0 + HOLD_S
    assert not pending.is_due(num_left=3, now_s=1.0 + HOLD_S / 2)
    assert pending.is_due(num_left=3, now_s=pending.due_s)
    assert pending.is_due(num_left=0, now_s=1.0)


@pytest.mark.parametrize("seed", range(5))
def test_a_scheduler_that_keeps_a_few_ordered_never_sees_a_host_run_dry(seed):
    """Whatever the number: it is told of launches while as many are still to run."""
    rng, pending = random.Random(seed), PendingReports()
    most = rng.randint(2, 32)
    ordered, told, num_over = most, [], 0
    while num_over < 500:
        num_over += 1
        pending.add([over(num_over)], 0.0)
        num_left = ordered - num_over
        assert num_left >= most // 2 - 1
        if pending.is_due(num_left, 0.0):
            done = pending.take()
            told += [each.sequence for each in done]
            ordered += len(done)
    assert told == list(range(1, len(told) + 1))
    assert len(told) >= 500 - most
