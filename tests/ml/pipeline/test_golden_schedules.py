"""Schedules equal those of other projects, cell for cell."""

import pytest

from tests.ml.pipeline.cases import GOLDEN, generated_for, golden_names, golden_text
from timelyml.errors import ScheduleError
from timelyml.ml.pipeline import (
    Channels,
    Costs,
    Schedule,
    execute,
    find_faults,
    simulate,
    validate,
    with_early_receives,
    with_late_receives,
)

TABLE = {
    "gpipe_S4_M8.compute.csv": 33,
    "1f1b_S4_M8.runtime.csv": 33,
    "interleaved1f1b_S4x2_M8.compute.csv": 57,
    "zb1p_S4_M8.compute.csv": 27,
    "interleavedzb_S4x2_M8.compute.csv": 51,
    "zbv_S4x2_M8.compute.csv": 51,
}
"""Makespans with forward 1 and backward 2, of which half is for the weights."""


def every_name():
    kinds = ("compute", "comms", "runtime", "runtime_p2p")
    return [name for kind in kinds for name in golden_names(kind)]


def test_there_are_golden_files_of_every_kind():
    kinds = ("compute", "comms", "runtime", "runtime_p2p")
    counts = [len(golden_names(kind)) for kind in kinds]
    assert counts == [10, 10, 10, 10]
    assert len(list(GOLDEN.glob("negative_*.csv"))) == 3


@pytest.mark.parametrize("name", golden_names("compute") + golden_names("runtime"))
def test_generated_plans_equal_the_golden_ones(name):
    assert generated_for(name).to_csv() == golden_text(name)


@pytest.mark.parametrize("name", golden_names("comms"))
def test_early_receives_equal_the_golden_lowering(name):
    assert with_early_receives(generated_for(name)).to_csv() == golden_text(name)


@pytest.mark.parametrize("name", golden_names("runtime_p2p"))
def test_late_receives_equal_what_the_golden_runtime_posted(name):
    assert with_late_receives(generated_for(name)).to_csv() == golden_text(name)


@pytest.mark.parametrize("name", every_name())
def test_a_golden_file_survives_reading_and_writing(name):
    assert Schedule.from_csv(golden_text(name)).to_csv() == golden_text(name)


@pytest.mark.parametrize("name", every_name())
def test_a_golden_file_is_valid(name):
    validate(Schedule.from_csv(golden_text(name)), channels=Channels(depth=2))


@pytest.mark.parametrize("name", TABLE)
def test_golden_plans_take_the_golden_time(name):
    assert simulate(Schedule.from_csv(golden_text(name))).makespan == TABLE[name]


@pytest.mark.parametrize(
    "name", [name for name in TABLE if name.replace("compute", "comms") != name]
)
def test_golden_lowerings_take_the_golden_time_if_receives_are_posted(name):
    lowered = Schedule.from_csv(golden_text(name.replace("compute", "comms")))
    posted = Channels(depth=0, posted=True)
    assert simulate(lowered, channels=posted).makespan == TABLE[name]


def test_golden_transfers_of_the_1f1b_runtime_cost_nothing():
    posted = Schedule.from_csv(golden_text("1f1b_S4_M8.runtime_p2p.csv"))
    assert simulate(posted, Costs(), channels=Channels(depth=0)).makespan == 33


@pytest.mark.parametrize("name", golden_names("comms"))
def test_golden_lowerings_need_no_buffer(name):
    lowered = Schedule.from_csv(golden_text(name))
    assert not execute(lowered, Channels(depth=0)).waits


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 4), (4, 8)])
def test_a_plan_whose_last_rank_counts_from_one_is_refused(ranks, microbatches):
    name = f"negative_torch213_plan_1f1b_S{ranks}_M{microbatches}.compute.csv"
    plan = Schedule.from_csv(golden_text(name), name="plan")
    last = ranks - 1
    with pytest.raises(ScheduleError, match=f"rank {last}: {last}F0 is never") as error:
        validate(plan)
    assert (error.value.reason, error.value.rank) == ("missing", last)
    end = 2 * microbatches - 2
    beyond = f"{last}F{microbatches} is of a microbatch beyond {microbatches - 1}"
    assert list(map(str, find_faults(plan))) == [
        f"rank {last}: {last}F0 is never done",
        f"rank {last}, row {end}: {beyond}",
        f"rank {last}, row 1: {last}B0 runs without {last}F0 before it",
    ]
