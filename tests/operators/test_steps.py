"""Work in steps: what is yielded when, and what is sent when."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyml.operators import steps
from timelyml.operators.ordered import keep, take_kept
from timelyml.runtime.operator import Delivery


class Sent:
    """A shard and its output: it remembers, and time goes on as it is asked."""

    def __init__(self, tick_s=0.0):
        self.blocks = []
        self.records_per_step = 1
        self._clock = itertools.count(step=tick_s)

    def now(self):
        return next(self._clock)

    def output(self):
        return self

    def send(self, time, payload):
        self.blocks.append((time, list(payload)))


def test_fast_work_sends_one_block_for_one_block():
    output = Sent()

    for _ in steps.send_in_steps(output, 7, range(100), lambda chunk: chunk):
        pass

    assert output.blocks == [(7, list(range(100)))]


def test_there_is_a_yield_every_few_steps_of_fast_records():
    sizes = []
    work = steps.send_in_steps(
        Sent(), 0, range(9000), lambda chunk: sizes.append(len(chunk)) or []
    )

    num_yields = sum(1 for _ in work)

    assert max(sizes) <= steps.RECORDS_PER_STEP
    assert sum(sizes) == 9000
    assert num_yields == len(sizes) // steps.STEPS_PER_YIELD


def test_there_is_a_yield_after_every_step_of_slow_records():
    slow = Sent(tick_s=2 * steps.STEP_S)

    assert sum(1 for _ in steps.in_chunks(slow, range(20), lambda _: None)) == 20


def test_fast_records_come_in_ever_longer_steps_up_to_a_bound():
    sizes = []

    for _ in steps.in_chunks(Sent(), range(9000), lambda c: sizes.append(len(c))):
        pass

    most = steps.RECORDS_PER_STEP
    assert sizes[:4] == [1, 2, 4, 8]
    assert sizes[-2:-1] == [most]
    assert max(sizes) == most


def test_a_block_begins_with_steps_as_long_as_the_last_one_ended():
    sizes = []
    shard = Sent()

    for _ in range(2):
        for _ in steps.in_chunks(shard, range(15), lambda c: sizes.append(len(c))):
            pass

    assert sizes == [1, 2, 4, 8, 15]


def test_a_step_that_few_records_fill_says_nothing_of_many():
    sizes = []
    shard = Sent()

    for _ in range(9):
        for _ in steps.in_chunks(shard, [0], lambda c: sizes.append(len(c))):
            pass
    for _ in steps.in_chunks(shard, range(9), lambda c: sizes.append(len(c))):
        pass

    assert sizes == [1] * 9 + [2, 4, 3]


def test_slow_records_are_worked_on_one_by_one():
    sizes = []
    slow = Sent(tick_s=2 * steps.STEP_S)

    for _ in steps.in_chunks(slow, range(20), lambda c: sizes.append(len(c))):
        pass

    assert sizes == [1] * 20


def test_a_block_that_fits_in_one_step_is_sent_without_steps():
    output = Sent()
    output.records_per_step = 100

    left = steps.send_results(output, 7, list(range(100)), lambda chunk: chunk[::-1])

    assert (left, output.blocks) == (None, [(7, list(range(99, -1, -1)))])
    assert output.records_per_step == 200  # it was fast, and a full one


def test_a_block_that_was_slow_in_one_step_takes_several_the_next_time():
    output = Sent(tick_s=2 * steps.STEP_S)
    output.records_per_step = 100
    doubled = [2 * n for n in range(100)]

    def double(chunk):
        return [2 * n for n in chunk]

    assert steps.send_results(output, 0, list(range(100)), double) is None
    left = steps.send_results(output, 1, list(range(100)), double)

    assert left is not None
    assert sum(1 for _ in left) > 1
    assert [n for time, block in output.blocks for n in block] == 2 * doubled


@given(st.lists(st.lists(st.integers(), max_size=9), max_size=40), st.integers(1, 50))
@pytest.mark.parametrize("is_lazy", [False, True])
def test_what_is_sent_at_once_is_what_steps_send(is_lazy, records, size):
    def work(chunk):
        results = itertools.chain.from_iterable(chunk)
        return results if is_lazy else list(results)

    output = Sent()
    output.records_per_step = size
    for _ in steps.send_results(output, 3, records, work) or ():
        pass

    sent = [n for _, block in output.blocks for n in block]
    assert sent == [n for record in records for n in record]


def test_an_endless_generator_is_left_every_few_results():
    output = Sent()
    work = steps.send_in_steps(output, 0, [1], lambda _: itertools.count())

    for _ in range(3 * steps.RECORDS_PER_BLOCK // steps.RECORDS_PER_STEP):
        next(work)

    assert len(output.blocks) >= 2
    sent = [n for _, block in output.blocks for n in block]
    assert sent == list(range(len(sent)))


def test_results_of_slow_work_are_sent_before_it_is_done():
    output = Sent(tick_s=steps.MAX_DELAY_S / 3)
    work = steps.send_in_steps(output, 0, range(1000), lambda chunk: chunk)

    for _ in range(4):
        next(work)

    assert 0 < len(output.blocks[0][1]) <= 4 * steps.RECORDS_PER_STEP


@given(st.lists(st.lists(st.integers(), max_size=40), max_size=40))
def test_steps_change_neither_records_nor_their_order(records):
    output = Sent()

    for _ in steps.send_in_steps(output, 0, records, itertools.chain.from_iterable):
        pass

    sent = [n for _, block in output.blocks for n in block]
    assert sent == [n for record in records for n in record]
    assert all(block for _, block in output.blocks)


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 2)), max_size=30
    )
)
def test_kept_blocks_come_by_producer_then_as_they_came(deliveries):
    cell = {}
    for index, (port, producer, time) in enumerate(deliveries):
        keep(cell, Delivery(port, time, [index], 1, producer))

    for time, port in itertools.product(range(3), range(2)):
        expected = sorted(
            (producer, index)
            for index, (p, producer, t) in enumerate(deliveries)
            if (p, t) == (port, time)
        )
        found = take_kept(cell, time, port)
        assert found == [[index] for _, index in expected]
    assert cell == {}
