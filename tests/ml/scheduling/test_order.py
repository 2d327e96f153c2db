"""What must hold whatever programs come, and however late messages are."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ml.scheduling.machine import (
    Demand,
    Graph,
    Machine,
    chain,
    hosts,
    single,
)
from timelyml.ml.scheduling import (
    Dispatch,
    Fifo,
    GangDone,
    GangScheduler,
    Grant,
    Outcome,
    PlacedGang,
    Priority,
    ProportionalShare,
    Scope,
)
from timelyml.ml.scheduling.placements import KEPT_BUSY

DEVICES = [f"d{k}" for k in range(4)]
unhurried = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60
)
policies = st.sampled_from(
    [Fifo, ProportionalShare, Priority, lambda: Priority(aging_ns=1_000_000)]
)


@st.composite
def placements(draw):
    """Up to five sets of four devices, one of them of all."""
    sets = draw(
        st.lists(st.sets(st.sampled_from(DEVICES), min_size=1), min_size=1, max_size=4)
    )
    return {"all": set(DEVICES)} | {f"p{k}": each for k, each in enumerate(sets)}


@st.composite
def graphs(draw, names, islands=("i",), *, can_loop=True):
    """A random program: gangs on random placements that need random earlier ones."""
    size = draw(st.integers(1, 6))
    gangs = []
    for index in range(size):
        needs = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else ()
        carries = (
            draw(
                st.lists(
                    st.tuples(st.integers(0, size - 1), st.integers(1, 2)), max_size=2
                )
            )
            if can_loop
            else ()
        )
        gangs.append(
            PlacedGang(
                draw(st.sampled_from(islands)),
                draw(st.sampled_from(["short", "middle", "long"])),
                draw(st.sampled_from(names)),
                tuple(sorted(needs)),
                tuple(carries),
            )
        )
    dispatch = draw(st.sampled_from([Dispatch.PARALLEL] * 3 + [Dispatch.SEQUENTIAL]))
    return Graph(gangs, dispatch)


@st.composite
def worlds(draw, islands=("i",)):
    """A machine with clients that submit random programs at random times."""
    sets = draw(placements())
    machine = Machine(
        {island: hosts(2) for island in islands},
        policy=draw(policies),
        seed=draw(st.integers(0, 10**6)),
        delays=draw(st.sampled_from([(0, 0), (0, 50_000), (0, 3_000_000)])),
        durations={"short": 40_000, "middle": 400_000, "long": 2_400_000},
        window_ns=draw(st.sampled_from([1, 1_000_000, 4_000_000])),
        max_unfinished=draw(st.sampled_from([1, 2, 32])),
    )
    for island in islands:
        for name, devices in sets.items():
            machine.place(island, name, devices)
    programs = draw(
        st.lists(
            st.tuples(
                st.sampled_from("abc"),
                st.integers(0, 5_000_000),
                graphs(sorted(sets), islands),
                st.integers(1, 3),
                st.integers(0, 2),
            ),
            min_size=1,
            max_size=8,
        )
    )
    for client in "abc":
        machine.join(client, draw(st.integers(1, 8)))
    for index, (client, when, graph, iterations, priority) in enumerate(programs):
        machine.at(
            when,
            lambda c=client, n=f"{client}{index}", g=graph, i=iterations, p=priority: (
                machine.submit(c, n, g, iterations=i, priority=p)
            ),
        )
    return machine


@unhurried
@given(worlds())
def test_everything_runs_and_all_hosts_launch_in_one_order(machine):
    machine.run()
    machine.assert_idle()
    assert set(machine.outcomes.values()) == {Outcome.FINISHED}
    grants = [e for _, _, e in machine.effects if isinstance(e, Grant)]
    by_sequence = {grant.sequence: grant for grant in grants}
    assert [grant.sequence for grant in grants] == list(range(len(grants)))
    for (_, host), launched in machine.launch_orders.items():
        # One order: each host launches its part of it, all of it, in turn.
        own = [s for s, g in by_sequence.items() if host in dict(g.positions)]
        assert launched == own


@unhurried
@given(worlds(islands=("i", "j")))
def test_programs_that_span_islands_never_block_each_other(machine):
    machine.run()
    machine.assert_idle()
    assert set(machine.outcomes.values()) == {Outcome.FINISHED}
    assert len(machine.outcomes) == len(machine.graphs)


@unhurried
@given(worlds(), st.data())
def test_a_gang_runs_on_all_of_its_devices_or_on_none(machine, data):
    victims = data.draw(st.sets(st.sampled_from(sorted(f"{c}{k}" for c in "abc"
                                                      for k in range(8)))))  # fmt: skip
    when = data.draw(st.integers(0, 8_000_000))

    def cancel():
        for program in victims:
            machine.handle(machine.islands.cancel(program))

    machine.at(when, cancel)
    machine.run()
    machine.assert_idle()
    devices_by_gang = {}
    for busy in machine.busy:
        devices_by_gang.setdefault(busy.key, set()).add(busy.device)
    for key, devices in devices_by_gang.items():
        placement = machine.spec(key).placement
        expected = machine.places["i", placement].values()
        assert devices == {device for own in expected for device in own}
    ordered = {e.key for _, _, e in machine.effects if isinstance(e, Grant)}
    done = {e.key for _, _, e in machine.effects if isinstance(e, GangDone)}
    assert ordered == done == set(devices_by_gang)


@unhurried
@given(worlds())
def test_no_device_ever_has_more_under_way_than_its_limits(machine):
    scheduler = machine.islands.schedulers["i"]
    limits = scheduler._placements
    while machine._events:
        machine.run(until=machine._events[0][0])
        for group, load in limits._loads.items():
            assert 0 <= load.num_unfinished <= limits._max_unfinished
            under_way = [
                launch.grant.estimate_ns
                for launch in scheduler._order.launches.values()
                if group in limits.groups_of(launch.grant.placement)
            ]
            assert load.num_unfinished == len(under_way)
            assert load.pending_ns == sum(under_way)
            # One runs and one is next; of more than these only the last may pass it.
            beside = sum(under_way) - max(under_way, default=0)
            assert len(under_way) <= KEPT_BUSY or beside < limits._window_ns


@unhurried
@given(worlds())
def test_no_device_is_idle_while_a_gang_could_use_all_of_its_devices(machine):
    scheduler = machine.islands.schedulers["i"]
    placements_ = scheduler._placements
    while machine._events:
        machine.run(until=machine._events[0][0])
        flows = list(scheduler._order._flows)
        # Whatever is in line finds a full device, or one that another waits for.
        full = {g for g in placements_._loads if not placements_.has_room([g])}
        for flow in flows:
            groups = set(placements_.groups_of(flow.placement))
            others = {
                g for f in flows if f is not flow
                for g in placements_.groups_of(f.placement)
                if not full.isdisjoint(placements_.groups_of(f.placement))
            }  # fmt: skip
            assert groups & (full | others)


class Recording:
    """A scheduler that notes what it is told."""

    def __init__(self, scheduler):
        self._scheduler = scheduler
        self.calls = []

    def __getattr__(self, name):
        attribute = getattr(self._scheduler, name)
        if not callable(attribute) or name in ("check", "iteration_of", "waiting"):
            return attribute

        def call(*args, **options):
            self.calls.append((name, args, options))
            return attribute(*args, **options)

        return call


@pytest.mark.sources
@unhurried
@given(policies, st.integers(0, 10**6), st.lists(graphs(["all", "left"]), max_size=6))
def test_the_same_events_give_the_same_decisions(policy, seed, programs):
    machine = Machine({"i": hosts(2)}, policy=policy, seed=seed, delays=(0, 2_000_000))
    recording = Recording(machine.islands.schedulers["i"])
    machine.islands.schedulers["i"] = recording
    machine.place("i", "all", set(DEVICES))
    machine.place("i", "left", {"d0", "d1"})
    for index, graph in enumerate(programs):
        machine.join(f"c{index % 3}", 1 + index % 3)
        machine.submit(f"c{index % 3}", f"p{index}", graph, iterations=2)
    machine.run()
    replayed = GangScheduler(policy())
    for name, args, options in recording.calls:
        getattr(replayed, name)(*args, **options)
    assert list(replayed.trace) == list(recording.trace)


class Backwards:
    """The policy that prefers what `Priority` puts last."""

    def key(self, candidate, accounts):
        return candidate.priority, -candidate.ticket


def crossing(order, *, is_early=False):
    """A program that crosses islands; early breaks the rule that makes it safe."""
    gangs = [
        PlacedGang(island, "f", "all", (k - 1,) if k else ())
        for k, island in enumerate(order)
    ]
    graph = Graph(gangs)
    if is_early:
        spread = graph.spread
        opens = spread.opens.values()
        spread.opens_at_first += [slot for each in opens for slot in each]
    return graph


def machine_of_two(**options):
    machine = Machine({"i": hosts(1), "j": hosts(1)}, delays=(0, 1_000_000), **options)
    for island in "ij":
        machine.place(island, "all", {"d0", "d1"})
    machine.join("a")
    machine.join("b")
    return machine


@pytest.mark.parametrize("is_early", [False, True])
def test_opposite_crossings_block_only_if_inputs_are_opened_too_early(is_early):
    # Island i prefers q, whose second half is there; island j prefers p, likewise.
    machine = machine_of_two(policy=iter([Priority(), Backwards()]).__next__)
    for scheduler in machine.islands.schedulers.values():
        scheduler.hold(Scope.PLACEMENT, "all")
    machine.submit("a", "p", crossing("ij", is_early=is_early), priority=0)
    machine.submit("b", "q", crossing("ji", is_early=is_early), priority=1)
    for island, scheduler in machine.islands.schedulers.items():
        released = scheduler.release(Scope.PLACEMENT, "all")
        machine.handle(machine.islands.follow(island, released))
    machine.run()
    assert set(machine.outcomes) == (set() if is_early else {"p", "q"})


def test_opposite_crossings_run_thousands_of_times():
    machine = machine_of_two()
    left = {"a": 500, "b": 500}

    def again(client, order):
        if left[client]:
            left[client] -= 1
            machine.submit(
                client,
                f"{client}{left[client]}",
                crossing(order),
                on_done=lambda: again(client, order),
            )

    for _ in range(3):  # several at once of each
        again("a", "ij")
        again("b", "ji")
    machine.run()
    machine.assert_idle()
    assert len(machine.outcomes) == 1000


@pytest.mark.parametrize("policy", [Fifo, ProportionalShare])
def test_a_large_gang_is_not_starved_by_small_ones(policy):
    machine = Machine({"i": hosts(2)}, policy=policy, window_ns=200_000)
    for device in DEVICES:
        machine.place("i", device, {device})
    machine.place("i", "all", set(DEVICES))
    machine.join("large")
    for device in DEVICES:
        client = f"small-{device}"
        machine.join(client)

        Demand(machine, client, single(placement=device), depth=8, until=50_000_000)
    machine.at(1_000_000, lambda: machine.submit("large", "large", chain(10)))
    machine.run(until=20_000_000)
    assert machine.outcomes["large"] is Outcome.FINISHED
