"""The validator finds what is wrong, and names rank, row and action."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ml.pipeline.cases import schedules, unhurried
from timelyml.errors import ScheduleError
from timelyml.ml.pipeline import (
    Action,
    Channels,
    Schedule,
    find_faults,
    gpipe,
    one_f_one_b,
    peak_by_rank,
    validate,
    with_early_receives,
    zb_h1,
    zbv,
)

RIGHT = "0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n"
SPLIT = "0F0,0I0,0W0\r\n1F0,1I0,1W0\r\n"
WRITTEN = "0F0,0SEND_F0,0RECV_B0,0B0\r\n1RECV_F0,1F0,1B0,1SEND_B0\r\n"

WRONG = {
    "a forward is missing": (
        RIGHT.replace("1F1,", ""),
        ("missing", 1, None, "1F1"),
        "rank 1: 1F1 is never done",
    ),
    "a backward is missing": (
        RIGHT.replace(",0B1", ""),
        ("missing", 0, None, "0B1"),
        "rank 0: 0B1 is never done",
    ),
    "a weight part is missing": (
        SPLIT.replace(",0W0", ""),
        ("missing", 0, None, "0W0"),
        "rank 0: 0W0 is never done",
    ),
    "an operation is repeated": (
        RIGHT.replace("1B1", "1B1,1B0"),
        ("duplicate", 1, 4, "1B0"),
        "rank 1, row 4: 1B0 is done before",
    ),
    "a whole backward after its parts": (
        SPLIT.replace("1W0", "1W0,1B0"),
        ("duplicate", 1, 3, "1B0"),
        "1B0 repeats 1I0, done before",
    ),
    "a part after the whole backward": (
        RIGHT.replace("0B1", "0B1,0W1"),
        ("duplicate", 0, 4, "0W1"),
        "0W1 is part of 0B1, done before",
    ),
    "a microbatch too many": (
        RIGHT.replace("1B1", "1B1,1F2,1B2"),
        ("range", 1, 4, "1F2"),
        "1F2 is of a microbatch beyond 1",
    ),
    "a stage on two ranks": (
        RIGHT.replace("1F1", "0F1"),
        ("placement", 1, 2, "0F1"),
        "0F1 is of a stage that lives on rank 0",
    ),
    "a backward before its forward": (
        RIGHT.replace("1F1,1B1", "1B1,1F1"),
        ("order", 1, 2, "1B1"),
        "1B1 runs without 1F1 before it",
    ),
    "a weight part before its input part": (
        SPLIT.replace("0I0,0W0", "0W0,0I0"),
        ("order", 0, 1, "0W0"),
        "0W0 runs without 0I0 before it",
    ),
    "an input part before its forward": (
        SPLIT.replace("1F0,1I0", "1I0,1F0"),
        ("order", 1, 0, "1I0"),
        "1I0 runs without 1F0 before it",
    ),
    "a computation beside a transfer": (
        WRITTEN.replace("0F0,0SEND_F0", "0F0+0SEND_F0"),
        ("row", 0, 0, "0F0+0SEND_F0"),
        "holds a computation beside something else",
    ),
    "a send is missing": (
        WRITTEN.replace(",1SEND_B0", ""),
        ("communication", 1, None, "1SEND_B0"),
        "1SEND_B0 is never done",
    ),
    "a receive is missing": (
        WRITTEN.replace("0RECV_B0,", ""),
        ("communication", 0, 2, "0B0"),
        "0B0 runs without 0RECV_B0 before it",
    ),
    "a receive after its use": (
        WRITTEN.replace("1RECV_F0,1F0", "1F0,1RECV_F0"),
        ("communication", 1, 0, "1F0"),
        "1F0 runs without 1RECV_F0 before it",
    ),
    "a send before what it sends": (
        WRITTEN.replace("1B0,1SEND_B0", "1SEND_B0,1B0"),
        ("communication", 1, 2, "1SEND_B0"),
        "1SEND_B0 stands before 1I0, which it sends",
    ),
    "a send that nobody needs": (
        WRITTEN.replace("1SEND_B0", "1SEND_B0,1SEND_F0"),
        ("communication", 1, 4, "1SEND_F0"),
        "1SEND_F0 carries nothing that is needed",
    ),
    "a transfer twice": (
        WRITTEN.replace("1SEND_B0", "1SEND_B0,1SEND_B0"),
        ("duplicate", 1, 4, "1SEND_B0"),
        "1SEND_B0 is done before",
    ),
}


@pytest.mark.parametrize("text", [RIGHT, SPLIT, WRITTEN])
def test_the_schedules_that_are_about_to_be_broken_are_right(text):
    validate(Schedule.from_csv(text))


@pytest.mark.parametrize(("text", "place", "message"), WRONG.values(), ids=WRONG)
def test_a_fault_is_named_with_its_place(text, place, message):
    schedule = Schedule.from_csv(text, rank_of_stage=(0, 1), name="broken")
    with pytest.raises(ScheduleError, match="broken cannot run; got rank") as error:
        validate(schedule)
    found = error.value
    assert (found.reason, found.rank, found.row, found.action) == place
    assert message in str(found)
    assert message in found.faults[0]


def test_a_stage_beyond_the_last_is_refused():
    schedule = Schedule.from_csv(WRITTEN, rank_of_stage=(0,))
    faults = find_faults(schedule)
    assert {fault.reason for fault in faults} >= {"range"}
    assert "1F0 is of a stage that does not exist" in {f.what for f in faults}


def test_a_stage_on_a_rank_that_does_not_exist_is_refused():
    schedule = Schedule.from_csv(RIGHT, rank_of_stage=(0, 2))
    with pytest.raises(ScheduleError, match="lives on a rank that does not exist"):
        validate(schedule)


def test_stages_of_one_rank_in_the_wrong_order_are_refused():
    # In a V the last stage reads the one before it from its own rank.
    schedule = Schedule.from_csv("1F0,0F0,1B0,0B0\r\n")
    with pytest.raises(ScheduleError, match="row 0: 1F0 runs without 0F0"):
        validate(schedule)


def test_stages_may_differ_in_how_they_do_backward():
    validate(Schedule.from_csv("0F0,0B0\r\n1F0,1I0,1W0\r\n"))
    validate(Schedule.from_csv("0F0,0I0,0W0\r\n1F0,1B0\r\n"))


@unhurried
@given(schedules(), st.data())
def test_a_row_taken_out_is_missed(plan, data):
    plan = data.draw(st.sampled_from([plan, with_early_receives(plan)]))
    rows = [list(rank) for rank in plan.without_bubbles().rows]
    rank = data.draw(st.integers(0, len(rows) - 1))
    (gone,) = rows[rank].pop(data.draw(st.integers(0, len(rows[rank]) - 1)))
    less = Schedule(
        "less", plan.rank_of_stage, plan.num_microbatches, tuple(map(tuple, rows))
    )
    with pytest.raises(ScheduleError, match="less cannot run") as error:
        validate(less, channels=Channels(depth=None))
    assert any(str(gone) in fault for fault in error.value.faults)


@unhurried
@given(schedules(), st.data())
def test_a_row_done_twice_is_found(plan, data):
    rows = [list(rank) for rank in plan.without_bubbles().rows]
    rank = data.draw(st.integers(0, len(rows) - 1))
    again = data.draw(st.sampled_from(rows[rank]))
    rows[rank].append(again)
    more = Schedule(
        "more", plan.rank_of_stage, plan.num_microbatches, tuple(map(tuple, rows))
    )
    with pytest.raises(ScheduleError, match=f"{again[0]} is done before") as error:
        validate(more)
    assert (error.value.reason, error.value.rank) == ("duplicate", rank)


@unhurried
@given(schedules())
def test_a_schedule_keeps_within_its_own_peaks_and_not_below(plan):
    peaks = peak_by_rank(plan)
    deep = Channels(depth=None)
    validate(plan, channels=deep, max_live=peaks)
    with pytest.raises(ScheduleError, match="live activations, more than") as error:
        validate(plan, channels=deep, max_live=max(peaks) - 1)
    assert error.value.reason == "memory"


def test_a_memory_fault_says_which_forward_is_too_much():
    with pytest.raises(ScheduleError, match="live activations") as error:
        validate(gpipe(2, 4), max_live=(4, 2))
    assert error.value.faults == (
        "rank 1, row 2: 1F2 makes 3 live activations, more than 2",
    )
    assert (error.value.rank, error.value.row, error.value.action) == (1, 2, "1F2")


def test_memory_can_be_counted_in_sizes_of_stages():
    validate(zbv(2, 4), max_live=41, sizes=(10, 1, 1, 1))
    with pytest.raises(ScheduleError, match="row 2: 0F2 makes 30 live"):
        validate(zbv(2, 4), max_live=29, sizes=(10, 1, 1, 1))


def test_a_bound_that_the_schedule_meets_is_met():
    validate(one_f_one_b(4, 8), max_live=(4, 3, 2, 1))
    validate(zb_h1(4, 8), max_live=4)


def test_an_idle_rank_is_no_fault():
    validate(Schedule("one of two", (0,), 1, (_one_stage(), ())))


def _one_stage():
    return tuple((Action.parse(text),) for text in ("0F0", "0B0"))
