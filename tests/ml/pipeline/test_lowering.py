"""Transfers written out: which there are, and over which channels they run."""

import pytest
from hypothesis import given

from tests.ml.pipeline.cases import FLAT, schedules, unhurried
from tests.ml.pipeline.oracles import just_in_time, receive_of, send_of
from timelyml.errors import ScheduleError
from timelyml.ml.pipeline import (
    Channels,
    Schedule,
    execute,
    find_faults,
    gpipe,
    one_f_one_b,
    simulate,
    validate,
    with_early_receives,
    with_late_receives,
    zbv,
)


def actions_of(schedule):
    return [action for rank in schedule.rows for row in rank for action in row]


@unhurried
@given(schedules())
def test_every_value_that_crosses_ranks_is_sent_once_and_received_once(plan):
    wanted = []
    for action in actions_of(plan):
        around = receive_of(action, plan), action, send_of(action, plan)
        wanted += [a for a in around if a is not None]
    for lowered in (with_early_receives(plan), with_late_receives(plan)):
        assert sorted(actions_of(lowered)) == sorted(wanted)
        assert find_faults(lowered) == []


@unhurried
@given(schedules())
def test_computations_keep_their_order(plan):
    bare = plan.without_bubbles().rows
    for lowered in (with_early_receives(plan), with_late_receives(plan)):
        computations = tuple(
            tuple(row for row in rank if row[0].op.is_compute) for rank in lowered.rows
        )
        assert computations == bare


@unhurried
@given(schedules())
def test_early_receives_need_no_buffer_whatever_the_schedule(plan):
    lowered = with_early_receives(plan)
    for shared in (False, True):
        validate(lowered, channels=Channels(depth=0, shared=shared))


@unhurried
@given(schedules())
def test_posted_early_receives_take_no_longer_than_late_ones(plan):
    early = simulate(
        with_early_receives(plan), channels=Channels(depth=None, posted=True)
    )
    assert early.makespan == simulate(plan).makespan


@unhurried
@given(schedules())
def test_late_receives_one_by_one_are_just_in_time(plan):
    lowered = with_late_receives(plan, post_together=False)
    assert [list(rank) for rank in lowered.rows] == just_in_time(plan)


@unhurried
@given(schedules(FLAT, max_stages=1))
def test_exchanges_posted_together_need_no_buffer_with_one_stage_a_rank(plan):
    validate(with_late_receives(plan), channels=Channels(depth=0))


def test_gpipe_has_nothing_to_post_together():
    lowered = with_late_receives(gpipe(4, 8))
    assert all(len(row) == 1 for rank in lowered.rows for row in rank)


def test_1f1b_posts_its_crossing_sends_together():
    lowered = with_late_receives(one_f_one_b(2, 2))
    assert "0SEND_F1+0RECV_B0" in lowered.to_csv()
    apart = with_late_receives(one_f_one_b(2, 2), post_together=False)
    assert execute(apart, Channels(depth=0)).waits


def test_nothing_is_sent_where_a_v_turns():
    lowered = with_early_receives(zbv(3, 5))
    names = {str(action) for action in actions_of(lowered)}
    assert "2SEND_F0" not in names
    assert "3RECV_F0" not in names
    assert "5RECV_F0" in names


@pytest.mark.parametrize("lower", [with_early_receives, with_late_receives])
def test_what_is_written_out_is_not_lowered_again(lower):
    with pytest.raises(ScheduleError, match="written out already"):
        lower(with_early_receives(gpipe(2, 2)))


def test_a_plan_that_cannot_run_is_not_lowered():
    plan = Schedule.from_csv("0B0,0F0\r\n1F0,1B0\r\n")
    with pytest.raises(ScheduleError, match="rank 0 cannot reach row 0; got 0B0"):
        with_early_receives(plan)
