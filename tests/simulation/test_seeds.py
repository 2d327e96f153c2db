"""Seeded simulations of whole clusters keep every promise."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from timelyml.runtime.channels import Outbox
from timelyml.runtime.simulation import (
    Fault,
    SeedFailed,
    Violation,
    random_scenario,
    simulate,
)
from timelyml.runtime.simulation.behaviour import Style
from timelyml.runtime.simulation.rules import Kind

SEEDS_PER_TEST = 25
SEEDS_PER_SLOW_TEST = 100


@pytest.mark.parametrize("first", range(0, 300, SEEDS_PER_TEST))
def test_every_promise_is_kept(first):
    for seed in range(first, first + SEEDS_PER_TEST):
        simulate(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1_000, 6_000, SEEDS_PER_SLOW_TEST))
def test_every_promise_is_kept_for_thousands_of_seeds(first):
    for seed in range(first, first + SEEDS_PER_SLOW_TEST):
        simulate(seed)


@pytest.mark.parametrize("seed", [3, 17, 42])
def test_a_seed_repeats_exactly(seed):
    logs = [], []
    outcomes = [simulate(seed, log=log.append) for log in logs]

    assert outcomes[0] == outcomes[1]
    assert logs[0] == logs[1]


def test_messages_may_pass_by_reference_with_the_same_outcome():
    assert simulate(5, is_encoded=False) == simulate(5)


def test_a_failure_says_how_to_repeat_it():
    failed = SeedFailed(42, Violation("safety", "a frontier is wrong"))

    assert "safety: a frontier is wrong" in str(failed)
    assert "python -m timelyml.runtime.simulation 42" in str(failed)


def test_the_seeds_cover_what_can_happen():
    seen = Counter()
    for seed in range(150):
        scenario = random_scenario(seed)
        seen[scenario.fault] += 1
        seen["workers", scenario.num_workers] += 1
        seen["runs", len(scenario.runs)] += 1
        for run in scenario.runs:
            seen[run.config.progress_mode] += 1
            seen["ahead", run.config.max_epochs_ahead] += 1
            for each in run.plan.operators:
                seen[each.rule.kind] += 1
                seen[getattr(each, "style", None)] += 1
                seen["fed"] += getattr(each, "is_fed", False)
                seen["lag"] += getattr(each, "lag", 0) > 0
            for spec in run.plan.graph.operators:
                seen["depth", spec.depth] += 1
                seen["regular"] += spec.regular and not spec.is_source
                seen["many shards"] += spec.num_shards >= 64
            for channel in run.plan.graph.channels:
                seen[type(channel.pact).__name__] += 1
                seen["dense"] += channel.pact.dense
                seen["cyclic"] += channel.is_cyclic

    expected = [*Fault, *Kind, *Style, *(("workers", n) for n in range(1, 6))]
    expected += [("runs", n) for n in (1, 2, 3)] + [("ahead", n) for n in (1, 2, 3, 8)]
    expected += ["broadcast", "accumulator", "fed", "lag", "regular", "many shards"]
    expected += [("depth", n) for n in (0, 1, 2)] + ["dense", "cyclic"]
    expected += ["Pipeline", "Exchange", "Broadcast", "Gather", "Direct"]
    assert [each for each in expected if seen[each] < 3] == []


@pytest.mark.sources
def test_the_seeds_reach_back_pressure_and_spilling(monkeypatch):
    blocked = []
    is_blocked = Outbox.is_blocked

    def watched(self, channel):
        found = is_blocked(self, channel)
        if found:
            blocked.append(channel)
        return found

    monkeypatch.setattr(Outbox, "is_blocked", watched)

    outcomes = [simulate(seed) for seed in range(20)]

    assert blocked
    assert sum(outcome.num_spilled for outcome in outcomes)
    assert sum(outcome.num_stale for outcome in outcomes)
    assert sum(outcome.num_failed for outcome in outcomes)


def test_a_scenario_depends_on_its_seed_alone():
    random.seed(1)
    first = random_scenario(7)
    random.seed(2)
    second = random_scenario(7)

    assert first.runs[0].plan.graph.describe() == second.runs[0].plan.graph.describe()
    assert first.fault_after == second.fault_after
