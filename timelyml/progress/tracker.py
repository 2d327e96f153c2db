"""The tracker: frontiers of every port from counts of pointstamps.

Each location holds a multiset of the times that could occur there: one for its
own open pointstamps, and one for each element of the frontier of each location
that leads to it. Its minimal elements are the location's frontier. Changes
spread in an order in which every edge leads forward, with net deltas, so that
each (location, time) is settled once per propagation and cycles terminate.

Outside cycles the order of locations suffices, and a location settles all its
times at once. Inside a cycle it takes the sort key of the reachability graph.

Source:
    Timely's reachability module; Naiad, section 2.3. Timely keeps two antichains
    per location, of pointstamps and of implications; one gives the same frontier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import TypeAlias, cast

from timelyml.progress.frontier import Frontier
from timelyml.progress.open_times import OpenInts, OpenProducts
from timelyml.progress.reachability import ReachabilityGraph
from timelyml.progress.timestamp import Timestamp, less_equal

Change: TypeAlias = tuple[int, Timestamp, int]
_Apply: TypeAlias = Callable[[Timestamp], Timestamp | None]


class _Port:
    """One location outside every cycle: its counts, and changes not yet settled."""

    __slots__ = ("frontier", "location", "open", "others", "pending", "rank", "same")

    def __init__(self, location: int, depth: int, rank: int) -> None:
        self.location = location
        self.rank = rank
        self.open: OpenInts | OpenProducts = OpenProducts() if depth else OpenInts()
        self.frontier = cast("Frontier", self.open.frontier)
        self.pending: dict[Timestamp, int] = {}
        self.same: tuple[_Port, ...] = ()  # targets outside cycles, same timestamp
        self.others: tuple[tuple[_Port, _Apply], ...] = ()

    def push(self, time: Timestamp, delta: int, dirty: list[int]) -> None:
        """Add `delta` to what could occur here at `time`, to be settled later."""
        pending = self.pending
        if not pending:
            heappush(dirty, self.rank)
        pending[time] = pending.get(time, 0) + delta

    def settle(self, dirty: list[int], moved: list[Change]) -> None:
        """Apply what is pending; pass the frontier's changes on and report them."""
        changes = self.open.apply(self.pending.items())
        self.pending.clear()
        if not changes:
            return
        for target in self.same:
            pending = target.pending
            if not pending:
                heappush(dirty, target.rank)
                pending.update(changes)  # their times are distinct
                continue
            for time, delta in changes:
                pending[time] = pending.get(time, 0) + delta
        if self.others:
            self.spread(changes, dirty)
        location = self.location
        for time, delta in changes:
            moved.append((location, time, delta))  # a call less

    def spread(self, changes: list[tuple[Timestamp, int]], dirty: list[int]) -> None:
        """Pass changes along the edges that do more than keep the timestamp."""
        for target, results_in in self.others:
            for time, delta in changes:
                result = results_in(time)
                if result is not None:
                    target.push(result, delta, dirty)


class _LoopPort(_Port):
    """One location on a cycle; its loop settles it."""

    __slots__ = ("loop", "ranks")

    def __init__(
        self, location: int, depth: int, loop: _Loop, ranks: tuple[int, ...]
    ) -> None:
        super().__init__(location, depth, loop.rank)
        self.loop = loop
        self.ranks = ranks

    def push(self, time: Timestamp, delta: int, dirty: list[int]) -> None:
        """Add `delta` to what could occur here at `time`, to be settled later."""
        loop = self.loop
        if isinstance(time, int):
            key: tuple[int, ...] = (time, self.ranks[0])
        elif len(time) == 2:
            ranks = self.ranks
            key = (time[0], ranks[0], time[1], ranks[1])
        else:
            pairs = zip(time, self.ranks, strict=True)
            key = tuple([value for pair in pairs for value in pair])
        entry = loop.entries.get(key)
        if entry is not None:
            entry.delta += delta
            return
        if not loop.entries and not loop.is_settling:
            heappush(dirty, loop.rank)
        loop.entries[key] = _Entry(self, time, delta)
        heappush(loop.keys, key)


class _Entry:
    """A pending change inside a loop."""

    __slots__ = ("delta", "port", "time")

    def __init__(self, port: _LoopPort, time: Timestamp, delta: int) -> None:
        self.port = port
        self.time = time
        self.delta = delta


class _Loop:
    """A strongly connected component: settles its pointstamps in the order of keys."""

    __slots__ = ("entries", "is_settling", "keys", "rank")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.entries: dict[tuple[int, ...], _Entry] = {}
        self.keys: list[tuple[int, ...]] = []
        self.is_settling = False

    def settle(self, dirty: list[int], moved: list[Change]) -> None:
        """Apply what is pending until nothing is left; report the net changes."""
        entries, keys = self.entries, self.keys
        net: dict[tuple[int, Timestamp], int] = {}
        self.is_settling = True
        while keys:
            entry = entries.pop(heappop(keys))
            if not entry.delta:
                continue
            port = entry.port
            changes = port.open.apply(((entry.time, entry.delta),))
            if changes:
                port.spread(changes, dirty)
                for time, delta in changes:
                    key = (port.location, time)
                    net[key] = net.get(key, 0) + delta
        self.is_settling = False
        for (location, time), delta in net.items():
            if delta:
                moved.append((location, time, delta))


class Tracker:
    """Counts pointstamps and keeps the frontier of every location.

    Changes take effect when `propagate` is called; until then every frontier
    stays as it was. Counts may be negative for a while; only positive ones hold
    frontiers back.

    Args:
        graph: Where a pointstamp can lead to.
        initial: `(location, time, count)` of the pointstamps that exist at first.

    Raises:
        GraphError: If the graph has a cycle that does not advance.

    >>> from timelyml.progress.summary import Summary
    >>> graph = ReachabilityGraph([0, 0], [(0, 1, Summary.identity(0))])
    >>> tracker = Tracker(graph, [(0, 0, 1)])
    >>> tracker.frontier(1).elements
    (0,)
    >>> tracker.update_many([(0, 5, 1), (0, 0, -1)])
    >>> tracker.propagate()
    [(0, 0, -1), (0, 5, 1), (1, 0, -1), (1, 5, 1)]
    """

    __slots__ = ("_dirty", "_num_stamps", "_ports", "_stages", "_stamps", "graph")

    def __init__(
        self, graph: ReachabilityGraph, initial: Iterable[Change] = ()
    ) -> None:
        if graph.stuck_cycle() is not None:
            raise graph.stuck_error()
        self.graph = graph
        self._stamps: list[dict[Timestamp, int]] = [{} for _ in graph.depths]
        self._num_stamps = 0
        self._dirty: list[int] = []  # heap of ranks of stages with pending changes
        self._stages: list[_Port | _Loop] = []
        self._ports = self._make_ports()
        self._connect()
        self.update_many(initial)
        self.propagate()

    def update(self, location: int, time: Timestamp, delta: int) -> None:
        """Add `delta` to the count of a pointstamp, as of the next `propagate`."""
        self.update_many(((location, time, delta),))

    def update_many(self, changes: Iterable[Change]) -> None:
        """Add each `(location, time, delta)`, as of the next `propagate`."""
        for location, time, delta in changes:
            stamps = self._stamps[location]
            before = stamps.get(time, 0)
            after = before + delta
            if after:
                stamps[time] = after
                if not before:
                    self._num_stamps += 1
            elif before:
                del stamps[time]  # or every past time stays in memory
                self._num_stamps -= 1
            if before > 0:
                if after <= 0:
                    self._ports[location].push(time, -1, self._dirty)
            elif after > 0:
                self._ports[location].push(time, 1, self._dirty)

    def propagate(self) -> list[Change]:
        """Bring every frontier up to date; return the net changes of all of them."""
        dirty, stages = self._dirty, self._stages
        moved: list[Change] = []
        while dirty:
            stages[heappop(dirty)].settle(dirty, moved)
        return moved

    def frontier(self, location: int) -> Frontier:
        """Return a live, read-only view: what could still occur at the location."""
        return self._ports[location].frontier

    def has_passed(self, location: int, time: Timestamp) -> bool:
        """Whether nothing at or before `time` can occur at the location any more."""
        return not self._ports[location].frontier.less_equal(time)

    def is_global(self, location: int, time: Timestamp) -> bool:
        """Whether a decrease at this pointstamp could move a frontier.

        It cannot while something earlier holds the location's frontier, nor while
        another pointstamp leads to this very one.
        """
        port = self._ports[location]
        counts = cast("dict[Timestamp, int]", port.open.counts)
        return counts.get(time, 0) <= 1 and not port.frontier.less_than(time)

    def is_empty(self) -> bool:
        """Whether no pointstamp has a count, negative ones included."""
        return not self._num_stamps

    def pointstamps(self) -> list[Change]:
        """Return every `(location, time, count)` whose count is not 0."""
        return [
            (location, time, count)
            for location, stamps in enumerate(self._stamps)
            for time, count in sorted(stamps.items())
        ]

    def blockers(self, location: int, time: Timestamp) -> list[Change]:
        """Return the pointstamps that could result in one at or before this one.

        For explanations only: the first call for a location searches the graph.
        """
        found = []
        for origin, start, count in self.pointstamps():
            if count > 0:
                for summary in self.graph.minimal_summaries(origin, location):
                    result = summary.results_in(start)
                    if result is not None and less_equal(result, time):
                        found.append((origin, start, count))
                        break
        return found

    def _make_ports(self) -> list[_Port]:
        graph = self.graph
        cyclic = {graph.edges[index][0] for index in graph.cyclic_edges()}
        ports: dict[int, _Port] = {}
        for rank, component in enumerate(graph.components):
            loop = _Loop(rank)
            for location in component:
                depth = graph.depths[location]
                ports[location] = (
                    _LoopPort(location, depth, loop, graph.ranks(location))
                    if location in cyclic
                    else _Port(location, depth, rank)
                )
            is_loop = component[0] in cyclic
            self._stages.append(loop if is_loop else ports[component[0]])
        return [ports[location] for location in range(graph.num_locations)]

    def _connect(self) -> None:
        ports, depths = self._ports, self.graph.depths
        for source, target, summary in self.graph.edges:
            port = ports[source]
            keeps_time = summary.is_identity and depths[source] == depths[target]
            in_loop = isinstance(port, _LoopPort) or isinstance(
                ports[target], _LoopPort
            )
            if keeps_time and not in_loop:
                port.same += (ports[target],)
                continue
            apply = _unchanged if keeps_time else summary.results_in
            port.others += ((ports[target], apply),)


def _unchanged(time: Timestamp) -> Timestamp:
    return time
