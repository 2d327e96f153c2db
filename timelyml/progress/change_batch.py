"""A multiset of signed counts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class ChangeBatch(Generic[K]):
    """Accumulates `(key, delta)`; keys whose deltas cancel leave nothing behind.

    `counts` has the net count of each key where that is not 0.

    >>> batch = ChangeBatch([("a", 1), ("b", 2), ("a", -1)])
    >>> batch.items()
    [('b', 2)]
    """

    __slots__ = ("counts",)

    def __init__(self, changes: Iterable[tuple[K, int]] = ()) -> None:
        self.counts: dict[K, int] = {}
        self.extend(changes)

    def update(self, key: K, delta: int) -> None:
        """Add `delta` to the count of `key`."""
        counts = self.counts
        count = counts.get(key, 0) + delta
        if count:
            counts[key] = count
        else:
            counts.pop(key, None)

    def extend(self, changes: Iterable[tuple[K, int]]) -> None:
        """Add each `(key, delta)`."""
        for key, delta in changes:
            self.update(key, delta)

    def items(self) -> list[tuple[K, int]]:
        """Return each key with its net count where that is not 0, first seen first."""
        return list(self.counts.items())

    def drain(self) -> list[tuple[K, int]]:
        """Return what `items` returns, and leave the batch empty."""
        counts, self.counts = self.counts, {}
        return list(counts.items())

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:
        return f"ChangeBatch({self.items()!r})"
