"""What a run is made of, and who its workers are.

Inside a run workers are numbered 0, 1, ... in the order of `members`: placements,
progress, collected batches and errors of operators say these numbers. Who they are is
decided when a run starts, as workers may have joined the cluster since it began, or be
gone; only who carries messages to and from them uses the numbers of the cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from timelyml.exchange import Lane
from timelyml.graph import Graph
from timelyml.runtime.config import RunConfig
from timelyml.runtime.event_log import Sender


class RunPhase(Enum):
    """How far a run has come."""

    WAITING = "waiting for the workers of its cluster"
    BUILDING = "waiting for workers to build the graph"
    RUNNING = "running"
    ENDING = "waiting for workers to forget it"
    ENDED = "over"


@dataclass(frozen=True, slots=True)
class RunPlan:
    """All that a run is made of; `graph` is resolved for the number of workers.

    `workers` are those of the cluster that run it; None: all that it began with.
    """

    generation: int
    graph: Graph
    config: RunConfig
    shipped: bytes
    num_workers: int
    build_timeout_s: float = 60.0
    answer_timeout_s: float = 1.0
    drop_timeout_s: float = 1.0
    workers: tuple[int, ...] | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """The workers of the cluster that run it, by their number in the run."""
        return tuple(range(self.num_workers)) if self.workers is None else self.workers


class MemberSender:
    """A sender for one run: peers are numbered as in the run."""

    def __init__(self, sender: Sender, members: Sequence[int]) -> None:
        self._sender = sender
        self._members = members
        self.metrics = sender.metrics
        self.wake = sender.wake
        self.shared_memory = sender.shared_memory

    def send(self, peer: int, message: object, lane: Lane = Lane.CONTROL) -> None:
        """Send a message; the controller (-1) has no number in the run."""
        self._sender.send(peer if peer < 0 else self._members[peer], message, lane)


def numbers_of(members: Sequence[int]) -> dict[int, int]:
    """Return the number in the run of each member; empty if all keep theirs.

    >>> numbers_of((0, 1)), numbers_of((0, 3))
    ({}, {0: 0, 3: 1})
    """
    if tuple(members) == tuple(range(len(members))):
        return {}
    return {member: number for number, member in enumerate(members)}
