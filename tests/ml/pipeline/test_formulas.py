"""Closed forms equal the simulator wherever they say that they hold."""

from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.ml.pipeline.cases import (
    num_microbatches,
    num_ranks,
    small_costs,
    unhurried,
)
from timelyml.errors import ScheduleError
from timelyml.ml.pipeline import (
    Costs,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    simulate,
    zb_h1,
    zbv,
)
from timelyml.ml.pipeline import formulas as f

stages = st.integers(1, 3)
costs = st.builds(Costs, small_costs, small_costs, st.integers(0, 7))
undivided = st.builds(Costs, forward=small_costs, backward=small_costs)


def bubble(timeline):
    whole = timeline.num_ranks * timeline.makespan
    return Fraction(whole - timeline.busy, whole)


@unhurried
@given(num_ranks, num_microbatches, undivided, st.integers(0, 5))
def test_gpipe_takes_its_formula_and_the_way_of_messages(ranks, batches, cost, latency):
    cost = Costs(cost.forward, backward=cost.backward, communication=latency)
    got = simulate(gpipe(ranks, batches), cost).makespan
    assert got == f.gpipe_makespan(ranks, batches, cost)


@unhurried
@given(num_ranks, num_microbatches, undivided)
def test_1f1b_takes_its_formula(ranks, batches, cost):
    got = simulate(one_f_one_b(ranks, batches), cost).makespan
    assert got == f.one_f_one_b_makespan(ranks, batches, cost)


@unhurried
@given(num_ranks, num_microbatches, stages, costs)
def test_interleaved_takes_its_formula_whatever_the_groups(ranks, batches, v, cost):
    got = simulate(interleaved_1f1b(ranks, batches, stages_per_rank=v), cost).makespan
    assert got == f.interleaved_makespan(ranks, batches, v, cost)


@unhurried
@given(num_ranks, num_microbatches, costs)
def test_zb_h1_takes_its_formula(ranks, batches, cost):
    assume(batches >= ranks or cost.weight <= min(cost.forward, cost.input))
    got = simulate(zb_h1(ranks, batches), cost).makespan
    assert got == f.zb_h1_makespan(ranks, batches, cost)


@unhurried
@given(num_ranks, num_microbatches, stages, costs)
def test_interleaved_zero_bubble_takes_its_formula(ranks, extra, v, cost):
    batches = ranks + extra - 1
    schedule = interleaved_zero_bubble(ranks, batches, stages_per_rank=v)
    expected = f.interleaved_zero_bubble_makespan(ranks, batches, v, cost)
    assert simulate(schedule, cost).makespan == expected


@unhurried
@given(num_ranks, num_microbatches, small_costs)
def test_zbv_takes_its_formula_with_equal_times(ranks, batches, time):
    cost = Costs(time, time, time)
    got = simulate(zbv(ranks, batches), cost).makespan
    assert got == f.zbv_makespan(ranks, batches, cost)


@unhurried
@given(num_ranks, num_microbatches, costs, stages)
def test_the_bubbles_of_undivided_schedules_do_not_depend_on_times(
    ranks, batches, cost, v
):
    expected = f.flush_bubble(ranks, batches)
    assert bubble(simulate(gpipe(ranks, batches), cost)) == expected
    assert bubble(simulate(one_f_one_b(ranks, batches), cost)) == expected
    batches += ranks
    deep = simulate(interleaved_1f1b(ranks, batches, stages_per_rank=v), cost)
    assert bubble(deep) == f.interleaved_bubble(ranks, batches, v)


@unhurried
@given(num_ranks, num_microbatches, stages)
def test_the_bubbles_of_divided_schedules_at_equal_times(ranks, extra, v):
    batches = ranks + extra - 1
    flat = simulate(zb_h1(ranks, batches))
    assert bubble(flat) == f.zero_bubble_bubble(ranks, batches)
    deep = simulate(interleaved_zero_bubble(ranks, batches, stages_per_rank=v))
    assert bubble(deep) == f.zero_bubble_bubble(ranks, batches, v)
    if 2 * batches >= 3 * ranks - 1:
        folded = simulate(zbv(ranks, batches))
        assert bubble(folded) == f.zero_bubble_bubble(ranks, batches, 2)


def test_published_values_at_four_ranks_and_eight_microbatches():
    assert f.flush_bubble(4, 8) == Fraction(3, 11)
    assert round(float(f.interleaved_bubble(4, 8, 2)), 4) == 0.1579
    assert f.zero_bubble_bubble(4, 8) == Fraction(3, 27)
    assert round(float(f.zero_bubble_bubble(4, 8, 2)), 4) == 0.0588


OUTSIDE = {
    "latency": lambda: f.one_f_one_b_makespan(2, 2, Costs(communication=1)),
    "latency, interleaved": lambda: f.interleaved_makespan(
        2, 2, 2, Costs(communication=1)
    ),
    "latency, split": lambda: f.zb_h1_makespan(2, 2, Costs(communication=1)),
    "latency, split, few": lambda: f.zb_h1_makespan(4, 2, Costs(communication=1)),
    "latency, V": lambda: f.zbv_makespan(2, 2, Costs(communication=1)),
    "uneven stages": lambda: f.gpipe_makespan(2, 2, Costs(forward=(1, 2))),
    "long weight parts": lambda: f.zb_h1_makespan(4, 2, Costs(weight=2)),
    "unequal times in a V": lambda: f.zbv_makespan(4, 8, Costs(forward=2)),
    "few microbatches": lambda: f.interleaved_zero_bubble_makespan(4, 3),
    "few, bubble": lambda: f.interleaved_bubble(4, 3),
    "few, zero-bubble": lambda: f.zero_bubble_bubble(4, 3),
}


@pytest.mark.parametrize("call", OUTSIDE.values(), ids=OUTSIDE)
def test_a_formula_refuses_what_it_does_not_cover(call):
    with pytest.raises(ScheduleError, match="does not hold here"):
        call()


def test_equal_times_may_be_told_stage_by_stage():
    cost = Costs(forward=(2, 2), input=(1, 1), weight=(1, 1))
    assert f.gpipe_makespan(2, 3, cost) == simulate(gpipe(2, 3), cost).makespan == 16
