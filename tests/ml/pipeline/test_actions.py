"""Actions and schedules as values and as text."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ml.pipeline.cases import schedules, unhurried
from timelyml.errors import ScheduleError
from timelyml.ml.pipeline import (
    Action,
    Op,
    Schedule,
    one_f_one_b,
    with_early_receives,
    with_late_receives,
    zb_h1,
)

actions = st.builds(
    Action, st.integers(0, 40), st.sampled_from(Op), st.integers(0, 999)
)


@given(actions)
def test_an_action_reads_back_what_it_writes(action):
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F", "0F", "F0", "0X1", "0SEND0", "-1F0", "0F0 "])
def test_text_that_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError, match="unknown action"):
        Action.parse(text)


@pytest.mark.parametrize(("stage", "microbatch"), [(-1, 0), (0, -1)])
def test_an_action_has_no_negative_numbers(stage, microbatch):
    with pytest.raises(ScheduleError, match="negative number"):
        Action(stage, Op.FORWARD, microbatch)


@given(actions.filter(lambda a: not a.op.is_compute and a.stage > 0))
def test_the_counterpart_of_a_counterpart_is_the_transfer_itself(transfer):
    other = transfer.counterpart
    assert other.counterpart == transfer
    assert other.op.is_send != transfer.op.is_send
    assert (transfer.peer_stage, other.peer_stage) == (other.stage, transfer.stage)


@unhurried
@given(schedules())
def test_every_plan_survives_csv(plan):
    for schedule in (plan, with_early_receives(plan), with_late_receives(plan)):
        back = Schedule.from_csv(schedule.to_csv(), name=schedule.name)
        assert back == schedule


def test_an_error_in_a_cell_says_where():
    with pytest.raises(ScheduleError, match="rank 1, row 2: ") as error:
        Schedule.from_csv("0F0,0B0\r\n1F0,1B0,1Z0\r\n")
    assert (error.value.rank, error.value.row) == (1, 2)


def test_a_stage_that_no_rank_mentions_cannot_be_placed_by_guess():
    text = "0F0,0B0\r\n2F0,2B0\r\n"
    with pytest.raises(ScheduleError, match="never mentions stage 1"):
        Schedule.from_csv(text)
    assert Schedule.from_csv(text, rank_of_stage=(0, 0, 1)).num_stages == 3


def test_a_rank_without_actions_is_an_empty_line():
    schedule = Schedule("idle", (0,), 1, (((Action(0, Op.FORWARD, 0),),), ()))
    assert schedule.to_csv() == "0F0\r\n\r\n"
    assert Schedule.from_csv(schedule.to_csv(), name="idle") == schedule


def test_bubbles_can_be_left_out():
    plan = zb_h1(4, 8)
    bare = plan.without_bubbles()
    assert () in plan.rows[3]
    assert all(row for rank in bare.rows for row in rank)
    for rank in range(4):
        order = [action for _, action in plan.numbered(rank)]
        assert [action for _, action in bare.numbered(rank)] == order


def test_an_error_survives_pickling_with_its_values():
    with pytest.raises(ScheduleError, match="0Q0") as error:
        Schedule.from_csv("0Q0\r\n")
    back = pickle.loads(pickle.dumps(error.value))
    assert (str(back), back.reason, back.row) == (str(error.value), "spelling", 0)


def test_numbered_rows_count_bubbles():
    plan = zb_h1(2, 1)
    assert next(plan.numbered(1)) == (1, Action(1, Op.FORWARD, 0))
    assert [str(a) for _, a in one_f_one_b(2, 1).numbered(1)] == ["1F0", "1B0"]
