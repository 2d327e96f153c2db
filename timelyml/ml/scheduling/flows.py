"""Gangs that could be ordered now, in line per client, placement and priority.

Only the first in each line is a candidate, so a decision looks at as many gangs as
there are lines, not at all that wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from timelyml.ml.scheduling.programs import ProgramRun


class Flow:
    """One line: what one client wants on one placement at one priority."""

    __slots__ = ("_heap", "client", "placement", "priority")

    def __init__(self, client: str, placement: str, priority: int) -> None:
        self.client = client
        self.placement = placement
        self.priority = priority
        self._heap: list[tuple[int, int, ProgramRun]] = []

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __iter__(self) -> Iterator[tuple[ProgramRun, int]]:
        for _, gang, run in sorted(self._heap, key=lambda entry: entry[:2]):
            yield run, gang

    @property
    def head(self) -> ProgramRun:
        """The program of the first gang."""
        return self._heap[0][2]

    def push(self, run: ProgramRun, gang: int) -> None:
        """Add a gang, behind those of earlier tickets."""
        heappush(self._heap, (run.ticket, gang, run))

    def pop(self) -> tuple[ProgramRun, int]:
        """Remove the first gang."""
        _, gang, run = heappop(self._heap)
        return run, gang

    def discard(self, run: ProgramRun) -> list[int]:
        """Remove the gangs of one program."""
        removed = [gang for _, gang, owner in self._heap if owner is run]
        self._heap = [entry for entry in self._heap if entry[2] is not run]
        heapify(self._heap)
        return removed


class Flows:
    """All lines that are not empty."""

    def __init__(self) -> None:
        self._flows: dict[tuple[str, str, int], Flow] = {}

    def __iter__(self) -> Iterator[Flow]:
        return iter(self._flows.values())

    def __len__(self) -> int:
        return len(self._flows)

    def push(self, run: ProgramRun, gang: int) -> None:
        """Put a ready gang into its line."""
        submission = run.submission
        placement = submission.graph.gangs[gang].placement
        key = submission.client, placement, submission.priority
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = Flow(*key)
        flow.push(run, gang)

    def pop(self, flow: Flow) -> tuple[ProgramRun, int]:
        """Take the first gang of a line."""
        run, gang = flow.pop()
        self._drop_if_empty(flow)
        return run, gang

    def discard(self, run: ProgramRun) -> list[int]:
        """Remove all gangs of a program; return them."""
        submission = run.submission
        removed = []
        for placement in submission.graph.placements:
            key = submission.client, placement, submission.priority
            if flow := self._flows.get(key):
                removed += flow.discard(run)
                self._drop_if_empty(flow)
        return removed

    def _drop_if_empty(self, flow: Flow) -> None:
        if not flow:
            del self._flows[flow.client, flow.placement, flow.priority]
