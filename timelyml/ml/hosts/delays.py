"""Messages held back as a slow network would, for experiments only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Delayed(Generic[T]):
    """What came, until so long afterwards.

    Args:
        delay_s: How long; 0 holds nothing back.
        clock: Seconds.

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

    def __init__(self, delay_s: float, clock: Callable[[], float]) -> None:
        self._delay_s = delay_s
        self._clock = clock
        self._held: deque[tuple[float, T]] = deque()

    def take(self, message: T) -> bool:
        """Hold a message back; False if it is due at once."""
        if self._delay_s:
            self._held.append((self._clock() + self._delay_s, message))
        return bool(self._delay_s)

    def due(self) -> Iterator[T]:
        """Return those that were held for long enough, in the order in which they came."""
        while self._held and self._held[0][0] <= self._clock():
            yield self._held.popleft()[1]

    def next_due(self) -> float | None:
        """Return when the next one is due."""
        return self._held[0][0] if self._held else None
