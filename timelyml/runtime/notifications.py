"""Pending notifications of one operator on one worker.

A notification is asked for by (shard, time, ports) and becomes ready when every
one of the ports is complete at its time. Ready ones come out in an order that
extends the partial order of times; with `in_order`, a shard gets none before
all its earlier ones, nor before those that go first at the same time. Looking for a
ready one costs as much as few could be the next: however many times are asked for,
only the earliest are looked at.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

from timelyml.progress import Capability, MutableAntichain, Timestamp

Ports = tuple[int, ...]
IsComplete = Callable[[int, Timestamp, Ports], bool]


@dataclass(slots=True, order=True)  # a frozen one takes 0.5 us more to make
class Notification:
    """One request: sorted by time, then shard, then ports; fields stay as they are.

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
    asked: tuple[tuple[int, Ports | None], ...] = field(compare=False, default=())


class NotificationQueue:
    """All pending notifications of one operator on one worker."""

    def __init__(
        self, *, in_order: bool, first: Mapping[Ports, tuple[Ports, ...]] | None = None
    ) -> None:
        self._in_order = in_order
        self._first = first or {}  # with `in_order`: which ports go before which
        self._pending: dict[tuple[int, Timestamp, Ports], Notification] = {}
        self._queues: dict[Ports, _Queue] = {}
        self._shards: _ShardsInOrder | None = None  # takes their place, if need be

    def __len__(self) -> int:
        return len(self._pending)

    def find(self, shard: int, time: Timestamp, ports: Ports) -> Notification | None:
        """Return the request for that shard, time and ports, if it is pending."""
        return self._pending.get((shard, time, ports))

    def of_shard(self, shard: int) -> list[Notification]:
        """Return what is pending for one shard."""
        return [each for each in self._pending.values() if each.shard == shard]

    def add(self, notification: Notification, *, is_dense: bool) -> None:
        """Add a request that is not there yet.

        Args:
            notification: The request.
            is_dense: Whether one of its ports is complete by counting: then it may
                be complete for one shard alone, and before an earlier time.
        """
        time, ports = notification.time, notification.ports
        queue = self._queues.get(ports)
        if queue is not None and not is_dense:  # one more of what is there: most are
            self._pending[notification.shard, time, ports] = notification
            queue.add(notification)
            return
        is_uniform = self._in_order and self._shards is None
        if is_uniform and (is_dense or self._is_by_shard(time, ports)):
            self._order_by_shard()
        self._pending[notification.shard, time, ports] = notification
        if self._shards is not None:
            self._shards.add(notification, is_dense=is_dense)
            return
        queue = self._queues.get(ports)
        if queue is None:
            if is_dense:
                queue = _AnyOrder()
            else:
                queue = _Earliest() if isinstance(time, int) else _Minimal()
            self._queues[ports] = queue
        queue.add(notification)

    def _is_by_shard(self, time: Timestamp, ports: Ports) -> bool:
        """Whether the order of each shard is another than that of one frontier.

        Ints that wait for the same sparse ports become ready in their order, of
        whatever shard they are.
        """
        is_another = bool(self._queues) and ports not in self._queues
        return bool(self._first) or not isinstance(time, int) or is_another

    def _order_by_shard(self) -> None:
        self._shards = _ShardsInOrder(self._first)
        for notification in self._pending.values():
            self._shards.add(notification, is_dense=False)
        self._queues.clear()

    def pop_ready(self, is_complete: IsComplete) -> Notification | None:
        """Remove and return the first ready notification, if any."""
        if not self._pending:
            return None
        if self._shards is not None:
            best = self._shards.first_ready(is_complete)
            if best is not None:
                self._shards.remove(best)
        else:
            best = _first_ready(self._queues.values(), is_complete)
            if best is not None:
                self._queues[best.ports].remove(best)
        if best is not None:
            del self._pending[best.shard, best.time, best.ports]
        return best


class _Queue(Protocol):
    """Some of the notifications, in the order in which they may become ready."""

    def add(self, notification: Notification) -> None: ...

    def first_ready(self, is_complete: IsComplete) -> Notification | None:
        """Return the first one that is ready, and leave it there."""

    def remove(self, notification: Notification) -> None:
        """Remove what `first_ready` returned."""


class _Earliest:
    """For total times and sparse ports: nothing is ready before the first one is."""

    def __init__(self) -> None:
        # Tuples, which are compared in C: 1 us less each. No two have time and shard.
        self._heap: list[tuple[Timestamp, int, Notification]] = []

    def add(self, notification: Notification) -> None:
        entry = (notification.time, notification.shard, notification)
        heapq.heappush(self._heap, entry)

    def first_ready(self, is_complete: IsComplete) -> Notification | None:
        if not self._heap:
            return None
        time, shard, head = self._heap[0]
        return head if is_complete(shard, time, head.ports) else None

    def remove(self, _: Notification) -> None:
        heapq.heappop(self._heap)


class _Minimal:
    """For partial times and sparse ports: the minimal times are ready first."""

    def __init__(self) -> None:
        self._minimal = MutableAntichain()
        self._by_time: dict[Timestamp, list[Notification]] = {}  # heaps, by shard

    def add(self, notification: Notification) -> None:
        time = notification.time
        if time not in self._by_time:
            self._minimal.update([(time, 1)])
        heapq.heappush(self._by_time.setdefault(time, []), notification)

    def first_ready(self, is_complete: IsComplete) -> Notification | None:
        for time in self._minimal.elements:
            head = self._by_time[time][0]
            if is_complete(head.shard, time, head.ports):
                return head
        return None

    def remove(self, notification: Notification) -> None:
        time = notification.time
        heapq.heappop(self._by_time[time])
        if not self._by_time[time]:
            del self._by_time[time]
            self._minimal.update([(time, -1)])


class _AnyOrder:
    """For dense ports: any of them may be ready, for its shard alone."""

    def __init__(self) -> None:
        self._pending: list[Notification] = []  # ascending

    def add(self, notification: Notification) -> None:
        insort(self._pending, notification)

    def first_ready(self, is_complete: IsComplete) -> Notification | None:
        for each in self._pending:
            if is_complete(each.shard, each.time, each.ports):
                return each
        return None

    def remove(self, notification: Notification) -> None:
        del self._pending[bisect_left(self._pending, notification)]


class _Lowest(_AnyOrder):
    """For sparse ports and times in order: nothing is ready before the first one is."""

    def first_ready(self, is_complete: IsComplete) -> Notification | None:
        if not self._pending:
            return None
        head = self._pending[0]
        return head if is_complete(head.shard, head.time, head.ports) else None


class _ShardsInOrder:
    """Each shard's own earliest time comes first, whatever its ports are.

    Those that may come next of each shard stand in a queue by their ports, so that
    looking for a ready one does not go through all shards.
    """

    def __init__(self, first: Mapping[Ports, tuple[Ports, ...]]) -> None:
        self._first = first
        self._by_shard: dict[int, list[Notification]] = {}  # ascending
        self._next: dict[Ports, _Queue] = {}

    def add(self, notification: Notification, *, is_dense: bool) -> None:
        if notification.ports not in self._next:
            self._next[notification.ports] = _AnyOrder() if is_dense else _Lowest()
        pending = self._by_shard.setdefault(notification.shard, [])
        is_later = bool(pending) and pending[0].time != notification.time
        if is_later and pending[0] < notification:
            insort(pending, notification)
            return
        before = self._next_of(pending)
        insort(pending, notification)
        self._replace(before, self._next_of(pending))

    def first_ready(self, is_complete: IsComplete) -> Notification | None:
        return _first_ready(self._next.values(), is_complete)

    def remove(self, notification: Notification) -> None:
        pending = self._by_shard[notification.shard]
        before = self._next_of(pending)
        pending.remove(notification)  # among the first
        self._replace(before, self._next_of(pending))
        if not pending:
            del self._by_shard[notification.shard]

    def _next_of(self, pending: list[Notification]) -> list[Notification]:
        """Return those of the earliest time that no other one goes before."""
        earliest = list(takewhile(lambda each: each.time == pending[0].time, pending))
        if not self._first:
            return earliest
        ports = {each.ports for each in earliest}
        return [
            each
            for each in earliest
            if ports.isdisjoint(self._first.get(each.ports, ()))
        ]

    def _replace(self, before: list[Notification], after: list[Notification]) -> None:
        for each in before:
            if each not in after:
                self._next[each.ports].remove(each)
        for each in after:
            if each not in before:
                self._next[each.ports].add(each)


def _first_ready(
    queues: Iterable[_Queue], is_complete: IsComplete
) -> Notification | None:
    best: Notification | None = None
    for queue in queues:
        found = queue.first_ready(is_complete)
        if found is not None and (best is None or found < best):
            best = found
    return best
