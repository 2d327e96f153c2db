"""Pending notifications of one operator on one worker.

A notification is asked for by (shard, time, ports) and becomes ready when every
one of the ports is complete at its time. Ready ones come out in an order that
extends the partial order of times; with `in_order`, a shard gets none before
all its earlier ones.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from timelyml.progress import Capability, Timestamp

Ports = tuple[int, ...]
IsComplete = Callable[[int, Timestamp, Ports], bool]


@dataclass(frozen=True, slots=True, order=True)
class Notification:
    """One request: sorted by time, then shard, then ports.

    `via_port` is the input port whose summaries justify what the callback
    sends; -1 where a held capability does. The capabilities keep the times that
    may be sent at open until the callback has run; asking again, by another port or
    for other outputs, adds to them. `asked` remembers who asked, by port and outputs.
    """

    time: Timestamp
    shard: int
    ports: Ports
    via_port: int = field(compare=False)
    capabilities: list[Capability] = field(compare=False)
    asked: set[tuple[int, Ports | None]] = field(compare=False, default_factory=set)


class NotificationQueue:
    """All pending notifications of one operator on one worker."""

    def __init__(self, *, in_order: bool) -> None:
        self._in_order = in_order
        # By ports. A heap where completeness is monotone in time and the same
        # for every shard, so that only the head needs a look; else a sorted list.
        self._heaps: dict[Ports, list[Notification]] = {}
        self._sorted: dict[Ports, list[Notification]] = {}
        self._pending: dict[tuple[int, Timestamp, Ports], Notification] = {}
        self._open_times: dict[int, list[Timestamp]] = {}  # by shard, ascending

    def __len__(self) -> int:
        return len(self._pending)

    def find(self, shard: int, time: Timestamp, ports: Ports) -> Notification | None:
        """Return the request for that shard, time and ports, if it is pending."""
        return self._pending.get((shard, time, ports))

    def add(self, notification: Notification, *, is_monotone: bool) -> None:
        """Add a request that is not there yet."""
        ports = notification.ports
        self._pending[notification.shard, notification.time, ports] = notification
        if is_monotone and not self._in_order:
            heapq.heappush(self._heaps.setdefault(ports, []), notification)
        else:
            insort(self._sorted.setdefault(ports, []), notification)
        if self._in_order:
            insort(
                self._open_times.setdefault(notification.shard, []), notification.time
            )

    def pop_ready(self, is_complete: IsComplete) -> Notification | None:
        """Remove and return the first ready notification, if any."""
        best: Notification | None = None
        for heap in self._heaps.values():
            if heap and (best is None or heap[0] < best):
                head = heap[0]
                if is_complete(head.shard, head.time, head.ports):
                    best = head
        for pending in self._sorted.values():
            for candidate in pending:
                if best is not None and not candidate < best:
                    break
                if self._may_fire(candidate) and is_complete(
                    candidate.shard, candidate.time, candidate.ports
                ):
                    best = candidate
                    break
        if best is not None:
            self._remove(best)
        return best

    def _may_fire(self, candidate: Notification) -> bool:
        if not self._in_order:
            return True
        return self._open_times[candidate.shard][0] == candidate.time

    def _remove(self, notification: Notification) -> None:
        ports = notification.ports
        del self._pending[notification.shard, notification.time, ports]
        heap = self._heaps.get(ports)
        if heap and heap[0] is notification:
            heapq.heappop(heap)
        else:
            self._sorted[ports].remove(notification)
        if self._in_order:
            self._open_times[notification.shard].remove(notification.time)
