from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyml.errors import InvariantError
from timelyml.exchange import CreditLedger

sizes = st.lists(st.integers(0, 150), max_size=60)


@given(sizes, st.randoms(use_true_random=False))
def test_what_is_outstanding_never_exceeds_the_credit_but_for_one_large_block(
    blocks, random
):
    ledger, queue = CreditLedger(100), deque()
    waiting, taken = list(blocks), []
    while waiting or queue:
        if waiting and ledger.can_send(waiting[0]):
            ledger.spend(waiting[0])
            queue.append(waiting.pop(0))
        else:  # the receiver has to work
            for _ in range(random.randint(1, len(queue))):
                taken.append(queue.popleft())
                ledger.refund(taken[-1])
        assert sum(queue) == ledger.outstanding_bytes <= max([100, *queue])
    assert taken == blocks
    assert ledger.outstanding_bytes == 0


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
