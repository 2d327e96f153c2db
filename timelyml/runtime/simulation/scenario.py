"""What a seed stands for: a cluster, its runs, the network's mood, and what fails."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import Enum

from timelyml.runtime.config import ProgressMode, RunConfig
from timelyml.runtime.simulation.behaviour import Behaviour
from timelyml.runtime.simulation.generate import random_plan
from timelyml.runtime.simulation.plan import GraphPlan
from timelyml.runtime.simulation.rules import Kind


class Fault(Enum):
    """What goes wrong, if anything; the first group harms nothing."""

    NONE = "nothing"
    PAUSE = "endpoints pause for a while"
    STOP = "the driver stops the sources"
    INSPECT = "the driver asks what is going on"
    CANCEL = "the driver cancels a run"
    RAISE = "an operator raises"
    TIMEOUT = "a run has little time"
    CUT = "a link is cut, and what is under way arrives"
    LOSE = "a link loses a suffix, and is cut"
    RESTART = "a worker starts anew, without what it knew"


HARMLESS = frozenset({Fault.NONE, Fault.PAUSE, Fault.STOP, Fault.INSPECT})
OF_ONE_RUN = frozenset({Fault.CANCEL, Fault.RAISE, Fault.TIMEOUT})


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a scenario: what, how, and the action after which it is submitted."""

    plan: GraphPlan
    config: RunConfig
    starts_after: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a simulation does, except for the order of its actions.

    Attributes:
        seed: Where all of it comes from.
        num_workers: Of the cluster.
        runs: In the order of their generations.
        fault: What goes wrong.
        fault_after: The action after which it does.
        deliver_share: How often a link delivers, where an endpoint could step.
        slow_share: Of links that deliver rarely.
        tick_s: By which each reading moves the clock.
    """

    seed: int
    num_workers: int
    runs: tuple[Run, ...]
    fault: Fault
    fault_after: int
    deliver_share: float
    slow_share: float
    tick_s: float


def make_rng(seed: int, purpose: str) -> random.Random:
    """Return a generator of its own for each purpose of a seed."""
    return random.Random(f"{seed} {purpose}")  # noqa: S311 - guards nothing


def random_scenario(
    seed: int,
    *,
    mode: ProgressMode | None = None,
    fault: Fault | None = None,
    max_records: int = 250,
) -> Scenario:
    """Return the scenario of a seed.

    Args:
        seed: Any integer.
        mode: Instead of a random progress mode.
        fault: Instead of a random fault.
        max_records: At most so many deliveries a run.
    """
    rng = make_rng(seed, "scenario")
    num_workers = rng.choice((1, 2, 2, 3, 3, 4, 5))
    chosen = _random_fault(rng) if fault is None else fault
    num_runs = rng.choice((2, 2, 3) if chosen in OF_ONE_RUN else (1, 1, 1, 2, 3))
    runs = []
    for _ in range(num_runs):
        config = _random_config(rng, mode)
        plan = random_plan(
            rng, num_workers, config.max_epochs_ahead, max_records=max_records
        )
        runs.append(Run(plan, config, rng.choice((0, 0, 30, 200))))
    if chosen is Fault.RAISE:
        runs[0] = replace(runs[0], plan=_with_failing(rng, runs[0].plan))
    elif chosen is Fault.TIMEOUT:
        limited = replace(runs[0].config, timeout_s=rng.choice((0.001, 0.02, 0.1)))
        runs[0] = replace(runs[0], config=limited)
    return Scenario(
        seed,
        num_workers,
        tuple(runs),
        chosen,
        fault_after=rng.choice((rng.randint(1, 30), rng.randint(30, 600))),
        deliver_share=rng.choice((0.2, 0.5, 0.8)),
        slow_share=rng.choice((0.0, 0.3, 0.6)),
        tick_s=rng.choice((0.0, 3e-4, 4e-3, 1.1e-2)),
    )


def _random_fault(rng: random.Random) -> Fault:
    chance = rng.random()
    if chance < 0.45:
        return Fault.NONE
    if chance < 0.7:
        return rng.choice((Fault.PAUSE, Fault.PAUSE, Fault.STOP, Fault.INSPECT))
    broken = (Fault.CUT, Fault.LOSE, Fault.LOSE, Fault.RESTART)
    return rng.choice((*broken, Fault.CANCEL, Fault.RAISE, Fault.TIMEOUT))


def _random_config(rng: random.Random, mode: ProgressMode | None) -> RunConfig:
    modes: tuple[ProgressMode, ...] = ("broadcast", "accumulator")
    return RunConfig(
        progress_mode=rng.choice(modes) if mode is None else mode,
        max_epochs_ahead=rng.choice((1, 1, 2, 3, 8)),
        credit_bytes=rng.choice((1, 16, 100, 1000, 1 << 20)),
        loop_budget_bytes=rng.choice((1, 50, 1 << 20)),
    )


def _with_failing(rng: random.Random, plan: GraphPlan) -> GraphPlan:
    """The plan with one operator that raises as soon as it gets a record."""
    candidates = [
        each
        for each in plan.operators
        if isinstance(each, Behaviour) and each.rule.kind is not Kind.SOURCE
    ]
    if not candidates:
        return plan
    failing = replace(rng.choice(candidates), is_failing=True)
    index = failing.operator
    spec = replace(plan.graph.operators[index], logic=failing.logic())
    graph = replace(
        plan.graph,
        operators=(
            *plan.graph.operators[:index],
            spec,
            *plan.graph.operators[index + 1 :],
        ),
    )
    operators = (*plan.operators[:index], failing, *plan.operators[index + 1 :])
    return GraphPlan(graph, operators)
