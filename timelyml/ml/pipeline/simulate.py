"""What a schedule costs: makespan, bubble and live activations, without running it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from timelyml.errors import ScheduleDeadlockError, ScheduleError
from timelyml.ml.pipeline.actions import Action, Op, Schedule
from timelyml.ml.pipeline.channels import Channels, Execution, Span, execute

PerStage: TypeAlias = float | tuple[float, ...]
"""One number for every stage, or one for each."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of the operations, in any one unit.

    Attributes:
        forward: Of a stage's forward.
        input: Of the part of backward that makes the gradient for the stage below.
        weight: Of the part that makes the gradients of the weights.
        backward: Of an undivided backward; by default `input` plus `weight`.
        communication: From a send until its message can be received.
    """

    forward: PerStage = 1
    input: PerStage = 1
    weight: PerStage = 1
    backward: PerStage | None = None
    communication: float = 0

    def of(self, action: Action) -> float:
        """Return the time of a computation on its rank."""
        if action.op is Op.FORWARD:
            return _at(self.forward, action.stage)
        if action.op is Op.INPUT:
            return _at(self.input, action.stage)
        if action.op is Op.WEIGHT:
            return _at(self.weight, action.stage)
        if self.backward is None:
            return _at(self.input, action.stage) + _at(self.weight, action.stage)
        return _at(self.backward, action.stage)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Which computation ran on which rank from when to when, simulated or measured."""

    num_ranks: int
    spans: tuple[Span, ...]

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        first = min((span.start for span in self.spans), default=0)
        return max((span.end for span in self.spans), default=0) - first

    @property
    def busy(self) -> float:
        """Time in computations, summed over ranks."""
        return sum(span.end - span.start for span in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time up to the makespan in which they compute nothing."""
        whole = self.num_ranks * self.makespan
        return 1 - self.busy / whole if whole else 0


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    channels: Channels | None = None,
) -> Timeline:
    """Time a schedule: each rank runs its rows in order, as early as it can.

    Args:
        schedule: A valid schedule; transfers written out block where they stand.
        costs: By default forward, input and weight take 1 each.
        channels: By default without limit, so that no send waits.

    Raises:
        ScheduleDeadlockError: Some row can never run.
    """
    costs = Costs() if costs is None else costs
    channels = Channels(depth=None) if channels is None else channels
    _check_costs(costs, schedule.num_stages)
    execution = execute(
        schedule, channels, duration=costs.of, latency=costs.communication
    )
    refuse_deadlock(schedule, execution)
    return Timeline(schedule.num_ranks, execution.spans)


def refuse_deadlock(schedule: Schedule, execution: Execution) -> None:
    """Raise if `execution` got stuck, and tell who waits for whom."""
    cycle = execution.wait_cycle()
    if cycle:
        story = "; ".join(map(str, cycle))
        raise ScheduleDeadlockError(
            f"{schedule.name} deadlocks; got a cycle of waits: {story}; expected every "
            f"row to run in the end; reorder the rows or use deeper channels",
            reason="deadlock",
            rank=cycle[0].rank,
            row=cycle[0].row,
            action=str(cycle[0].action),
            cycle=tuple(map(str, cycle)),
        )


def peak_by_rank(schedule: Schedule, sizes: PerStage = 1) -> tuple[float, ...]:
    """Return the most activations that each rank holds at once.

    A microbatch is live on a stage from its forward to the end of its backward, or
    of the weight part if backward is split: that still reads the stage's inputs.
    Only the order on the rank matters, not the times.

    Args:
        schedule: Rows in the order in which they run.
        sizes: What one microbatch occupies on a stage.
    """
    return tuple(
        max((level for _, _, level in live_levels(schedule, rank, sizes)), default=0)
        for rank in range(schedule.num_ranks)
    )


def peak_by_stage(schedule: Schedule) -> tuple[int, ...]:
    """Return the most microbatches that are live on each stage at once."""
    peaks = []
    for stage, rank in enumerate(schedule.rank_of_stage):
        alone = tuple(int(s == stage) for s in range(schedule.num_stages))
        levels = live_levels(schedule, rank, alone)
        peaks.append(int(max((level for _, _, level in levels), default=0)))
    return tuple(peaks)


def live_levels(
    schedule: Schedule, rank: int, sizes: PerStage = 1
) -> Iterator[tuple[int, Action, float]]:
    """Yield `(row, action, live)` of `rank` after each action that changes it."""
    level: float = 0
    for row, action in schedule.numbered(rank):
        sign = _CHANGES.get(action.op, 0)
        if sign:
            level += sign * _at(sizes, action.stage)
            yield row, action, level


_CHANGES = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.WEIGHT: -1}


def _at(value: PerStage, stage: int) -> float:
    return value[stage] if isinstance(value, tuple) else value


def _check_costs(costs: Costs, num_stages: int) -> None:
    for name in ("forward", "input", "weight", "backward"):
        value = getattr(costs, name)
        if isinstance(value, tuple) and len(value) != num_stages:
            raise ScheduleError(
                f"costs of {name} do not fit the schedule; got {len(value)} numbers; "
                f"expected {num_stages}, one per stage; pass one for each or one for "
                f"all",
                reason="range",
            )
