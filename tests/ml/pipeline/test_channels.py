"""What blocks, and who waits for whom: against the definition by graphs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ml.pipeline.cases import schedules, unhurried
from tests.ml.pipeline.oracles import just_in_time, runs_to_the_end
from timelyml.errors import ScheduleDeadlockError, ScheduleError
from timelyml.ml.pipeline import (
    SCHEDULES,
    Channels,
    Schedule,
    execute,
    gpipe,
    needed_depth,
    one_f_one_b,
    simulate,
    validate,
    with_early_receives,
    with_late_receives,
    zb_h1,
    zbv,
)

depths = st.sampled_from([0, 1, 2, 3, None])


def shuffled(plan, swaps):
    """Swap rows of some ranks: most results still do every operation once."""
    rows = [list(rank) for rank in plan.without_bubbles().rows]
    for rank, first, second in swaps:
        line = rows[rank % len(rows)]
        a, b = first % len(line), second % len(line)
        line[a], line[b] = line[b], line[a]
    homes = plan.rank_of_stage
    return Schedule("shuffled", homes, plan.num_microbatches, tuple(map(tuple, rows)))


def keeps_own_order(plan):
    """Whether nothing precedes what it reads from its own rank."""
    for rank in plan.rows:
        seen = set()
        for action in (a for row in rank for a in row):
            stage, op, microbatch = action.stage, action.op, action.microbatch
            reads = {
                "F": [(stage - 1, "F")],
                "W": [(stage, "I")],
            }.get(op, [(stage, "F"), (stage + 1, "I")])
            mine = [
                (s, o, microbatch)
                for s, o in reads
                if 0 <= s < plan.num_stages
                and plan.rank_of_stage[s] == plan.rank_of_stage[stage]
            ]
            if any(value not in seen for value in mine):
                return False
            seen.add((stage, "I" if op == "B" else op, microbatch))
    return True


def reason_against(plan, channels):
    try:
        validate(plan, channels=channels)
    except ScheduleError as error:
        return error.reason
    return None


swaps = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 99), st.integers(0, 99)), max_size=3
)


@unhurried
@given(schedules(), depths, st.booleans())
def test_generated_schedules_stop_exactly_where_the_graph_has_a_cycle(
    plan, depth, shared
):
    got = not execute(plan, Channels(depth=depth, shared=shared)).waits
    assert got == runs_to_the_end(plan, just_in_time(plan), depth, shared)


@unhurried
@given(schedules(), swaps, depths, st.booleans())
def test_shuffled_schedules_are_valid_exactly_if_the_graph_has_no_cycle(
    plan, swaps, depth, shared
):
    wrong = shuffled(plan, swaps)
    channels = Channels(depth=depth, shared=shared)
    is_right = keeps_own_order(wrong) and runs_to_the_end(
        wrong, just_in_time(wrong), depth, shared
    )
    reason = reason_against(wrong, channels)
    assert is_right == (reason is None)
    assert reason in (None, "order", "deadlock")


@unhurried
@given(schedules(("1f1b", "zb-h1", "zbv", "interleaved 1f1b")), swaps)
def test_a_cycle_of_waits_is_one(plan, swaps):
    execution = execute(shuffled(plan, swaps), Channels(depth=0))
    cycle = execution.wait_cycle()
    assert bool(cycle) == bool(execution.waits)
    for wait, following in zip(cycle, (*cycle[1:], *cycle[:1]), strict=True):
        assert wait.on_rank == following.rank
        assert wait in execution.waits


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_without_buffers_every_schedule_but_gpipe_deadlocks(ranks):
    for name, generate in SCHEDULES.items():
        execution = execute(generate(ranks, 2 * ranks), Channels(depth=0))
        assert bool(execution.waits) == (name != "gpipe"), name


def test_a_deadlock_names_ranks_rows_and_actions():
    with pytest.raises(ScheduleDeadlockError, match="a cycle of waits") as error:
        validate(one_f_one_b(2, 4), channels=Channels(depth=0))
    assert error.value.cycle == (
        "rank 0 row 1 0SEND_F1 waits until rank 1 reaches 1RECV_F1",
        "rank 1 row 1 1SEND_B0 waits until rank 0 reaches 0RECV_B0",
    )
    first = error.value.rank, error.value.row, error.value.action
    assert first == (0, 1, "0SEND_F1")


def test_a_full_channel_is_told_from_a_receive_that_is_not_there():
    # Rank 1 wants to give gradients back before rank 0 has got rid of its forwards.
    first = ",".join(f"0F{i}" for i in range(4)) + ",0B0,0B1,0B2,0B3\r\n"
    second = ",".join(f"1F{i},1B{i}" for i in range(4)) + "\r\n"
    plan = Schedule.from_csv(first + second)
    with pytest.raises(ScheduleDeadlockError, match="deeper channels") as error:
        validate(plan, channels=Channels(depth=1))
    assert error.value.cycle == (
        "rank 0 row 3 0SEND_F3 waits until rank 1 takes 1RECV_F2 from the full channel",
        "rank 1 row 3 1SEND_B1 waits until rank 0 takes 0RECV_B0 from the full channel",
    )
    validate(plan, channels=Channels(depth=2))


def test_a_message_behind_one_that_is_wanted_later_is_a_cycle_of_its_own():
    schedule = zbv(2, 4)
    with pytest.raises(ScheduleDeadlockError, match="ahead of it in the same channel"):
        validate(schedule, channels=Channels(depth=9, shared=True))


def test_a_posted_receive_does_not_hold_its_rank_up():
    early = with_early_receives(zb_h1(4, 8))
    assert simulate(early, channels=Channels(depth=None)).makespan == 34
    assert simulate(early, channels=Channels(depth=None, posted=True)).makespan == 27


def test_what_a_posted_receive_waits_for_is_told_too():
    text = "0F0,0SEND_F0,0RECV_B0,0B0\r\n1RECV_F0,1F0,1B0\r\n"
    waits = execute(Schedule.from_csv(text), Channels(depth=1, posted=True)).waits
    assert [str(wait) for wait in waits] == [
        "rank 0 row 3 0B0 waits until rank 1 reaches 1SEND_B0"
    ]


@unhurried
@given(schedules(), st.booleans())
def test_the_needed_depth_is_the_least_that_suffices(plan, shared):
    depth = needed_depth(plan, shared=shared)
    if depth is None:
        assert execute(plan, Channels(depth=None, shared=shared)).waits
        return
    assert not execute(plan, Channels(depth=depth, shared=shared)).waits
    if depth:
        assert execute(plan, Channels(depth=depth - 1, shared=shared)).waits


def test_needed_depths_of_the_usual_sizes():
    depths = {name: needed_depth(make(4, 8)) for name, make in SCHEDULES.items()}
    assert depths == {
        "gpipe": 0,
        "1f1b": 1,
        "interleaved 1f1b": 1,
        "zb-h1": 1,
        "interleaved zero-bubble": 2,
        "zbv": 1,
    }
    assert needed_depth(with_late_receives(one_f_one_b(4, 8))) == 0
    assert needed_depth(gpipe(1, 3)) == 0


def test_channels_have_no_negative_depth():
    with pytest.raises(ScheduleError, match="negative depth; got -1"):
        Channels(depth=-1)
