"""Credit goes back soon, in few messages, and all of it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.fakes import FakeClock
from timelyml.runtime.refunds import DELAY_S, SHARES, Refunds

LIMIT_BYTES = 800


def test_a_little_goes_back_within_a_few_milliseconds():
    clock = FakeClock()
    refunds = Refunds(LIMIT_BYTES, clock)
    assert refunds.due_at() is None
    refunds.owe(1, 7, 10)
    refunds.owe(1, 8, 20)
    assert refunds.due_at() == clock.now + DELAY_S
    assert list(refunds.take_due()) == []
    clock.pass_(DELAY_S)
    assert list(refunds.take_due()) == [(1, ((7, 10), (8, 20)))]
    assert refunds.due_at() is None


def test_an_eighth_of_the_credit_goes_back_at_once():
    refunds = Refunds(LIMIT_BYTES, FakeClock())
    refunds.owe(1, 7, LIMIT_BYTES // SHARES - 1)
    assert list(refunds.take_due()) == []
    refunds.owe(1, 7, 1)
    assert list(refunds.take_due()) == [(1, ((7, LIMIT_BYTES // SHARES),))]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 200)),
        max_size=40,
    )
)
def test_everything_owed_goes_back_exactly_once(owed):
    clock = FakeClock()
    refunds = Refunds(LIMIT_BYTES, clock)
    expected, paid = Counter(), Counter()
    for peer, channel, size in owed:
        refunds.owe(peer, channel, size)
        expected[peer, channel] += size
        clock.pass_(DELAY_S / 3)
        for to, by_channel in refunds.take_due():
            paid.update({(to, of): size for of, size in by_channel})
    clock.pass_(DELAY_S)
    for to, by_channel in refunds.take_due():
        paid.update({(to, of): size for of, size in by_channel})
    assert paid == expected
