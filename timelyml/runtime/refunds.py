"""Credit that this worker owes its peers: returned in few messages, but soon.

A block's credit is owed from the moment it leaves the queue. It goes back at once
when much of it has gathered, else within a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

DELAY_S = 0.005
SHARES = 8  # of a channel's credit: one that is owed is much


class Refunds:
    """What one worker owes in one run, by peer and channel."""

    def __init__(self, limit_bytes: int, clock: Callable[[], float]) -> None:
        self._much_bytes = limit_bytes / SHARES
        self._clock = clock
        self._owed: dict[int, dict[int, int]] = {}
        self._since: float | None = None
        self._is_much = False

    def owe(self, peer: int, channel: int, size_bytes: int) -> None:
        """Count a block of `peer` that left the queue."""
        owed = self._owed.setdefault(peer, {})
        owed[channel] = owed.get(channel, 0) + size_bytes
        self._is_much = self._is_much or owed[channel] >= self._much_bytes
        if self._since is None:
            self._since = self._clock()

    def due_at(self) -> float | None:
        """When the oldest debt has to be paid, if there is any."""
        return None if self._since is None else self._since + DELAY_S

    def take_due(self) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
        """Yield (peer, refunds by channel) if it is time, and forget them."""
        due = self.due_at()
        if due is None or not (self._is_much or self._clock() >= due):
            return
        owed, self._owed = self._owed, {}
        self._since = None
        self._is_much = False
        for peer, by_channel in owed.items():
            yield peer, tuple(by_channel.items())
