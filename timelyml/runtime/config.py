"""What a run may be told: progress mode, credits, limits, placement.

The values travel with the shipped graph, so that every worker of a run obeys
the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from timelyml.graph import (
    PLACEMENT_RULE,
    Graph,
    Placement,
    RoundRobin,
    is_placement,
)
from timelyml.runtime.options import (
    check_choice,
    check_count,
    check_seconds,
    refusal,
)

ProgressMode = Literal["broadcast", "accumulator"]
PROGRESS_MODES = ("broadcast", "accumulator")
BROADCASTERS_PER_CORE = 3  # measured with `python -m benchmarks oversubscribed`
MEBIBYTE = 1 << 20
INPUT_KIND = "input"  # an operator that the driver feeds
PROBE_KIND = "probe"  # one whose input frontier the driver observes


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Options of one run.

    Attributes:
        progress_mode: Who hears of progress: every worker from every worker
            (`broadcast`), or through the controller (`accumulator`); see
            `default_mode` for what a cluster chooses.
        max_epochs_ahead: Epochs that a source may have open at once.
        credit_bytes: Bytes that may wait in the queue of one acyclic channel
            between one pair of workers.
        loop_budget_bytes: Bytes that one channel inside a cycle keeps in memory
            before it spills to disk.
        state_limit_bytes: Bytes of state that one operator may keep per worker.
        placement: Which worker holds which shard, where an operator says nothing.
        timeout_s: Seconds after which the run fails, with an explanation; they count
            from the call that starts it, whatever it has to wait for.
        event_log: Directory in which each worker writes what it does, as a tape of
            `timelyml.runtime.events` for `flow.replay`; default: nothing is noted.
    """

    progress_mode: ProgressMode = "broadcast"
    max_epochs_ahead: int = 32
    credit_bytes: int = 32 * MEBIBYTE
    loop_budget_bytes: int = 64 * MEBIBYTE
    state_limit_bytes: int | None = None
    placement: Placement = field(default_factory=RoundRobin)
    timeout_s: float | None = None
    event_log: str | Path | None = None

    def __post_init__(self) -> None:
        check_choice("progress_mode", self.progress_mode, PROGRESS_MODES)
        for option in ("max_epochs_ahead", "credit_bytes", "loop_budget_bytes"):
            check_count(option, getattr(self, option))
        if self.state_limit_bytes is not None:
            check_count("state_limit_bytes", self.state_limit_bytes)
        if self.timeout_s is not None:
            check_seconds("timeout_s", self.timeout_s)
        if self.event_log is not None and not isinstance(self.event_log, (str, Path)):
            raise refusal("event_log", self.event_log, "a directory")
        if not is_placement(self.placement):
            raise refusal("placement", self.placement, PLACEMENT_RULE)


def default_mode(num_workers: int, num_cores: int) -> ProgressMode:
    """Return the mode in which that many processes use least of so many cores.

    To tell each other takes as many messages as there are pairs, and where pairs share
    cores, each takes its time of all. Through the controller it is two a worker.

    >>> default_mode(6, num_cores=2), default_mode(8, num_cores=2)
    ('broadcast', 'accumulator')
    """
    is_crowded = num_workers > BROADCASTERS_PER_CORE * num_cores
    return "accumulator" if is_crowded else "broadcast"


@dataclass(frozen=True, slots=True)
class ShippedRun:
    """What a worker needs to build its part of a run."""

    graph: Graph
    config: RunConfig
