"""Capabilities: the right to send at a time or later, at one output port.

A worker's progress counts the minimal times that it holds at a location, each once,
however many of its shards and callbacks hold it. Nothing here judges whether a
capability is justified: the runtime mints one only for a consumed record or from
another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from types import TracebackType
from typing import Any, NoReturn, Self, TypeAlias

from timelyml.errors import CapabilityError, InvariantError
from timelyml.progress.antichain import MutableAntichain
from timelyml.progress.timestamp import (
    TIME_LIMIT,
    Timestamp,
    UserTime,
    check_time,
    depth_of,
    less_equal,
)

Record: TypeAlias = Callable[[int, Timestamp, int], None]

_FEW_MARKERS = 32  # times that are not held any more: fewer are not worth a rebuild


@dataclass(frozen=True, slots=True)
class Holding:
    """What one worker holds at one pointstamp, and where it was created."""

    location: int
    time: Timestamp
    count: int
    sites: tuple[str, ...]


class Capability:
    """The right to send at `time` or later, at the output port `location`.

    It is released in the open, by `release` or by a `with` block, never by the
    garbage collector. `site` says where it was created, for stall reports.
    """

    __slots__ = ("_is_held", "_table", "_time", "location", "site")

    def __init__(
        self, table: CapabilityTable, location: int, time: Timestamp, site: str
    ) -> None:
        self._table = table
        self._time = time
        self._is_held = True
        self.location = location
        self.site = site

    @property
    def time(self) -> Timestamp:
        """The earliest timestamp at which it allows to send."""
        return self._time

    @property
    def is_held(self) -> bool:
        """Whether it has not been released yet."""
        return self._is_held

    def clone(self, site: str | None = None) -> Capability:
        """Return another capability for the same time; each is released by itself."""
        self._check_held("cloned")
        return self._table.mint(self.location, self._time, site or self.site)

    def delayed(self, time: UserTime, site: str | None = None) -> Capability:
        """Return another capability, for `time`, which must not be before this one.

        Raises:
            CapabilityError: If `time` is not at or after this one's time.
        """
        self._check_held("delayed")
        self._check_later(time, "delayed")
        return self._table.mint(self.location, time, site or self.site)

    def downgrade(self, time: UserTime) -> None:
        """Give up the right to send before `time`.

        Raises:
            CapabilityError: If `time` is not at or after this one's time.
        """
        self._check_held("downgraded")
        self._check_later(time, "downgraded")
        if time != self._time:
            self._table.add(self, time)
            self._table.discard(self, self._time)
            self._time = time

    def release(self) -> None:
        """Give up the right to send.

        Raises:
            CapabilityError: If it was released before.
        """
        if not self._is_held:
            self._check_held("released")
        self._is_held = False
        self._table.discard(self, self._time)

    def __reduce__(self) -> NoReturn:
        """Refuse to leave the worker: a copy elsewhere would hold nothing open.

        Where its shard moves, the runtime takes it along.
        """
        raise CapabilityError(
            f"capability from {self.site} cannot be sent or copied; got one for"
            f" {self._time!r}; expected it to stay in the state of its shard; send the"
            " time, and retain a capability where it arrives",
            location=self.location,
            time=self._time,
            site=self.site,
        )

    def __enter__(self) -> Self:
        self._check_held("entered")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_held:
            self.release()

    def __repr__(self) -> str:
        state = "" if self._is_held else ", released"
        return f"Capability({self._time!r} at location {self.location}{state})"

    def _check_held(self, action: str) -> None:
        if not self._is_held:
            raise CapabilityError(
                f"capability from {self.site} cannot be {action}; got one for"
                f" {self._time!r} that was released; expected one still held;"
                " clone it before it is released",
                location=self.location,
                time=self._time,
                site=self.site,
            )

    def _check_later(self, time: UserTime, action: str) -> None:
        now = self._time
        if type(time) is int and type(now) is int and now <= time < TIME_LIMIT:
            return  # spares 2 us
        check_time(time, depth_of(self._time), f"capability from {self.site}")
        if not less_equal(self._time, time):
            raise CapabilityError(
                f"capability from {self.site} cannot be {action} to a time that is not"
                f" at or after its own; got {time!r}; expected {self._time!r} or later"
                " in every coordinate; keep a capability for the earlier time",
                location=self.location,
                time=self._time,
                requested=time,
                site=self.site,
            )


class _HeldInts:
    """What is held at one output outside of loops; its least time counts."""

    __slots__ = ("_counted", "_heap", "by_time")

    def __init__(self) -> None:
        self.by_time: dict[Timestamp, set[Capability]] = {}
        self._heap: list[Any] = []  # the times that are held, among others
        self._counted: Any = TIME_LIMIT

    def start(self, time: Timestamp) -> None:
        """Take the time of an initial capability as counted."""
        self._heap.append(time)
        self._counted = time

    def opened(self, time: Timestamp) -> None:
        """Note that a time is held now, which was not."""
        heappush(self._heap, time)

    def closed(self, _: Timestamp) -> None:
        """Note that a time is not held any more; it is seen when it comes up."""

    def covers(self, time: Any) -> bool:
        """Whether a time at or before this one is held."""
        return time in self.by_time or self._least() <= time

    def settle(self) -> list[tuple[Timestamp, int]]:
        """Return how the minimal times have changed since the last call."""
        before, after = self._counted, self._least()
        if len(self._heap) > 2 * len(self.by_time) + _FEW_MARKERS:
            self._heap[:] = self.by_time
            heapify(self._heap)
        if before == after:
            return []
        self._counted = after
        changes: list[tuple[Timestamp, int]] = [(before, -1), (after, 1)]
        return [change for change in changes if change[0] != TIME_LIMIT]

    def _least(self) -> Any:
        heap, held = self._heap, self.by_time
        while heap and heap[0] not in held:
            heappop(heap)
        return heap[0] if heap else TIME_LIMIT


class _HeldProducts:
    """What is held at one output inside of loops; its minimal times count."""

    __slots__ = ("_changes", "_minimal", "by_time")

    def __init__(self) -> None:
        self.by_time: dict[Timestamp, set[Capability]] = {}
        self._minimal = MutableAntichain()
        self._changes: dict[Timestamp, int] = {}

    def start(self, time: Timestamp) -> None:
        """Take the time of an initial capability as counted."""
        self._minimal.update(((time, 1),))

    def opened(self, time: Timestamp) -> None:
        """Note that a time is held now, which was not."""
        self._changes[time] = self._changes.get(time, 0) + 1

    def closed(self, time: Timestamp) -> None:
        """Note that a time is not held any more."""
        self._changes[time] = self._changes.get(time, 0) - 1

    def covers(self, time: Timestamp) -> bool:
        """Whether a time at or before this one is held."""
        if time in self.by_time:
            return True
        # A loop, since `any` and a generator take 0.3 us more.
        for earlier in self.by_time:  # noqa: SIM110
            if less_equal(earlier, time):
                return True
        return False

    def settle(self) -> list[tuple[Timestamp, int]]:
        """Return how the minimal times have changed since the last call."""
        changes, self._changes = self._changes, {}
        return self._minimal.update(changes.items())


class CapabilityTable:
    """The capabilities of one worker, of which progress counts the earliest.

    Whoever may send at a time may send later, so a location's minimal times tell all
    that a frontier can depend on; each counts once, however many hold it. What changed
    is recorded by `settle`: that takes as long for a thousand epochs as for one.

    Args:
        record: Called with `(location, time, delta)` when a time becomes minimal
            among those that are held at its location (+1), or is no longer (-1).
    """

    __slots__ = ("_places", "_record", "_unsettled")

    def __init__(self, record: Record) -> None:
        self._record = record
        self._places: dict[int, _HeldInts | _HeldProducts] = {}  # by location
        self._unsettled: dict[int, _HeldInts | _HeldProducts] = {}

    def start(self, location: int, time: Timestamp, site: str) -> Capability:
        """Return the initial capability of an output; it is counted already.

        Every worker starts with one per output in every tracker's initial counts.

        Raises:
            InvariantError: If anything was held at the location before.
        """
        if location in self._places:
            raise InvariantError(
                f"output at location {location} cannot start twice; got another initial"
                f" capability at {time!r} from {site}; expected one per worker; clone"
                " the first one",
                location=location,
            )
        place = self._place(location, time)
        place.start(time)
        capability = Capability(self, location, time, site)
        place.by_time[time] = {capability}
        return capability

    def mint(self, location: int, time: Timestamp, site: str) -> Capability:
        """Return a new capability; the caller vouches that it is justified."""
        capability = Capability(self, location, time, site)
        self.add(capability, time)
        return capability

    def add(self, capability: Capability, time: Timestamp) -> None:
        """Count `capability` at `time`; only capabilities call this."""
        location = capability.location
        place = self._places.get(location)
        if place is None:
            place = self._place(location, time)
        holders = place.by_time.get(time)
        if holders is None:
            place.by_time[time] = {capability}
            place.opened(time)
            self._unsettled[location] = place
        else:
            holders.add(capability)

    def discard(self, capability: Capability, time: Timestamp) -> None:
        """Stop counting `capability` at `time`; only capabilities call this."""
        location = capability.location
        place = self._places[location]
        holders = place.by_time[time]
        holders.remove(capability)
        if not holders:
            del place.by_time[time]
            place.closed(time)
            self._unsettled[location] = place

    def settle(self) -> None:
        """Record how the minimal times have changed; to be called before they count.

        What was sent and consumed meanwhile is counted along with it, in one batch.
        """
        if not self._unsettled:
            return
        unsettled, self._unsettled = self._unsettled, {}
        for location, place in unsettled.items():
            for time, delta in place.settle():
                self._record(location, time, delta)

    def holds(self, location: int, time: Timestamp) -> bool:
        """Whether a capability for exactly this pointstamp is held."""
        place = self._places.get(location)
        return place is not None and time in place.by_time

    def covers(self, location: int, time: Timestamp) -> bool:
        """Whether a capability held at the location allows to send at `time`."""
        place = self._places.get(location)
        return place is not None and place.covers(time)

    def holdings(self) -> list[Holding]:
        """Return what is held, by location and time, with the sites of creation."""
        return [
            Holding(
                location, time, len(holders), tuple(sorted({c.site for c in holders}))
            )
            for location, place in sorted(
                self._places.items(), key=lambda item: item[0]
            )
            for time, holders in sorted(place.by_time.items(), key=lambda item: item[0])
        ]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held."""
        return not any(place.by_time for place in self._places.values())

    def _place(self, location: int, time: Timestamp) -> _HeldInts | _HeldProducts:
        """Return a new place; all times of a location are of one kind."""
        place = _HeldInts() if isinstance(time, int) else _HeldProducts()
        self._places[location] = place
        return place
