"""The controller's side of progress: its tracker, and the accumulator.

In broadcast mode the controller only watches what workers say to each other. In
accumulator mode it merges their batches, and sends the sum to all of them once a
frontier moved.
"""

from __future__ import annotations

from collections.abc import Sequence

from timelyml.graph import Graph
from timelyml.progress import (
    ProgressAccumulator,
    ProgressBatch,
    ProgressInbox,
    Tracker,
    epoch_of,
)
from timelyml.runtime.build import initial_counts
from timelyml.runtime.config import INPUT_KIND, PROBE_KIND, ProgressMode
from timelyml.runtime.effects import Effect, FrontierMoved, OldestEpochs, Send
from timelyml.runtime.epochs import ends_reached


class ControllerProgress:
    """The progress of one run, as the controller knows it; `workers` are its members."""

    def __init__(
        self,
        graph: Graph,
        workers: Sequence[int],
        generation: int,
        mode: ProgressMode,
    ) -> None:
        counts = initial_counts(graph, len(workers))
        self.tracker = Tracker(graph.reachability(), counts)
        self.tracker.propagate()
        self._workers = workers
        self._inbox: ProgressInbox | None = None
        self._accumulator: ProgressAccumulator | None = None
        if mode == "broadcast":
            self._inbox = ProgressInbox(generation)
        else:
            self._accumulator = ProgressAccumulator(generation)
        self._ready: list[ProgressBatch] = []
        self._probes = {
            graph.location_of_input(spec.index): spec.name
            for spec in graph.operators
            if spec.kind == PROBE_KIND
        }
        self._ends_of_inputs = {
            spec.index: ends_reached(graph, spec.index)
            for spec in graph.operators
            if spec.kind == INPUT_KIND
        }
        self._watched_ends = frozenset().union(*self._ends_of_inputs.values())

    def accept(self, batch: ProgressBatch) -> None:
        """Take a worker's batch; `settle` applies it.

        Raises:
            ProgressProtocolError: It is a duplicate or of another generation.
        """
        if self._accumulator is not None:
            self._accumulator.accept(batch)
        elif self._inbox is not None:
            self._ready.extend(self._inbox.accept(batch))

    def settle(self) -> list[Effect]:
        """Apply what was accepted; in accumulator mode pass it on as well."""
        effects: list[Effect] = []
        moved: set[int] = set()
        if self._ready:
            ready, self._ready = self._ready, []
            for batch in ready:
                self.tracker.update_many(batch.changes)
            moved.update(change[0] for change in self.tracker.propagate())
        if self._accumulator is not None:
            changes, merged = self._accumulator.settle(self.tracker)
            moved.update(change[0] for change in changes)
            if merged is not None:
                effects += [Send(w, merged) for w in self._workers]
        return effects + self._observed(moved)

    def oldest_epochs(self) -> dict[int, int | None]:
        """By input operator, the oldest epoch unfinished at the ends it leads to."""
        return {
            operator: min(
                (
                    epoch_of(time)
                    for location in ends
                    for time in self.tracker.frontier(location).elements
                ),
                default=None,
            )
            for operator, ends in self._ends_of_inputs.items()
        }

    def _observed(self, moved: set[int]) -> list[Effect]:
        effects: list[Effect] = [
            FrontierMoved(
                self._probes[location], tuple(self.tracker.frontier(location).elements)
            )
            for location in moved
            if location in self._probes
        ]
        if moved & self._watched_ends:
            effects.append(OldestEpochs(self.oldest_epochs()))
        return effects
