"""What a run may be told: progress mode, credits, limits, placement.

The values travel with the shipped graph, so that every worker of a run obeys
the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from timelyml.errors import ConfigError
from timelyml.graph import Graph, Placement, RoundRobin

ProgressMode = Literal["broadcast", "accumulator"]
MEBIBYTE = 1 << 20
INPUT_KIND = "input"  # an operator that the driver feeds
PROBE_KIND = "probe"  # one whose input frontier the driver observes


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Options of one run.

    Attributes:
        progress_mode: Who hears of progress: every worker from every worker
            (`broadcast`), or through the controller (`accumulator`).
        max_epochs_ahead: Epochs that a source may have open at once.
        credit_bytes: Bytes that may wait in the queue of one acyclic channel
            between one pair of workers.
        loop_budget_bytes: Bytes that one channel inside a cycle keeps in memory
            before it spills to disk.
        state_limit_bytes: Bytes of state that one operator may keep per worker.
        placement: Which worker holds which shard, where an operator says nothing.
        timeout_s: Seconds after which the run fails, with an explanation; they count
            from the call that starts it, whatever it has to wait for.
    """

    progress_mode: ProgressMode = "broadcast"
    max_epochs_ahead: int = 8
    credit_bytes: int = 32 * MEBIBYTE
    loop_budget_bytes: int = 64 * MEBIBYTE
    state_limit_bytes: int | None = None
    placement: Placement = field(default_factory=RoundRobin)
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.progress_mode not in ("broadcast", "accumulator"):
            msg = (
                f"option 'progress_mode' is unknown; got {self.progress_mode!r}; "
                "expected 'broadcast' or 'accumulator'; choose one"
            )
            raise ConfigError(msg, option="progress_mode")
        for option in ("max_epochs_ahead", "credit_bytes", "loop_budget_bytes"):
            self._check(option, int, "an integer of at least 1", least=1)
        if self.state_limit_bytes is not None:
            self._check("state_limit_bytes", int, "an integer of at least 1", least=1)
        if self.timeout_s is not None:
            self._check("timeout_s", (int, float), "seconds above 0", least=1e-9)

    def _check(
        self, option: str, kind: type | tuple[type, ...], rule: str, *, least: float
    ) -> None:
        value: Any = getattr(self, option)
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if not is_number or not value >= least:
            msg = (
                f"option {option!r} is out of range; got {value!r}; expected {rule}; "
                "correct it, or leave it out"
            )
            raise ConfigError(msg, option=option)


@dataclass(frozen=True, slots=True)
class ShippedRun:
    """What a worker needs to build its part of a run."""

    graph: Graph
    config: RunConfig
