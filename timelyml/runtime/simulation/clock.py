"""Simulated time: it moves when the scheduler says so, and a little when read."""

from __future__ import annotations


class SimClock:
    """Seconds of simulated time.

    Every reading moves it by `tick_s`, as real work takes time: with a large tick an
    operator's share of a turn is over after a few batches.
    """

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.tick_s = tick_s

    def __call__(self) -> float:
        """Read the clock."""
        self.now_s += self.tick_s
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds

    def advance_to(self, time_s: float) -> None:
        """Let time pass until `time_s`, unless it is past."""
        self.now_s = max(self.now_s, time_s)
