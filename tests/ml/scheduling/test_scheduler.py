"""One scheduler by hand: what each event leads to."""

from __future__ import annotations

import pickle

import pytest

from timelyml.errors import AdmissionError, ConfigError, InvariantError, ProgramError
from timelyml.ml.scheduling import (
    DEFAULT_ESTIMATE_NS,
    Drained,
    Fifo,
    Gang,
    GangDone,
    GangGraph,
    GangKey,
    GangScheduler,
    Grant,
    Outcome,
    Priority,
    ProgramDone,
    Report,
    Scope,
    Submission,
)

ONE = GangGraph([Gang("f", "all")])
LINE = GangGraph([Gang("f", "all"), Gang("f", "all", (0,)), Gang("f", "all", (1,))])


def scheduler(policy=None, *, max_unfinished=1, **options):
    made = GangScheduler(policy, max_unfinished=max_unfinished, **options)
    made.place("all", {"h0": ["d0", "d1"], "h1": ["d2", "d3"]})
    made.place("left", {"h0": ["d0", "d1"]})
    made.place("right", {"h1": ["d2", "d3"]})
    for client in "ab":
        made.join(client)
    return made


def submit(made, client, program, graph=ONE, **options):
    return made.submit(Submission(client, program, graph, **options))


def granted(effects):
    return [e.key.program for e in effects if isinstance(e, Grant)]


def finish(made, sequence, *hosts, device_ns=1_000_000, **options):
    names = hosts or ("h0", "h1")
    return made.finished(
        [Report(host, sequence, device_ns, **options) for host in names]
    )


def test_a_grant_says_where_in_which_order_and_at_which_place_on_each_host():
    made = scheduler(max_unfinished=8)
    submit(made, "a", "p", GangGraph([Gang("f", "left")]))
    (grant,) = submit(made, "b", "q", GangGraph([Gang("f", "all", estimate_ns=10**7)]))
    assert grant == Grant(
        generation=0,
        sequence=1,
        key=GangKey("q", 0, 0),
        client="b",
        placement="all",
        positions=(("h0", 1), ("h1", 0)),
        estimate_ns=10**7,
    )


def test_a_gang_is_over_once_all_of_its_hosts_say_so():
    made = scheduler()
    submit(made, "a", "p")
    assert finish(made, 0, "h0", device_ns=5) == []
    assert finish(made, 0, "h1", device_ns=9) == [
        GangDone(0, GangKey("p", 0, 0), "a", device_ns=9, num_devices=4),
        ProgramDone("a", "p", Outcome.FINISHED),
    ]


def test_a_host_cannot_report_twice_nor_what_it_was_not_given():
    made = scheduler()
    submit(made, "a", "p", GangGraph([Gang("f", "left")]))
    with pytest.raises(InvariantError, match="host 'h1' reports a launch that it does"):
        finish(made, 0, "h1")
    finish(made, 0, "h0")
    with pytest.raises(InvariantError, match="got sequence 0"):
        finish(made, 0, "h0")


def test_gangs_are_ordered_ahead_of_what_they_need_being_done():
    made = scheduler(max_unfinished=8)
    effects = submit(made, "a", "p", LINE)
    assert [e.key.gang for e in effects] == [0, 1, 2]


def test_other_programs_come_in_between_the_gangs_of_a_chain():
    made = scheduler(Priority())
    assert granted(submit(made, "a", "chain", LINE)) == ["chain"]
    submit(made, "b", "urgent", priority=1)
    assert granted(finish(made, 0)) == ["urgent"]
    assert granted(finish(made, 1)) == ["chain"]


def test_first_in_first_out_keeps_a_chain_together():
    made = scheduler(Fifo())
    submit(made, "a", "chain", LINE)
    submit(made, "b", "later")
    order = [name for sequence in range(3) for name in granted(finish(made, sequence))]
    assert order == ["chain", "chain", "later"]


def test_a_loop_stands_in_line_anew_for_every_iteration():
    made = scheduler(Fifo())
    submit(made, "a", "loop", iterations=None)
    submit(made, "b", "other")
    order = [name for sequence in range(4) for name in granted(finish(made, sequence))]
    # The second iteration was in line before the other program came.
    assert order == ["loop", "other", "loop", "loop"]


def test_a_loop_ends_after_the_iteration_under_way():
    made = scheduler(max_unfinished=2)
    loop = GangGraph([Gang("f", "all"), Gang("g", "all", (0,))])
    submit(made, "a", "loop", loop, iterations=None)
    made.stop("loop")  # both gangs of iteration 0 are ordered, so 1 is under way
    ends = []
    for sequence in range(4):
        ends += [e for e in finish(made, sequence) if isinstance(e, ProgramDone)]
    assert ends == [ProgramDone("a", "loop", Outcome.FINISHED)]
    made.stop("loop")  # news that come too late change nothing


def test_stopping_never_makes_a_program_longer():
    made = scheduler(max_unfinished=2)
    submit(made, "a", "p", iterations=2)
    made.stop("p", 5)
    assert finish(made, 0)[1:] == []
    assert finish(made, 1)[-1] == ProgramDone("a", "p", Outcome.FINISHED)


def test_priority_overtakes_and_age_rises():
    made = scheduler(Priority(aging_ns=2_000_000))
    submit(made, "a", "running")
    submit(made, "a", "low", priority=0)
    order = []
    for index in range(5):  # there is always another one that is more urgent
        submit(made, "b", f"high{index}", priority=1)
        order += granted(finish(made, index))
    # 2 ms of others' device time lift it by one, and then it was there first.
    assert order == ["high0", "high1", "low", "high2", "high3"]


def test_priority_without_age_lets_the_lower_wait():
    made = scheduler(Priority())
    submit(made, "a", "running")
    submit(made, "a", "low")
    for index in range(4):
        submit(made, "b", f"high{index}", priority=1)
    order = [name for sequence in range(5) for name in granted(finish(made, sequence))]
    assert order[-1] == "low"


@pytest.mark.parametrize("aging_ns", [0, -5])
def test_age_needs_a_positive_step(aging_ns):
    with pytest.raises(ConfigError, match="expected 1 or more"):
        Priority(aging_ns=aging_ns)


def test_cancelling_drops_what_waits_and_lets_run_what_is_ordered():
    made = scheduler()
    submit(made, "a", "p", LINE)
    submit(made, "b", "q")
    assert made.cancel("p") == []
    done, end, grant = finish(made, 0)
    assert (done.key, end) == (
        GangKey("p", 0, 0),
        ProgramDone("a", "p", Outcome.CANCELLED),
    )
    assert grant.key.program == "q"
    assert made.cancel("p") == []  # gone


def test_a_failed_gang_ends_its_program_and_no_other():
    made = scheduler()
    submit(made, "a", "p", LINE)
    submit(made, "b", "q")
    effects = finish(made, 0, is_failed=True)
    assert ProgramDone("a", "p", Outcome.FAILED) in effects
    assert granted(effects) == ["q"]


def test_a_client_that_leaves_is_gone_when_nothing_of_it_runs():
    made = scheduler()
    submit(made, "a", "p", LINE)
    submit(made, "a", "p2")
    assert made.leave("a") == [ProgramDone("a", "p2", Outcome.CANCELLED)]
    with pytest.raises(ProgramError, match="client 'a' is not here"):
        submit(made, "a", "p3")
    assert Drained(Scope.CLIENT, "a") in finish(made, 0)
    made.join("a")
    assert granted(submit(made, "a", "p3")) == ["p3"]


def test_a_client_without_anything_is_gone_at_once():
    assert scheduler().leave("a") == [Drained(Scope.CLIENT, "a")]


@pytest.mark.parametrize(
    ("scope", "name"),
    [(Scope.CLIENT, "a"), (Scope.PROGRAM, "p"), (Scope.PLACEMENT, "all")],
)
def test_what_is_held_drains_waits_and_goes_on(scope, name):
    made = scheduler()
    submit(made, "a", "p", LINE)
    assert made.hold(scope, name) == []
    assert Drained(scope, name) in finish(made, 0)
    assert [reason for _, reason in made.waiting()] == [
        "the release of its program"
        if scope is Scope.PROGRAM
        else "the release of its client or placement",
        "gang 1 of its program",
    ]
    assert granted(made.release(scope, name)) == ["p"]


def test_a_program_may_be_held_before_it_comes_and_opened_while_it_is_held():
    made = scheduler()
    assert made.hold(Scope.PROGRAM, "p") == [Drained(Scope.PROGRAM, "p")]
    submit(made, "a", "p", GangGraph([Gang("f", "all", num_external=1)]))
    assert made.open("p", 0) == []
    assert granted(made.release(Scope.PROGRAM, "p")) == ["p"]


def test_a_held_placement_leaves_its_devices_to_others():
    made = scheduler()
    made.hold(Scope.PLACEMENT, "all")
    submit(made, "a", "p")
    assert granted(submit(made, "b", "q", GangGraph([Gang("f", "left")]))) == ["q"]


def test_a_placement_moves_with_what_waits_for_it():
    made = scheduler()
    left = GangGraph([Gang("f", "left")])
    submit(made, "a", "p", left)
    submit(made, "a", "p2", left)
    with pytest.raises(ProgramError, match="cannot move; got 1 launches under way"):
        made.move("left", {"h1": ["d2", "d3"]})
    made.hold(Scope.PLACEMENT, "left")
    finish(made, 0, "h0")
    with pytest.raises(ProgramError, match="impossible devices"):
        made.move("left", {})
    made.move("left", {"h1": ["d2", "d3"]})
    (grant,) = made.release(Scope.PLACEMENT, "left")
    assert (grant.key.program, grant.positions) == ("p2", (("h1", 0),))


def test_a_placement_in_use_cannot_go():
    made = scheduler()
    submit(made, "a", "p")
    with pytest.raises(ProgramError, match="placement 'all' is in use"):
        made.unplace("all")
    finish(made, 0)
    made.unplace("all")
    with pytest.raises(ProgramError, match=r"got placements \['all'\]"):
        submit(made, "a", "p2")


def test_devices_that_no_placement_has_are_forgotten():
    made = scheduler()
    for name in ("all", "left", "right"):
        made.unplace(name)
    assert made._placements.num_groups == 0
    made.place("all", {"h0": ["d0"]})
    assert granted(submit(made, "a", "p")) == ["p"]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ({}, "impossible devices"),
        ({"h0": []}, "impossible devices"),
        ({"h0": ["d0"], "h1": ["d0"]}, "each device once"),
    ],
)
def test_impossible_placements_are_refused(devices, message):
    with pytest.raises(ProgramError, match=message):
        scheduler().place("new", devices)


def test_a_placement_has_one_name():
    with pytest.raises(ProgramError, match="there already"):
        scheduler().place("all", {"h0": ["d0"]})


def test_a_split_group_keeps_what_is_under_way():
    made = GangScheduler(max_unfinished=1)
    made.join("a")
    made.place("all", {"h": ["d0", "d1"]})
    submit(made, "a", "p")
    made.place("one", {"h": ["d1"]})
    child, parent = made._placements.groups_of("one")[0], 0
    times = [made._accounts._by_group[g]["a"].virtual_ns for g in (parent, child)]
    assert times == [DEFAULT_ESTIMATE_NS] * 2
    assert submit(made, "a", "q", GangGraph([Gang("g", "one")])) == []
    assert granted(finish(made, 0, "h")) == ["q"]


def test_a_restart_loses_what_had_begun_and_keeps_what_had_not():
    made = scheduler()
    submit(made, "a", "begun", LINE)
    submit(made, "b", "waits")
    lost, grant = made.restart()
    assert lost == ProgramDone("a", "begun", Outcome.LOST)
    assert (grant.key.program, grant.generation) == ("waits", 1)
    assert grant.sequence == 1
    assert grant.positions == (("h0", 0), ("h1", 0))
    with pytest.raises(InvariantError, match="does not have"):
        finish(made, 0)


def test_lost_launches_cost_their_client_nothing():
    made = scheduler()
    submit(made, "a", "p")
    made.restart()
    groups = made._placements.groups_of("all")
    assert all(made._accounts._by_group[g]["a"].virtual_ns == 0 for g in groups)


def test_a_gang_waits_for_every_input_from_elsewhere():
    made = scheduler()
    submit(made, "a", "p", GangGraph([Gang("f", "all", num_external=2)]))
    assert made.waiting() == [(GangKey("p", 0, 0), "2 inputs from elsewhere")]
    assert made.open("p", 0, 1) == []
    assert made.open("p", 0, 1) == []  # the same input, for the next iteration
    assert granted(made.open("p", 0, 0)) == ["p"]


@pytest.mark.parametrize(("gang", "slot"), [(0, 1), (1, 0), (-1, 0), (0, -1)])
def test_an_input_that_nobody_declared_is_refused(gang, slot):
    made = scheduler()
    submit(made, "a", "p", GangGraph([Gang("f", "all", num_external=1)]))
    with pytest.raises(ProgramError, match="no such outside input"):
        made.open("p", gang, slot)


def test_waiting_gangs_say_what_for():
    made = scheduler()
    submit(made, "a", "p", LINE)
    assert dict(made.waiting()) == {
        GangKey("p", 1, 0): "a device that is full",
        GangKey("p", 2, 0): "gang 1 of its program",
    }


def test_a_client_may_have_only_so_many_programs():
    made = scheduler(max_programs=2)
    submit(made, "a", "p0")
    submit(made, "a", "p1")
    with pytest.raises(AdmissionError, match="expected fewer than 2") as caught:
        submit(made, "a", "p2")
    assert pickle.loads(pickle.dumps(caught.value)).client == "a"
    submit(made, "b", "p3")  # the other is not concerned
    finish(made, 0)
    submit(made, "a", "p2")


def test_names_of_programs_are_unique():
    made = scheduler()
    submit(made, "a", "p")
    with pytest.raises(ProgramError, match="there already"):
        submit(made, "b", "p")


@pytest.mark.parametrize("weight", [0, -1])
def test_a_weight_is_a_positive_number(weight):
    with pytest.raises(ProgramError, match="impossible weight"):
        scheduler().join("c", weight=weight)


@pytest.mark.parametrize("needs", [(0,), (1,), (-1,)])
def test_a_gang_needs_only_earlier_ones(needs):
    with pytest.raises(ProgramError, match="not before it"):
        GangGraph([Gang("f", "all", needs)])


def test_a_program_has_gangs():
    with pytest.raises(ProgramError, match="no gangs"):
        GangGraph([])


def test_one_long_gang_is_next_while_another_runs_and_short_ones_fill_the_window():
    made = scheduler(max_unfinished=32, window_ns=4_000_000)
    made._order.estimates.learn("long", 50_000_000)
    made._order.estimates.learn("short", 40_000)
    long, short = GangGraph([Gang("long", "all")]), GangGraph([Gang("short", "all")])
    assert granted(submit(made, "a", "l0", long)) == ["l0"]
    assert granted(submit(made, "a", "l1", long)) == ["l1"], "or devices would idle"
    assert granted(submit(made, "a", "l2", long)) == []
    assert granted(finish(made, 0, device_ns=50_000_000)) == ["l2"]
    finish(made, 1, device_ns=50_000_000)
    finish(made, 2, device_ns=50_000_000)
    ordered = [n for k in range(40) for n in granted(submit(made, "a", f"s{k}", short))]
    assert len(ordered) == 32


def test_who_is_alone_has_more_under_way_until_somebody_else_comes():
    ms = 10**6
    made = scheduler(max_unfinished=32, window_ns=8 * ms, window_alone_ns=24 * ms)
    graph = GangGraph([Gang("f", "left", estimate_ns=2 * ms)])
    ordered = [granted(submit(made, "a", f"p{number}", graph)) for number in range(20)]
    assert sum(map(len, ordered)) == 12
    assert made.is_alone("a", "left")
    submit(made, "b", "q", graph)
    assert not made.is_alone("a", "left")
    assert made.is_alone("b", "right")
    ended = (finish(made, sequence, "h0", device_ns=2 * ms) for sequence in range(9))
    assert [granted(effects) for effects in ended] == [[]] * 8 + [["p12"]]
