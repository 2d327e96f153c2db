"""The one loop that every endpoint runs: step until idle, then wait.

Workers and the controller, in threads and in processes, are driven by it. The
simulator calls the same `step` with its own transport and clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

MAX_WAIT_S = 0.5


class Endpoint(Protocol):
    """Something that is driven: a worker or the controller."""

    def step(self) -> bool:
        """Do what can be done without waiting; True if anything was done."""

    def has_work(self) -> bool:
        """Whether `step` would do something even if nothing arrives."""

    def next_deadline(self) -> float | None:
        """The clock's time at which `step` has to be called again, if any."""


class Waitable(Protocol):
    """The part of a transport that the loop needs."""

    def wait(self, timeout_s: float) -> None:
        """Block until something may have arrived, or the time is over."""


def drive(
    endpoint: Endpoint,
    transport: Waitable,
    should_stop: Callable[[], bool],
    clock: Callable[[], float],
) -> None:
    """Run `endpoint` until `should_stop()`; waits without using a core."""
    while not should_stop():
        endpoint.step()
        if endpoint.has_work():
            continue
        deadline = endpoint.next_deadline()
        wait_s = MAX_WAIT_S if deadline is None else deadline - clock()
        if wait_s > 0:
            transport.wait(min(wait_s, MAX_WAIT_S))
