"""Antichains: sets of mutually incomparable elements, fixed or with counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from timelyml.progress.open_times import OpenInts, OpenProducts
from timelyml.progress.timestamp import Timestamp, less_equal, less_than

T = TypeVar("T")


class Antichain(Generic[T]):
    """The minimal ones of the elements inserted so far, in order of insertion.

    >>> Antichain([(1, 5), (2, 0), (2, 7)]).elements
    ((1, 5), (2, 0))
    """

    __slots__ = ("_elements", "_order")

    def __init__(
        self,
        elements: Iterable[T] = (),
        # `Any`: the default orders timestamps; pass Summary.less_equal for summaries.
        order: Callable[[Any, Any], bool] = less_equal,
    ) -> None:
        self._elements: list[T] = []
        self._order = order
        for element in elements:
            self.insert(element)

    def insert(self, element: T) -> bool:
        """Add `element` unless one at or before it is there; return whether it was."""
        order = self._order
        if any(order(present, element) for present in self._elements):
            return False
        self._elements = [
            present for present in self._elements if not order(element, present)
        ]
        self._elements.append(element)
        return True

    def less_equal(self, element: T) -> bool:
        """Whether some member is at or before `element`."""
        return any(self._order(present, element) for present in self._elements)

    def less_than(self, element: T) -> bool:
        """Whether some member is strictly before `element`."""
        return any(
            present != element and self._order(present, element)
            for present in self._elements
        )

    @property
    def elements(self) -> tuple[T, ...]:
        """The members, frozen."""
        return tuple(self._elements)

    def __iter__(self) -> Iterator[T]:
        return iter(self._elements)

    def __len__(self) -> int:
        return len(self._elements)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Antichain):
            return NotImplemented
        return len(self) == len(other) and all(
            element in other.elements for element in self._elements
        )

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"Antichain({self._elements!r})"


class MutableAntichain:
    """A multiset of timestamps that reports how its minimal elements change.

    A count may be negative for a while, because one peer's -1 can overtake
    another's +1; only positive counts hold the frontier back. One instance holds
    timestamps of one depth.

    >>> frontier = MutableAntichain()
    >>> frontier.update([(3, 1), (5, 2)])
    [(3, 1)]
    >>> frontier.update([(3, -1)])
    [(3, -1), (5, 1)]
    """

    __slots__ = ("_counts", "_open")

    def __init__(self) -> None:
        self._counts: dict[Timestamp, int] = {}
        self._open: OpenInts | OpenProducts | None = None

    def update(
        self, changes: Iterable[tuple[Timestamp, int]]
    ) -> list[tuple[Timestamp, int]]:
        """Add each `(time, delta)`; return the frontier's net changes, ascending."""
        counts = self._counts
        opened: dict[Timestamp, int] = {}
        for time, delta in changes:
            before = counts.get(time, 0)
            after = before + delta
            if after:
                counts[time] = after
            else:
                counts.pop(time, None)  # or every past time stays in memory
            if (before > 0) != (after > 0):
                opened[time] = opened.get(time, 0) + (1 if after > 0 else -1)
        if not opened:
            return []
        if self._open is None:
            kind = OpenInts if isinstance(next(iter(opened)), int) else OpenProducts
            self._open = kind()
        return self._open.apply(opened.items())

    def count(self, time: Timestamp) -> int:
        """Return the count of `time`, 0 if it is absent; it may be negative."""
        return self._counts.get(time, 0)

    def less_equal(self, time: Timestamp) -> bool:
        """Whether some time with a positive count is at or before `time`."""
        return any(less_equal(present, time) for present in self.elements)

    def less_than(self, time: Timestamp) -> bool:
        """Whether some time with a positive count is strictly before `time`."""
        return any(less_than(present, time) for present in self.elements)

    @property
    def elements(self) -> tuple[Timestamp, ...]:
        """The minimal times with positive counts, in Python's order."""
        return self._open.frontier.elements if self._open is not None else ()

    @property
    def is_empty(self) -> bool:
        """Whether every count is 0, negative ones included."""
        return not self._counts

    def __bool__(self) -> bool:
        return bool(self.elements)

    def __repr__(self) -> str:
        return f"MutableAntichain({self._counts!r})"
