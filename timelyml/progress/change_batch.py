"""A multiset of signed counts that is put in order only when it is read."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_MIN_PENDING = 32


class ChangeBatch(Generic[K]):
    """Accumulates `(key, delta)`; keys whose deltas cancel leave nothing behind.

    An update is an append; equal keys are merged when the batch is read, or when
    the unmerged ones outnumber the merged ones twice, which makes the memory
    proportional to the distinct keys and the cost of an update constant.

    >>> batch = ChangeBatch([("a", 1), ("b", 2), ("a", -1)])
    >>> batch.items()
    [('b', 2)]
    """

    __slots__ = ("_clean", "_limit", "_pending")

    def __init__(self, changes: Iterable[tuple[K, int]] = ()) -> None:
        self._clean: dict[K, int] = {}
        self._pending: list[tuple[K, int]] = []
        self._limit = _MIN_PENDING
        self.extend(changes)

    def update(self, key: K, delta: int) -> None:
        """Add `delta` to the count of `key`."""
        pending = self._pending
        pending.append((key, delta))
        if len(pending) > self._limit:
            self._compact()

    def extend(self, changes: Iterable[tuple[K, int]]) -> None:
        """Add each `(key, delta)`."""
        self._pending.extend(changes)
        if len(self._pending) > self._limit:
            self._compact()

    def items(self) -> list[tuple[K, int]]:
        """Return each key with its net count where that is not 0, first seen first."""
        self._compact()
        return list(self._clean.items())

    def drain(self) -> list[tuple[K, int]]:
        """Return what `items` returns, and leave the batch empty."""
        changes = self.items()
        self._clean.clear()
        self._limit = _MIN_PENDING
        return changes

    def __len__(self) -> int:
        self._compact()
        return len(self._clean)

    def __bool__(self) -> bool:
        return bool(self._pending or self._clean) and len(self) > 0

    def __repr__(self) -> str:
        return f"ChangeBatch({self.items()!r})"

    def _compact(self) -> None:
        clean = self._clean
        for key, delta in self._pending:
            count = clean.get(key, 0) + delta
            if count:
                clean[key] = count
            else:
                clean.pop(key, None)
        self._pending.clear()
        self._limit = max(_MIN_PENDING, 2 * len(clean))
