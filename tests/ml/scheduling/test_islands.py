"""Programs on several islands."""

from __future__ import annotations

import pytest

from tests.ml.scheduling.machine import Graph, Machine, hosts
from timelyml.errors import AdmissionError, ProgramError
from timelyml.ml.scheduling import Dispatch, Grant, Outcome, PlacedGang, Report

MS = 1_000_000


def machine(**options):
    made = Machine({"i": hosts(1), "j": hosts(1)}, **options)
    for island in "ij":
        made.place(island, "all", {"d0", "d1"})
    made.join("a")
    return made


def stages(num_stages, dispatch=Dispatch.PARALLEL, **options):
    """A pipeline whose stages stand on the two islands in turn."""
    return Graph(
        [
            PlacedGang("ij"[k % 2], "f", "all", (k - 1,) if k else (), **options)
            for k in range(num_stages)
        ],
        dispatch,
    )


def test_gangs_keep_the_numbers_of_their_program():
    made = machine()
    made.submit("a", "p", stages(4))
    found = [(i, e.key.gang) for _, i, e in made.effects if isinstance(e, Grant)]
    assert found == [("i", 0), ("j", 1), ("i", 2), ("j", 3)]
    made.run()
    assert made.outcomes == {"p": Outcome.FINISHED}


def test_parallel_dispatch_orders_ahead_and_sequential_waits():
    times = {}
    for dispatch in Dispatch:
        made = machine(delays=(MS, MS), default_duration=100_000)
        made.submit("a", "p", stages(16, dispatch))
        made.run()
        times[dispatch] = made.now
    assert times[Dispatch.SEQUENTIAL] > 5 * times[Dispatch.PARALLEL]


def test_sequential_dispatch_holds_within_an_island_too():
    made = machine()
    chain = [PlacedGang("i", "f", "all", (k - 1,) if k else ()) for k in range(3)]
    made.submit("a", "p", Graph(chain, Dispatch.SEQUENTIAL))
    assert sum(isinstance(e, Grant) for _, _, e in made.effects) == 1
    made.run()
    assert made.outcomes == {"p": Outcome.FINISHED}


def test_an_island_runs_only_so_far_ahead_as_a_loop_carries():
    made = machine(durations={"quick": 10_000, "slow": 1_000_000})
    loop = Graph(
        [
            PlacedGang("i", "quick", "all", carries=((1, 4),)),
            PlacedGang("j", "slow", "all", (0,)),
        ]
    )
    made.submit("a", "p", loop, iterations=None)
    ahead = 0
    for step in range(50):
        made.run(until=step * MS)
        at = [made.islands.schedulers[i].iteration_of("p") for i in "ij"]
        ahead = max(ahead, at[0] - at[1])
    assert ahead == 4
    made.islands.stop("p")
    made.run()
    made.assert_idle()
    counts = {i: len(made.sequences[i]) for i in "ij"}
    assert counts["i"] == counts["j"]


def test_cancelling_leaves_nothing_ordered_without_its_input():
    made = machine(delays=(0, MS))
    made.submit("a", "p", stages(40))
    made.run(until=300_000)
    made.handle(made.islands.cancel("p"))
    made.run()
    made.assert_idle()
    assert made.outcomes == {"p": Outcome.CANCELLED}


def test_a_restart_of_one_island_ends_what_spans_it():
    made = machine()
    made.submit("a", "p", stages(4))
    effects = made.islands.schedulers["j"].restart()
    made.handle(made.islands.follow("j", effects))
    for key in [k for k in made._running if k[0] == "j"]:
        del made._running[key]
    made.lines["j", "d0"].clear()
    made.lines["j", "d1"].clear()
    made.gates.pop(("j", "h0"))
    left = made.islands.schedulers["i"]._order.launches
    for sequence in list(left):
        made.handle(made.islands.finished("i", [Report("h0", sequence, 1)]))
    assert made.outcomes == {"p": Outcome.LOST}


def test_a_program_is_taken_on_all_islands_or_on_none():
    made = machine(max_programs=1)
    alone = Graph([PlacedGang("j", "f", "all")])
    made.submit("a", "p", alone)
    with pytest.raises(AdmissionError, match="too many programs"):
        made.submit("a", "q", stages(2))
    assert made.islands.schedulers["i"].iteration_of("q") is None


def test_inputs_from_outside_keep_their_numbers():
    made = machine()
    graph = Graph(
        [
            PlacedGang("i", "f", "all"),
            PlacedGang("j", "f", "all", (0,), num_external=1),
        ]
    )
    made.submit("a", "p", graph)
    made.run()
    assert made.outcomes == {}
    made.handle(made.islands.open("p", 1, 0))
    made.run()
    assert made.outcomes == {"p": Outcome.FINISHED}
    assert made.islands.open("p", 1, 0) == []  # gone


@pytest.mark.parametrize(
    "options", [{"needs": (0,)}, {"carries": ((1, 1),)}, {"carries": ((0, -1),)}]
)
def test_a_gang_needs_only_what_can_be_there(options):
    with pytest.raises(ProgramError, match="cannot be there"):
        Graph([PlacedGang("i", "f", "all", **options)])
