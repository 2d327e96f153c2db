"""Which epochs a source may open: epoch credit, and an orderly stop.

A source runs at most so many epochs ahead of the oldest one that the graph's ends
have not finished. When a run is told to stop, its regular sources, which promised a
block of every shard for every epoch, first agree on the epoch to end at: each worker
names the first that none of its shards has begun, and the latest of those is it.
"""

from __future__ import annotations

from timelyml.graph import Graph
from timelyml.progress import CapabilityTable, Tracker, epoch_of


class EpochGate:
    """Decides for the sources of one run on one worker."""

    def __init__(self, graph: Graph, tracker: Tracker, max_ahead: int) -> None:
        self._tracker = tracker
        self._max_ahead = max_ahead
        self._ends = {
            spec.index: ends_reached(graph, spec.index)
            for spec in graph.operators
            if spec.is_source
        }
        self._outputs = {
            graph.location_of_output(spec.index, port)
            for spec in graph.operators
            if spec.is_source and spec.regular
            for port in range(spec.num_outputs)
        }
        self._regular = {
            spec.index for spec in graph.operators if spec.is_source and spec.regular
        }
        self._oldest: dict[int, int | None] = {}  # open epoch, by source: asked before
        self._latest = 0  # epoch that a regular source here opened, or will first
        self._waiters: set[tuple[int, int]] = set()
        self._paused_at: int | None = None

    def may_open(self, operator: int, shard: int, epoch: int) -> bool:
        """Whether a source may open `epoch`; if not, it is remembered as waiting."""
        if operator not in self._oldest:
            self._oldest[operator] = self._find_oldest(operator)
        oldest = self._oldest[operator]
        has_credit = oldest is None or epoch - oldest < self._max_ahead
        is_paused = self._paused_at is not None and epoch >= self._paused_at
        if has_credit and not is_paused:
            if operator in self._regular:
                self._latest = max(self._latest, epoch)
            return True
        self._waiters.add((operator, shard))
        return False

    def frontiers_moved(self) -> set[tuple[int, int]]:
        """Return the (operator, shard) that wait, which may ask again now."""
        self._oldest.clear()
        if not self._waiters:
            return set()
        waiters, self._waiters = self._waiters, set()
        return waiters

    def _find_oldest(self, operator: int) -> int | None:
        """Return the oldest epoch that is open at the ends of a source, if any."""
        return min(
            (
                epoch_of(time)
                for location in self._ends.get(operator, ())
                for time in self._tracker.frontier(location).elements
            ),
            default=None,
        )

    def pause(self, table: CapabilityTable) -> int:
        """Open nothing new; return the first epoch that no regular source began.

        An epoch is begun as long as a capability stands at it, since a source moves
        its capability on only with the last block of an epoch. Sources that have
        closed by now opened epochs too, and those that have not started yet, since
        this overtook the start of the run, will open the first one.
        """
        begun = [
            epoch_of(holding.time)
            for holding in table.holdings()
            if holding.location in self._outputs
        ]
        self._paused_at = max([self._latest, *begun]) + 1
        return self._paused_at

    def resume_until(self, epoch: int) -> None:
        """All workers agree on `epoch`: sources may open what comes before it."""
        self._paused_at = epoch


def ends_reached(graph: Graph, operator: int) -> frozenset[int]:
    """Return the inputs at the graph's ends that an operator leads to."""
    reached: set[int] = set()
    fresh = [operator]
    while fresh:
        spec = graph.operators[fresh.pop()]
        for port in range(spec.num_outputs):
            for channel in graph.channels_from(spec.index, port):
                if channel.target.operator not in reached:
                    reached.add(channel.target.operator)
                    fresh.append(channel.target.operator)
    return frozenset(
        location
        for location in graph.terminal_inputs()
        if graph.port_of(location).operator in reached
    )
