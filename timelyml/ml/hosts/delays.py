"""Messages held back as a slow network would, for experiments only."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Delayed(Generic[T]):
    """What came, until so long afterwards.

    Args:
        delay_s: How long; 0 holds nothing back.
        clock: Seconds.
        wake: Called, from a thread of its own, when something is due: a loop that sleeps
            wakes by itself up to a millisecond late, which may be as long as the delay.

    >>> now = [0.0]
    >>> late = Delayed(1.0, lambda: now[0])
    >>> late.take("a")
    True
    >>> list(late.due()), late.next_due()
    ([], 1.0)
    >>> now[0] = 1.0
    >>> list(late.due()), late.next_due()
    (['a'], None)
    """

    def __init__(
        self,
        delay_s: float,
        clock: Callable[[], float],
        wake: Callable[[], None] | None = None,
    ) -> None:
        self._delay_s = delay_s
        self._clock = clock
        self._held: deque[tuple[float, T]] = deque()
        self._due: SimpleQueue[float] | None = None
        if delay_s and wake is not None:
            self._due = SimpleQueue()
            threading.Thread(
                target=_wake_in_time,
                args=(self._due, clock, wake),
                name="timelyml-delays",
                daemon=True,
            ).start()

    def take(self, message: T) -> bool:
        """Hold a message back; False if it is due at once."""
        if not self._delay_s:
            return False
        due_s = self._clock() + self._delay_s
        self._held.append((due_s, message))
        if self._due is not None:
            self._due.put(due_s)
        return True

    def due(self) -> Iterator[T]:
        """Return those that were held for long enough, in the order in which they came."""
        while self._held and self._held[0][0] <= self._clock():
            yield self._held.popleft()[1]

    def next_due(self) -> float | None:
        """Return when the next one is due."""
        return self._held[0][0] if self._held else None

    def close(self) -> None:
        """End the thread; nothing is held any more."""
        self._held.clear()
        if self._due is not None:
            self._due.put(math.inf)


def _wake_in_time(
    due: SimpleQueue[float], clock: Callable[[], float], wake: Callable[[], None]
) -> None:
    while (due_s := due.get()) < math.inf:
        time.sleep(max(0.0, due_s - clock()))
        wake()
