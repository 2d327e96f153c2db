"""Questions that the controller has put to all workers, and their answers so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from timelyml.runtime.messages import Report
from timelyml.runtime.stall import Holdings


@dataclass(slots=True)
class Inspection:
    """One question: who still has to answer, and what the others said."""

    request: int
    deadline: float
    awaited: set[int]
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
    holdings: dict[int, Holdings] = field(default_factory=dict)


class Inspections:
    """The open questions of one run; a closed one is returned once."""

    def __init__(self) -> None:
        self._open: dict[int, Inspection] = {}

    def ask(self, request: int, deadline: float, workers: Iterable[int]) -> None:
        """Open a question to `workers`, to be closed by `deadline` at the latest."""
        self._open[request] = Inspection(request, deadline, set(workers))

    def report(self, worker: int, message: Report) -> list[Inspection]:
        """Take an answer; return the question if it was the last one."""
        inspection = self._open.get(message.request)
        if inspection is None:
            return []
        inspection.metrics[worker] = message.metrics
        inspection.holdings[worker] = message.holdings
        inspection.awaited.discard(worker)
        return self.answered()

    def lose(self, worker: int) -> list[Inspection]:
        """Await nothing more from a worker; return what that closes."""
        for inspection in self._open.values():
            inspection.awaited.discard(worker)
        return self.answered()

    def answered(self) -> list[Inspection]:
        """Close and return the questions that nobody has to answer any more."""
        return self._close([i for i in self._open.values() if not i.awaited])

    def expired(self, now: float) -> list[Inspection]:
        """Close and return the questions whose time is over."""
        return self._close([i for i in self._open.values() if now >= i.deadline])

    def all(self) -> list[Inspection]:
        """Close and return every question."""
        return self._close(list(self._open.values()))

    def next_deadline(self) -> float | None:
        """When `expired` has to be asked, if ever."""
        return min((i.deadline for i in self._open.values()), default=None)

    def _close(self, closed: list[Inspection]) -> list[Inspection]:
        for inspection in closed:
            del self._open[inspection.request]
        return closed
