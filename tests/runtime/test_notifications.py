"""Notifications come when complete, once, and in an order that extends time's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from timelyml.progress import less_than
from timelyml.runtime.notifications import Notification, NotificationQueue

PRODUCTS = st.tuples(st.integers(0, 4), st.integers(0, 4))


def _request(time, shard=0, ports=(0,)):
    return Notification(time, shard, ports, 0, [])


def _drain(queue, is_complete):
    delivered = []
    while (found := queue.pop_ready(is_complete)) is not None:
        delivered.append(found)
    return delivered


@given(st.lists(st.integers(0, 50), unique=True), st.integers(0, 50))
def test_exactly_the_complete_ints_are_delivered_in_order(times, frontier):
    queue = NotificationQueue(in_order=False)
    for time in times:
        queue.add(_request(time), is_monotone=True)

    delivered = _drain(queue, lambda shard, time, ports: time < frontier)

    assert [n.time for n in delivered] == sorted(t for t in times if t < frontier)
    assert len(queue) == len(times) - len(delivered)


@given(st.lists(PRODUCTS, unique=True), st.sets(PRODUCTS))
def test_delivered_products_extend_the_partial_order(times, complete):
    queue = NotificationQueue(in_order=False)
    for time in times:
        queue.add(_request(time), is_monotone=False)

    delivered = [n.time for n in _drain(queue, lambda s, time, p: time in complete)]

    assert sorted(delivered) == sorted(set(times) & complete)
    for index, later in enumerate(delivered):
        assert not any(less_than(later, earlier) for earlier in delivered[:index])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), unique=True))
def test_in_order_a_shard_waits_for_its_own_earlier_times_only(requests):
    queue = NotificationQueue(in_order=True)
    for time, shard in requests:
        queue.add(_request(time, shard), is_monotone=True)
    stuck = min((t for t, s in requests if s == 0), default=None)

    delivered = _drain(queue, lambda shard, time, p: (shard, time) != (0, stuck))

    assert [n.time for n in delivered if n.shard == 0] == []
    assert [n.time for n in delivered if n.shard == 1] == sorted(
        t for t, s in requests if s == 1
    )


def test_a_time_may_be_asked_for_twice_on_different_ports():
    queue = NotificationQueue(in_order=True)
    queue.add(_request(3, ports=(1,)), is_monotone=True)
    queue.add(_request(3, ports=(0,)), is_monotone=True)

    delivered = _drain(queue, lambda shard, time, ports: True)

    assert [n.ports for n in delivered] == [(0,), (1,)]
