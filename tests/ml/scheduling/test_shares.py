"""Device time in proportion to weights, whatever the lengths of programs."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ml.scheduling.machine import Demand, Machine, chain, hosts, single
from timelyml.ml.scheduling import Accounts, GangDone, ProportionalShare

MS = 1_000_000
WARM_UP_NS = 50 * MS
WINDOW_NS = 1_000 * MS
TOLERANCE = 0.05
"""How far device time may be from its share, as a part of the share."""

unhurried = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=5
)
lengths = st.integers(200_000, 2 * MS)


def machine_with(weights, durations, *, num_hosts=2, delays=(0, 100_000), seed=0):
    machine = Machine(
        {"i": hosts(num_hosts)},
        policy=ProportionalShare,
        delays=delays,
        seed=seed,
        durations=durations,
    )
    machine.place("i", "all", {d for own in machine.layout["i"].values() for d in own})
    for client, weight in weights.items():
        machine.join(client, weight)
    return machine


def assert_shares(machine, weights, *, start=WARM_UP_NS, window=WINDOW_NS):
    used = machine.used(start, start + window)
    total = sum(used.values())
    for client, weight in weights.items():
        share = total * weight / sum(weights.values())
        assert abs(used[client] - share) <= TOLERANCE * share, (client, used)


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (1, 2, 4, 8)])
@unhurried
@given(st.lists(lengths, min_size=4, max_size=4), st.integers(0, 10**6))
def test_device_time_is_shared_by_weight_whatever_the_lengths(weights, lengths, seed):
    by_client = dict(zip("abcd", weights, strict=True))
    durations = dict(zip("abcd", lengths, strict=True))
    machine = machine_with(by_client, durations, num_hosts=1, seed=seed)
    for client in by_client:
        # What a client has waiting has to outlast the way from the end to the next.
        Demand(machine, client, single(client), depth=40)
    machine.run(until=WARM_UP_NS + WINDOW_NS)
    assert_shares(machine, by_client)


@unhurried
@given(st.lists(st.tuples(lengths, lengths), min_size=2, max_size=4))
def test_shares_hold_if_lengths_vary_and_estimates_are_wrong(ranges):
    weights = {client: 2**k for k, client in enumerate("abcd"[: len(ranges)])}
    machine = machine_with(weights, {}, num_hosts=1)
    machine.durations = {
        client: lambda b=bounds: machine.random.randint(*sorted(b))
        for client, bounds in zip(weights, ranges, strict=True)
    }
    for client in weights:
        Demand(machine, client, single(client, estimate_ns=1), depth=40)
    machine.run(until=WARM_UP_NS + WINDOW_NS)
    assert_shares(machine, weights)


def test_devices_are_never_idle_while_clients_share_them():
    weights = {"a": 1, "b": 2, "c": 4, "d": 8}
    durations = {"a": 2_400_000, "b": 330_000, "c": 40_000, "d": 1_000_000}
    machine = machine_with(weights, durations)
    for client in weights:
        Demand(machine, client, single(client), depth=32)
    machine.run(until=WARM_UP_NS + WINDOW_NS)
    used = machine.used(WARM_UP_NS, WARM_UP_NS + WINDOW_NS)
    assert sum(used.values()) >= 0.99 * 4 * WINDOW_NS
    assert_shares(machine, weights)


def test_clients_that_wait_for_each_result_share_too():
    weights = {"a": 1, "b": 1, "c": 1, "d": 1}
    machine = machine_with(weights, dict.fromkeys(weights, 2_400_000))
    for client in weights:
        Demand(machine, client, single(client), depth=2)
    machine.run(until=WARM_UP_NS + WINDOW_NS)
    assert_shares(machine, weights)


def test_a_chain_gets_no_more_than_single_computations():
    weights = {"a": 1, "b": 1}
    machine = machine_with(weights, {"a": 100_000, "b": 1_000_000})
    Demand(machine, "a", chain(128, "a"), depth=2)
    Demand(machine, "b", single("b"), depth=32)
    machine.run(until=WARM_UP_NS + WINDOW_NS)
    assert_shares(machine, weights)


def test_a_loop_without_end_leaves_the_others_their_share():
    weights = {"loop": 1, "b": 3}
    machine = machine_with(weights, {"loop": 1_000_000, "b": 300_000})
    machine.submit("loop", "endless", chain(3, "loop"), iterations=None)
    Demand(machine, "b", single("b"), depth=40, until=2 * WINDOW_NS)
    machine.run(until=WARM_UP_NS + WINDOW_NS)
    assert_shares(machine, weights)
    machine.islands.stop("endless")
    machine.run()
    machine.assert_idle()
    assert "endless" in machine.outcomes


def test_unused_time_goes_to_those_who_want_it_and_saves_up_nothing():
    weights = {"a": 1, "b": 1}
    machine = machine_with(weights, dict.fromkeys(weights, 500_000))
    Demand(machine, "a", single("a"), depth=32)
    machine.run(until=1_000 * MS)  # a is alone, b saves up nothing meanwhile
    assert machine.used(WARM_UP_NS, 900 * MS)["a"] >= 0.99 * 4 * 850 * MS
    Demand(machine, "b", single("b"), depth=32)
    machine.run(until=1_000 * MS + WARM_UP_NS + WINDOW_NS)
    assert_shares(machine, weights, start=1_010 * MS, window=200 * MS)


def test_idling_saves_up_nothing():
    weights = {"a": 1, "b": 1}
    machine = machine_with(weights, dict.fromkeys(weights, 500_000))
    Demand(machine, "b", single("b"), depth=32, until=100 * MS)
    Demand(machine, "a", single("a"), depth=32)
    machine.run(until=1_000 * MS)
    Demand(machine, "b", single("b"), depth=32)
    machine.run(until=1_250 * MS)
    assert_shares(machine, weights, start=1_010 * MS, window=200 * MS)


def test_having_been_alone_before_is_not_held_against_a_client():
    weights = {"a": 1, "b": 1}
    machine = machine_with(weights, dict.fromkeys(weights, 500_000))
    Demand(machine, "a", single("a"), depth=32, until=500 * MS)
    machine.run(until=600 * MS)  # a came, used everything, and has nothing more to do
    Demand(machine, "b", single("b"), depth=32)
    machine.run(until=700 * MS)
    Demand(machine, "a", single("a"), depth=32)
    machine.run(until=1_000 * MS)
    assert_shares(machine, weights, start=750 * MS, window=200 * MS)


def test_time_on_devices_that_nobody_else_wanted_is_not_held_against_a_client():
    machine = machine_with({"a": 1, "b": 1, "c": 1}, {})
    machine.place("i", "left", {"d0", "d1"})
    machine.place("i", "right", {"d2", "d3"})
    machine.default_duration = 500_000
    Demand(machine, "a", single("a", "left"), depth=40)
    machine.run(until=400 * MS)
    Demand(machine, "b", single("b", "right"), depth=40)
    machine.run(until=500 * MS)
    Demand(machine, "c", single("c", "all"), depth=40)
    machine.run(until=500 * MS + WARM_UP_NS + WINDOW_NS)
    used = machine.used(500 * MS, 500 * MS + WINDOW_NS)
    # On every device two clients of one weight meet: half of it each.
    half = 4 * WINDOW_NS / 2
    assert used["c"] == pytest.approx(half, rel=TOLERANCE)
    assert used["a"] == pytest.approx(half / 2, rel=TOLERANCE)
    assert used["b"] == pytest.approx(half / 2, rel=TOLERANCE)


def test_reported_device_time_adds_up_to_what_devices_did():
    weights = {"a": 1, "b": 2}
    machine = machine_with(weights, {"a": 300_000, "b": 700_000})
    for client in weights:
        Demand(machine, client, single(client), depth=8, until=100 * MS)
    machine.run()
    reported = dict.fromkeys(weights, 0)
    for _, _, effect in machine.effects:
        if isinstance(effect, GangDone):
            reported[effect.client] += effect.device_ns * effect.num_devices
    assert reported == machine.used(0, machine.now)


@given(st.integers(1, 100), st.lists(st.integers(-(10**9), 10**9), max_size=50))
def test_charges_are_exact_however_they_are_split(weight, charges):
    accounts = Accounts()
    accounts.join("a", weight)
    accounts.enter("a", [0])
    for charge in charges:
        accounts.charge("a", [0], charge)
    account = accounts._by_group[0]["a"]
    assert account.virtual_ns * weight + account.remainder == sum(charges)
