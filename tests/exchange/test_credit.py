from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyml.errors import InvariantError
from timelyml.exchange import CreditLedger, ReceiveQueue

sizes = st.lists(st.integers(0, 150), max_size=60)


@given(sizes, st.randoms(use_true_random=False))
def test_queued_bytes_never_exceed_the_credit_but_for_one_large_block(blocks, random):
    ledger, queue = CreditLedger(100), ReceiveQueue()
    waiting, taken = list(blocks), []
    while waiting or len(queue):
        if waiting and ledger.can_send(waiting[0]):
            size = waiting.pop(0)
            ledger.spend(size)
            queue.push(7, size, size)
        else:  # the receiver has to work
            assert len(queue)
            taken.append(queue.pop())
            if random.random() < 0.7 or not len(queue):
                ledger.refund(queue.take_refunds().get(7, 0))
        queued = [size for _, size, _ in queue._blocks]
        assert queue.queued_bytes <= max([100, *queued])
        assert queue.queued_bytes <= ledger.outstanding_bytes
    ledger.refund(queue.take_refunds().get(7, 0))
    assert taken == blocks
    assert ledger.outstanding_bytes == queue.queued_bytes == 0


def test_a_block_larger_than_the_limit_goes_alone():
    ledger = CreditLedger(10)
    ledger.spend(1)
    assert not ledger.can_send(11)
    ledger.refund(1)
    ledger.spend(11)
    assert not ledger.can_send(1)


def test_spending_without_credit_is_a_bug():
    ledger = CreditLedger(10)
    ledger.spend(6)
    with pytest.raises(InvariantError, match="got 6 bytes with 6 outstanding"):
        ledger.spend(6)
    with pytest.raises(InvariantError, match="leaves without credit; got -1"):
        ledger.spend(-1)


@pytest.mark.parametrize("size", [7, -1])
def test_refunding_what_was_not_spent_is_a_bug(size):
    ledger = CreditLedger(10)
    ledger.spend(6)
    with pytest.raises(InvariantError, match="credit comes back that nobody spent"):
        ledger.refund(size)


def test_a_limit_has_to_admit_something():
    with pytest.raises(InvariantError, match="admits nothing; got 0"):
        CreditLedger(0)


def test_refunds_are_collected_by_peer_and_returned_once():
    queue = ReceiveQueue()
    for peer, size in [(1, 10), (2, 20), (1, 5), (1, 100)]:
        queue.push(peer, "block", size)
    assert queue.take_refunds() == {}
    for _ in range(3):
        queue.pop()
    assert queue.take_refunds(minimum_bytes=16) == {2: 20}
    assert queue.take_refunds() == {1: 15}
    assert queue.take_refunds() == {}
    assert queue.queued_bytes == 100


def test_an_empty_queue_has_nothing_to_pop():
    with pytest.raises(IndexError):
        ReceiveQueue().pop()
