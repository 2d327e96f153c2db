"""Multisets of open timestamps that keep their minimal elements at hand.

The count of a time never falls below 0 here; `MutableAntichain` adds negative
counts. A time whose count is 0 stays as a marker until it surfaces or until the
markers outnumber the open times, so that no change costs more than the height of
a heap (ints) or the width of the frontier (products), however many are open.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable
from heapq import heapify, heappop, heappush
from typing import Any

from timelyml.progress.frontier import (
    IntFrontier,
    Product,
    ProductFrontier,
    find_floor,
    insert_minimal,
)
from timelyml.progress.timestamp import TIME_LIMIT

_FEW_MARKERS = 32  # below this many, markers are not worth a rebuild


class OpenInts:
    """Open top-level timestamps: counts, and a heap with lazy deletion."""

    __slots__ = ("_heap", "_num_markers", "counts", "frontier")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}  # exactly the times in the heap
        self.frontier = IntFrontier()
        self._heap: list[int] = []
        self._num_markers = 0

    # `Any`: one instance sees times of one kind, which mypy cannot be told cheaply.
    def apply(self, changes: Collection[tuple[Any, int]]) -> list[tuple[Any, int]]:
        """Add each `(time, delta)`; return the net changes of the frontier."""
        counts, heap = self.counts, self._heap
        if len(heap) == 1 and len(changes) == 2:
            (early, gone), (late, come) = changes
            if early > late:
                early, gone, late, come = late, come, early, gone
            if come > 0 and early < late and counts.get(early) == -gone:
                # The only open time gives way to a later one: half the work.
                heap[0] = self.frontier.least = late
                del counts[early]
                counts[late] = come
                return [(early, -1), (late, 1)]
        for time, delta in changes:
            before = counts.get(time)
            if before is None:
                if delta:
                    counts[time] = delta
                    heappush(heap, time)
            elif delta:
                after = counts[time] = before + delta
                if not after:
                    self._num_markers += 1
                elif not before:
                    self._num_markers -= 1
        return self._surface()

    def _surface(self) -> list[tuple[int, int]]:
        """Drop the markers on top; return how that and what is new move the frontier."""
        heap = self._heap
        if self._num_markers:
            counts = self.counts
            while heap and not counts[heap[0]]:
                del counts[heappop(heap)]
                self._num_markers -= 1
            if self._num_markers > _FEW_MARKERS:
                self._drop_markers()
        frontier = self.frontier
        before = frontier.least
        after = heap[0] if heap else TIME_LIMIT
        if before == after:
            return []
        frontier.least = after
        if after == TIME_LIMIT:
            return [(before, -1)]
        if before == TIME_LIMIT:
            return [(after, 1)]
        if before < after:
            return [(before, -1), (after, 1)]
        return [(after, 1), (before, -1)]

    def _drop_markers(self) -> None:
        """Drop all markers, once they outnumber the open times."""
        counts, heap = self.counts, self._heap
        if 2 * self._num_markers > len(heap):
            for time in [time for time in heap if not counts[time]]:
                del counts[time]
            heap[:] = counts
            heapify(heap)
            self._num_markers = 0


class OpenProducts:
    """Open timestamps with loop coordinates: a forest over the frontier.

    Every time hangs under one that is less_equal to it, the frontier's elements
    are the roots, and what hangs under a time is a list of groups, each a sorted
    antichain. When a root goes, its groups are merged by a balanced tournament
    in which the losers hang under the winners: a pairing heap for partial orders,
    so that no later removal compares them all again.
    """

    __slots__ = ("_below", "_num_markers", "counts", "frontier")

    def __init__(self) -> None:
        self.counts: dict[Product, int] = {}  # exactly the times in the forest
        self.frontier = ProductFrontier()
        self._below: dict[Product, list[list[Product]]] = {}
        self._num_markers = 0

    def apply(self, changes: Iterable[tuple[Any, int]]) -> list[tuple[Any, int]]:
        """Add each `(time, delta)`; return the net changes of the frontier."""
        counts = self.counts
        moved: dict[Product, int] = {}
        closed: list[Product] = []
        for time, delta in changes:
            before = counts.get(time)
            if before is None:
                if delta:
                    counts[time] = delta
                    self._insert(time, moved)
                continue
            after = counts[time] = before + delta
            if not after:
                if before:
                    self._num_markers += 1
                    closed.append(time)
            elif not before:
                self._num_markers -= 1
        if closed:
            self._close(closed, moved)
        if not moved:
            return []
        return [(time, moved[time]) for time in sorted(moved) if moved[time]]

    def _insert(self, time: Product, moved: dict[Product, int]) -> None:
        times = self.frontier.times
        floor = find_floor(times, time)
        if floor is not None:
            self._hang(floor, [time])
            return
        displaced = insert_minimal(times, time)
        if displaced:
            self._hang(time, displaced)
            for later in displaced:
                moved[later] = moved.get(later, 0) - 1
        moved[time] = moved.get(time, 0) + 1

    def _hang(self, floor: Product, group: list[Product]) -> None:
        groups = self._below.get(floor)
        if groups is None:
            self._below[floor] = [group]
        else:
            groups.append(group)

    def _close(self, closed: list[Product], moved: dict[Product, int]) -> None:
        """Remove the roots among `closed` and let what hangs under them rise."""
        counts, times = self.counts, self.frontier.times
        fallen = []
        for time in closed:
            index = bisect_left(times, time)
            if index < len(times) and times[index] == time and not counts[time]:
                del times[index]
                fallen.append(time)
                moved[time] = moved.get(time, 0) - 1
        groups = self._collect(fallen)
        if groups:
            for time in self._settle(self._tournament(groups)):
                moved[time] = moved.get(time, 0) + 1
        if self._num_markers > _FEW_MARKERS and 2 * self._num_markers > len(counts):
            self._rebuild()

    def _collect(self, markers: list[Product]) -> list[list[Product]]:
        """Forget `markers`; return the open times that hung right below them."""
        counts, below = self.counts, self._below
        groups = []
        while markers:
            marker = markers.pop()
            del counts[marker]
            self._num_markers -= 1
            for group in below.pop(marker, ()):
                live = [time for time in group if counts[time]]
                if len(live) < len(group):
                    markers.extend(time for time in group if not counts[time])
                if live:
                    groups.append(live)
        return groups

    def _tournament(self, groups: list[list[Product]]) -> list[Product]:
        """Merge antichains in rounds of pairs into the antichain of their minima."""
        while len(groups) > 1:
            pairs = zip(groups[::2], groups[1::2], strict=False)
            merged = [self._merge(first, second) for first, second in pairs]
            if len(groups) % 2:
                merged.append(groups[-1])
            groups = merged
        return groups[0]

    def _merge(self, into: list[Product], group: list[Product]) -> list[Product]:
        if len(into) < len(group):
            into, group = group, into
        losers: dict[Product, list[Product]] = {}
        for time in group:
            floor = find_floor(into, time)
            if floor is not None:
                losers.setdefault(floor, []).append(time)
                continue
            displaced = insert_minimal(into, time)
            if displaced:
                self._hang(time, displaced)
        # Losers of one winner are an antichain already: one group, never compared.
        for floor, times in losers.items():
            self._hang(floor, times)
        return into

    def _settle(self, rising: list[Product]) -> list[Product]:
        """Put an antichain under or among the roots; return what becomes a root.

        What rose from under one root cannot be below another one.
        """
        times = self.frontier.times
        losers: dict[Product, list[Product]] = {}
        roots = []
        for time in rising:
            floor = find_floor(times, time)
            if floor is None:
                insert_minimal(times, time)
                roots.append(time)
            else:
                losers.setdefault(floor, []).append(time)
        for floor, group in losers.items():
            self._hang(floor, group)
        return roots

    def _rebuild(self) -> None:
        """Build the forest anew without markers; the frontier stays as it is."""
        self.counts = {time: count for time, count in self.counts.items() if count}
        self._below.clear()
        self._num_markers = 0
        roots = set(self.frontier.times)
        rest = [[time] for time in sorted(self.counts) if time not in roots]
        if rest:
            self._settle(self._tournament(rest))
