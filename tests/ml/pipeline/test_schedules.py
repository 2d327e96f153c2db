"""Every generated schedule runs, at any size, and holds no more than it may."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ml.pipeline.cases import (
    FLAT,
    MANY,
    num_microbatches,
    num_ranks,
    schedules,
    unhurried,
)
from timelyml.errors import ScheduleError
from timelyml.ml.pipeline import (
    SCHEDULES,
    Channels,
    find_faults,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    loop_placement,
    needed_depth,
    peak_by_rank,
    v_placement,
    validate,
    zbv,
)
from timelyml.ml.pipeline.formulas import (
    gpipe_peaks,
    interleaved_peaks,
    interleaved_zero_bubble_peaks,
    largest_group,
    one_f_one_b_peaks,
    zbv_peaks,
)


@unhurried
@given(schedules())
def test_every_generated_schedule_is_valid_over_deep_channels(schedule):
    validate(schedule, channels=Channels(depth=None))


@unhurried
@given(schedules(FLAT, max_stages=1))
def test_one_message_deep_is_enough_for_one_stage_a_rank(schedule):
    validate(schedule, channels=Channels(depth=1))
    validate(schedule, channels=Channels(depth=1, shared=True))


@unhurried
@given(schedules(("zbv",)))
def test_one_message_deep_is_enough_for_a_v_with_a_channel_per_direction(schedule):
    validate(schedule, channels=Channels(depth=1))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [2, 3])
def test_a_v_deadlocks_at_any_depth_if_directions_share_a_channel(ranks, rounds):
    assert needed_depth(zbv(ranks, rounds * ranks), shared=True) is None


@unhurried
@given(num_ranks, st.integers(1, 3), st.integers(1, 3))
def test_one_message_deep_is_enough_for_whole_rounds_of_interleaved(
    ranks, rounds, stages
):
    schedule = interleaved_1f1b(ranks, rounds * ranks, stages_per_rank=stages)
    validate(schedule, channels=Channels(depth=1))


@unhurried
@given(schedules(MANY))
def test_a_group_deep_is_enough_for_interleaved_schedules_of_any_size(schedule):
    depth = largest_group(schedule.num_ranks, schedule.num_microbatches)
    validate(schedule, channels=Channels(depth=depth))


@unhurried
@given(num_ranks, num_microbatches, st.integers(1, 3))
def test_peaks_are_those_of_the_formulas(ranks, microbatches, stages):
    sizes = ranks, microbatches
    expected = {
        "gpipe": gpipe_peaks(*sizes),
        "1f1b": one_f_one_b_peaks(*sizes),
        "interleaved 1f1b": interleaved_peaks(*sizes, 2),
        "zb-h1": interleaved_zero_bubble_peaks(*sizes, 1),
        "interleaved zero-bubble": interleaved_zero_bubble_peaks(*sizes, 2),
        "zbv": zbv_peaks(*sizes),
    }
    for name, generate in SCHEDULES.items():
        assert peak_by_rank(generate(*sizes)) == expected[name]
    deep = interleaved_1f1b(*sizes, stages_per_rank=stages)
    assert peak_by_rank(deep) == interleaved_peaks(*sizes, stages)
    split = interleaved_zero_bubble(*sizes, stages_per_rank=stages)
    assert peak_by_rank(split) == interleaved_zero_bubble_peaks(*sizes, stages)
    wide = gpipe(*sizes, stages_per_rank=stages)
    assert peak_by_rank(wide) == gpipe_peaks(*sizes, stages)


@unhurried
@given(schedules(("interleaved 1f1b", "zb-h1", "interleaved zero-bubble", "zbv")))
def test_a_slot_reads_only_what_earlier_slots_made(schedule):
    # The bubbles drawn suffice for slots of equal length.
    slots = {
        (a.stage, "I" if a.op == "B" else a.op, a.microbatch): slot
        for rank in range(schedule.num_ranks)
        for slot, a in schedule.numbered(rank)
    }
    for (stage, op, microbatch), slot in slots.items():
        reads = {
            "F": [(stage - 1, "F", microbatch)],
            "W": [(stage, "I", microbatch)],
            "I": [(stage, "F", microbatch), (stage + 1, "I", microbatch)],
        }[op]
        assert all(slots.get(value, -1) < slot for value in reads)


def test_placements_are_a_loop_and_a_v():
    assert loop_placement(3, 2) == (0, 1, 2, 0, 1, 2)
    assert v_placement(3, 3) == (0, 1, 2, 2, 1, 0, 0, 1, 2)
    assert zbv(3, 5).rank_of_stage == v_placement(3)
    assert zbv(3, 5).stages_of(1) == (1, 4)


def test_gpipe_takes_either_placement_and_no_other():
    assert gpipe(2, 2, stages_per_rank=2, placement="v").rank_of_stage == (0, 1, 1, 0)
    with pytest.raises(ScheduleError, match="unknown placement; got 'ring'"):
        gpipe(2, 2, placement="ring")


@pytest.mark.parametrize("generate", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 4)])
def test_a_pipeline_has_at_least_one_rank_and_microbatch(generate, sizes):
    with pytest.raises(ScheduleError, match="expected 1 or more"):
        generate(*sizes)


@pytest.mark.parametrize("generate", SCHEDULES.values(), ids=SCHEDULES)
def test_a_large_pipeline_is_valid_too(generate):
    schedule = generate(16, 64)
    assert find_faults(schedule) == []
    validate(schedule, channels=Channels(depth=8))


def test_uneven_groups_differ_by_one_microbatch_at_most():
    rank = interleaved_1f1b(4, 11).rows[0]
    forwards = [str(row[0]) for row in rank if row and "F" in str(row[0])]
    runs = "".join("a" if name.startswith("0") else "b" for name in forwards)
    assert runs == "a" * 6 + "b" * 6 + "a" * 5 + "b" * 5
