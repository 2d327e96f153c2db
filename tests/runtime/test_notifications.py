"""Notifications come when complete, once, and in an order that extends time's."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyml.progress import less_equal, less_than
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
        queue.add(_request(time), is_dense=False)

    delivered = _drain(queue, lambda shard, time, ports: time < frontier)

    assert [n.time for n in delivered] == sorted(t for t in times if t < frontier)
    assert len(queue) == len(times) - len(delivered)


@given(st.lists(st.tuples(PRODUCTS, st.integers(0, 2)), unique=True), st.sets(PRODUCTS))
def test_exactly_the_complete_products_are_delivered_in_order(requests, frontier):
    queue = NotificationQueue(in_order=False)
    for time, shard in requests:
        queue.add(_request(time, shard), is_dense=False)

    def is_complete(shard, time, ports):
        return not any(less_equal(element, time) for element in frontier)

    delivered = [(n.time, n.shard) for n in _drain(queue, is_complete)]

    assert delivered == sorted(r for r in requests if is_complete(r[1], r[0], ()))
    assert len(queue) == len(requests) - len(delivered)


@given(st.lists(PRODUCTS, unique=True), st.sets(PRODUCTS))
def test_delivered_products_extend_the_partial_order(times, complete):
    queue = NotificationQueue(in_order=False)
    for time in times:
        queue.add(_request(time), is_dense=True)

    delivered = [n.time for n in _drain(queue, lambda s, time, p: time in complete)]

    assert sorted(delivered) == sorted(set(times) & complete)
    for index, later in enumerate(delivered):
        assert not any(less_than(later, earlier) for earlier in delivered[:index])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), unique=True))
def test_in_order_a_shard_waits_for_its_own_earlier_times_only(requests):
    queue = NotificationQueue(in_order=True)
    for time, shard in requests:
        queue.add(_request(time, shard), is_dense=True)
    stuck = min((t for t, s in requests if s == 0), default=None)

    delivered = _drain(queue, lambda shard, time, p: (shard, time) != (0, stuck))

    assert [n.time for n in delivered if n.shard == 0] == []
    assert [n.time for n in delivered if n.shard == 1] == sorted(
        t for t, s in requests if s == 1
    )


def test_a_time_may_be_asked_for_twice_on_different_ports():
    queue = NotificationQueue(in_order=True)
    queue.add(_request(3, ports=(1,)), is_dense=False)
    queue.add(_request(3, ports=(0,)), is_dense=False)

    delivered = _drain(queue, lambda shard, time, ports: True)

    assert [n.ports for n in delivered] == [(0,), (1,)]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 6), st.integers(0, 1), st.sampled_from([(0,), (1,), (0, 1)])
        ),
        unique=True,
    ),
    st.tuples(st.integers(0, 7), st.integers(0, 7)),
)
def test_in_order_an_earlier_time_on_other_ports_comes_first(requests, frontiers):
    queue = NotificationQueue(in_order=True)
    for request in requests:
        queue.add(_request(*request), is_dense=False)

    def is_complete(shard, time, ports):
        return all(time < frontiers[port] for port in ports)

    delivered = [(n.time, n.shard, n.ports) for n in _drain(queue, is_complete)]

    for shard in (0, 1):
        mine = sorted(r for r in requests if r[1] == shard)
        stuck = min((r[0] for r in mine if not is_complete(*r[1::-1], r[2])), default=9)
        due = [r for r in mine if r[0] <= stuck and is_complete(shard, r[0], r[2])]
        assert [r for r in delivered if r[1] == shard] == due


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_looking_for_a_ready_one_costs_the_same_however_many_are_open(depth, in_order):
    def looks(num_open):
        queue, looked = NotificationQueue(in_order=in_order), 0
        times = list(range(num_open))
        random.Random(7).shuffle(times)
        for time in times:
            queue.add(_request((time, time) if depth else time), is_dense=False)

        def is_complete(shard, time, ports):
            nonlocal looked
            looked += 1
            return False

        queue.pop_ready(is_complete)
        return looked

    assert looks(10_000) == looks(10) == 1


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("is_dense", [False, True])
def test_delivering_one_costs_the_same_however_many_shards_wait(in_order, is_dense):
    def looks(num_shards):
        queue, looked = NotificationQueue(in_order=in_order), 0
        for shard in range(num_shards):
            for time in (1, 0):
                queue.add(_request(time, shard), is_dense=is_dense)

        def is_complete(shard, time, ports):
            nonlocal looked
            looked += 1
            return True

        delivered = _drain(queue, is_complete)
        assert [n.time for n in delivered] == [0] * num_shards + [1] * num_shards
        return looked / len(delivered)

    assert looks(1_000) == looks(1) == 1


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), unique=True),
    st.booleans(),
)
def test_at_one_time_those_that_go_first_come_first(requests, is_dense):
    first = {(1,): ((0,),), (0, 2): ((0,), (1,))}
    ports = [(0, 2), (1,), (0,)]
    queue = NotificationQueue(in_order=True, first=first)
    for time, which in requests:
        queue.add(_request(time, ports=ports[which]), is_dense=is_dense)

    delivered = [(n.time, -ports.index(n.ports)) for n in _drain(queue, _always)]

    assert delivered == sorted((time, -which) for time, which in requests)


def _always(shard, time, ports):
    return True
