"""Times and peaks, against the published table and the longest path."""

from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ml.pipeline.cases import schedules, small_costs, unhurried
from tests.ml.pipeline.oracles import (
    critical_path,
    event_graph,
    just_in_time,
    last_end,
)
from timelyml.errors import ScheduleDeadlockError, ScheduleError
from timelyml.ml.pipeline import (
    SCHEDULES,
    Channels,
    Costs,
    Schedule,
    Timeline,
    gpipe,
    one_f_one_b,
    peak_by_rank,
    peak_by_stage,
    simulate,
    zb_h1,
    zbv,
)

TABLE = {
    "gpipe": (33, 3 / 11, (8, 8, 8, 8)),
    "1f1b": (33, 3 / 11, (4, 3, 2, 1)),
    "interleaved 1f1b": (57, 0.1579, (11, 9, 7, 5)),
    "zb-h1": (27, 3 / 27, (4, 4, 4, 4)),
    "interleaved zero-bubble": (51, 0.0588, (8, 8, 8, 8)),
    "zbv": (51, 0.0588, (8, 8, 8, 8)),
}
"""Four ranks, eight microbatches, forward 1, backward 2: makespan, bubble, peaks."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_makespan_bubble_and_peaks_are_those_of_the_table(name):
    makespan, bubble, peaks = TABLE[name]
    schedule = SCHEDULES[name](4, 8)
    timeline = simulate(schedule)
    assert timeline.makespan == makespan
    assert timeline.bubble_fraction == pytest.approx(bubble, abs=5e-5)
    assert peak_by_rank(schedule) == peaks


def per_stage(count):
    return st.tuples(*[small_costs] * count)


@unhurried
@given(schedules(), st.data())
def test_the_makespan_is_the_longest_path(plan, data):
    sizes = per_stage(plan.num_stages)
    costs = Costs(
        forward=data.draw(sizes),
        input=data.draw(sizes),
        weight=data.draw(sizes),
        communication=data.draw(st.integers(0, 5)),
    )
    latency = costs.communication
    assert simulate(plan, costs).makespan == critical_path(plan, costs.of, latency)


@unhurried
@given(schedules())
def test_ranks_do_one_thing_at_a_time_and_all_of_their_work(plan):
    # Several stages a rank, one after the other: all microbatches may be on their way.
    timeline = simulate(plan, channels=Channels(depth=plan.num_microbatches))
    for rank in range(plan.num_ranks):
        spans = [span for span in timeline.spans if span.rank == rank]
        assert [s.action for s in spans] == [a for _, a in plan.numbered(rank)]
        for before, after in pairwise(spans):
            assert before.end <= after.start
    work = 3 * plan.num_stages * plan.num_microbatches
    assert timeline.busy == work
    whole = plan.num_ranks * timeline.makespan
    assert timeline.bubble_fraction == pytest.approx(1 - work / whole)


@unhurried
@given(schedules(), st.sampled_from([0, 1, 2, 3]), st.booleans(), st.integers(0, 3))
def test_blocked_sends_and_receives_hold_ranks_up_as_long_as_the_graph_says(
    plan, depth, shared, latency
):
    costs = Costs(forward=2, input=3, weight=1, communication=latency)
    rows = just_in_time(plan)
    graph = event_graph(
        plan, rows, depth, shared, duration=costs.of, latency=costs.communication
    )
    channels = Channels(depth=depth, shared=shared)
    if graph is None or not nx.is_directed_acyclic_graph(graph):
        with pytest.raises(ScheduleDeadlockError, match="cycle of waits"):
            simulate(plan, costs, channels=channels)
        return
    assert simulate(plan, costs, channels=channels).makespan == last_end(graph)


@unhurried
@given(schedules())
def test_shallow_channels_never_make_a_pipeline_faster(plan):
    free = simulate(plan).makespan
    for depth in (1, 2):
        try:
            held = simulate(plan, channels=Channels(depth=depth)).makespan
        except ScheduleDeadlockError:
            continue
        assert held >= free


@unhurried
@given(schedules())
def test_the_peaks_of_stages_are_counted_one_by_one(plan):
    peaks = []
    for stage in range(plan.num_stages):
        live = highest = 0
        for _, action in plan.numbered(plan.rank_of_stage[stage]):
            if action.stage == stage:
                live += (action.op == "F") - (action.op in "BW")
                highest = max(highest, live)
        assert live == 0
        peaks.append(highest)
    assert list(peak_by_stage(plan)) == peaks


def test_a_peak_weighs_stages_by_size():
    schedule = zbv(2, 4)
    assert peak_by_rank(schedule, (10, 1, 1, 10)) == (40, 4)
    assert peak_by_rank(schedule, 3) == (12, 12)


def test_the_whole_backward_takes_its_parts_unless_told_otherwise():
    assert simulate(one_f_one_b(2, 3), Costs(input=2, weight=3)).makespan == 4 * 6
    assert simulate(one_f_one_b(2, 3), Costs(backward=4)).makespan == 4 * 5


def test_a_message_takes_its_time():
    # Up and down three edges: the first forward and the last backward wait for them.
    assert simulate(gpipe(4, 8), Costs(communication=5)).makespan == 33 + 6 * 5


def test_a_transfer_without_a_buffer_holds_both_ranks():
    timeline = simulate(gpipe(2, 1), Costs(communication=5), channels=Channels(depth=0))
    spans = {str(s.action): (s.start, s.end) for s in timeline.spans}
    assert spans == {"0F0": (0, 1), "1F0": (6, 7), "1B0": (7, 9), "0B0": (14, 16)}


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(ScheduleError, match=r"costs of weight .* got 3 numbers"):
        simulate(zb_h1(4, 8), Costs(weight=(1, 2, 3)))


def test_a_deadlock_has_no_makespan():
    with pytest.raises(ScheduleDeadlockError, match="1f1b deadlocks"):
        simulate(one_f_one_b(2, 2), channels=Channels(depth=0))


def test_nothing_takes_no_time():
    empty = simulate(Schedule("empty", (), 0, ()))
    assert (empty.makespan, empty.bubble_fraction) == (0, 0)
    assert Timeline(2, ()).makespan == 0
