"""Frontiers: read-only views of the least open timestamps at one place.

An empty frontier means that nothing can come any more, at any time. The frontier
of ints is one number; that of products is a list sorted by Python's order, in
which only the elements that sort at or before a time can be less_equal to it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Protocol

from timelyml.progress.timestamp import TIME_LIMIT, Timestamp, less_equal

Product = tuple[int, ...]


class Frontier(Protocol):
    """What an antichain of open timestamps tells; live, so read it anew each time."""

    def less_equal(self, time: Timestamp) -> bool:
        """Whether something open is at or before `time`: it can still occur."""
        ...

    def less_than(self, time: Timestamp) -> bool:
        """Whether something open is strictly before `time`."""
        ...

    @property
    def elements(self) -> tuple[Timestamp, ...]:
        """The minimal open timestamps, in Python's order."""
        ...

    def __bool__(self) -> bool: ...


class IntFrontier:
    """The frontier of top-level timestamps: the least one, or none.

    `least` is TIME_LIMIT, above every timestamp, when nothing is open. It is
    written by its owner only.
    """

    __slots__ = ("least",)

    def __init__(self) -> None:
        self.least = TIME_LIMIT

    def less_equal(self, time: int) -> bool:
        """Whether something open is at or before `time`."""
        return self.least <= time

    def less_than(self, time: int) -> bool:
        """Whether something open is strictly before `time`."""
        return self.least < time

    @property
    def elements(self) -> tuple[int, ...]:
        """The least open timestamp, if any."""
        return (self.least,) if self.least < TIME_LIMIT else ()

    def __bool__(self) -> bool:
        return self.least < TIME_LIMIT

    def __repr__(self) -> str:
        return f"Frontier{self.elements!r}"


class ProductFrontier:
    """The frontier of timestamps with loop coordinates.

    `times` is an antichain sorted by Python's order, written by its owner only.
    """

    __slots__ = ("times",)

    def __init__(self) -> None:
        self.times: list[Product] = []

    def less_equal(self, time: Product) -> bool:
        """Whether something open is at or before `time`."""
        return find_floor(self.times, time) is not None

    def less_than(self, time: Product) -> bool:
        """Whether something open is strictly before `time`."""
        floor = find_floor(self.times, time)
        return floor is not None and floor != time

    @property
    def elements(self) -> tuple[Product, ...]:
        """The minimal open timestamps, in Python's order."""
        return tuple(self.times)

    def __bool__(self) -> bool:
        return bool(self.times)

    def __repr__(self) -> str:
        return f"Frontier{self.elements!r}"


def find_floor(times: list[Product], time: Product) -> Product | None:
    """Return an element of the sorted antichain `times` that is <= `time`, if any.

    With two coordinates the second falls as the first rises, so that only the
    last candidate counts and the cost is a bisection.
    """
    end = bisect_right(times, time)
    if len(time) == 2:
        if end and times[end - 1][1] <= time[1]:
            return times[end - 1]
        return None
    for index in range(end - 1, -1, -1):
        if less_equal(times[index], time):
            return times[index]
    return None


def insert_minimal(times: list[Product], time: Product) -> list[Product]:
    """Insert `time`, which has no floor in `times`; return what it displaces."""
    start = bisect_left(times, time)
    if len(time) == 2:
        stop = start
        while stop < len(times) and times[stop][1] >= time[1]:
            stop += 1
        displaced = times[start:stop]
        times[start:stop] = [time]
        return displaced
    displaced = [later for later in times[start:] if less_equal(time, later)]
    if displaced:
        gone = set(displaced)
        times[start:] = [later for later in times[start:] if later not in gone]
    times.insert(start, time)
    return displaced
