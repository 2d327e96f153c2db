"""What a host has to tell of launches that are over: nobody waits for most of it.

Each message costs the controller as much as several decisions. What somebody may wait
for is told at once; the rest is told together, while more than that is still ordered
here, so that devices never wait for the controller.
"""

from __future__ import annotations

from collections.abc import Iterable

from timelyml.ml.hosts.messages import Done
from timelyml.ml.hosts.waiting import Over

HOLD_S = 6e-3
"""How long the end of a launch may be kept, for others to be told with it: half of what may
be under way where nobody else waits for a turn. Elsewhere less than that is ordered, which
is told as soon as half of it is over."""


class PendingReports:
    """Launches that are over, in their order, and not told yet.

    >>> pending = PendingReports()
    >>> pending.add([Over(Done(0, 9_000, (), ()), is_awaited=False)], now_s=0.0)
    >>> pending.is_due(num_left=1, now_s=0.0), pending.is_due(num_left=3, now_s=0.0)
    (True, False)
    >>> pending.due_s
    0.006
    >>> [done.sequence for done in pending.take()], pending.due_s
    ([0], None)
    """

    def __init__(self) -> None:
        self.due_s: float | None = None
        """When what is there has to be told."""
        self._done: list[Done] = []
        self._is_awaited = False

    def add(self, over: Iterable[Over], now_s: float) -> None:
        """Keep launches that are over."""
        for each in over:
            self._done.append(each.done)
            self._is_awaited = self._is_awaited or each.is_awaited
        if self._done and self.due_s is None:
            self.due_s = now_s + HOLD_S

    def is_due(self, num_left: int, now_s: float) -> bool:
        """Whether to tell all of it now.

        Args:
            num_left: What is ordered on this host and not over.
            now_s: The time, by the clock of `add`.
        """
        if self.due_s is None:
            return False
        is_late = now_s >= self.due_s
        return is_late or self._is_awaited or len(self._done) >= num_left

    def take(self) -> tuple[Done, ...]:
        """Return all of it, to be told now."""
        done = tuple(self._done)
        self._done.clear()
        self._is_awaited, self.due_s = False, None
        return done
