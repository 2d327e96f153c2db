"""Gauges: the most that was in memory at once of buffers that somebody gave a label."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(slots=True)
class _Group:
    """What is there of a group now, and was at most."""

    items: dict[int, int] = field(default_factory=dict)  # buffers of each, if any
    size_bytes: int = 0
    peak_items: int = 0
    peak_bytes: int = 0


class Gauge:
    """Counts, for each group, items of which any buffer is there, and their bytes.

    >>> gauge = Gauge()
    >>> gauge.enter(0, 5, 100)
    >>> gauge.enter(0, 5, 20)
    >>> gauge.leave(0, 5, 100)
    >>> gauge.enter(0, 6, 30)
    >>> gauge.peaks()
    {0: (2, 120)}
    """

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}

    def enter(self, group: int, item: int, size_bytes: int) -> None:
        """Count a buffer of an item."""
        found = self._groups.get(group)
        if found is None:
            found = self._groups[group] = _Group()
        found.items[item] = found.items.get(item, 0) + 1
        found.size_bytes += size_bytes
        found.peak_items = max(found.peak_items, len(found.items))
        found.peak_bytes = max(found.peak_bytes, found.size_bytes)

    def leave(self, group: int, item: int, size_bytes: int) -> None:
        """Count a buffer no longer that was counted."""
        found = self._groups[group]
        found.size_bytes -= size_bytes
        found.items[item] -= 1
        if not found.items[item]:
            del found.items[item]

    def peaks(self) -> dict[int, tuple[int, int]]:
        """Return the most items and the most bytes there were at once of each group."""
        return {
            group: (found.peak_items, found.peak_bytes)
            for group, found in self._groups.items()
        }


class Label(NamedTuple):
    """Which gauge counts a buffer, and as what."""

    gauge: Gauge
    group: int
    item: int
