"""The one loop that every endpoint runs: step until idle, then wait.

Workers and the controller, in threads and in processes, are driven by it. The
simulator calls the same `step` with its own transport and clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

MAX_WAIT_S = 0.5
MIN_SPIN_S = 20e-6
SPINS_PER_SHORT_WAIT = 4


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

    def poll(self) -> bool:
        """Whether something may have arrived; if not, others had the core first."""

    def wait(self, timeout_s: float) -> None:
        """Block until something may have arrived, or the time is over."""


class Patience:
    """How long to look again before sleeping: as long as that has been paying.

    A thread that slept takes several times longer to answer, and may be woken on a
    core that another one needs. Looking pays where messages mostly come within a
    quarter of `spin_s`; the odd one may take up to `spin_s`. Where it did not pay, half
    as long is tried the next time, down to nothing, until a wait turns out to have been
    short again.
    """

    def __init__(self, spin_s: float) -> None:
        self._spin_s = spin_s
        self._short_s = spin_s / SPINS_PER_SHORT_WAIT
        self._budget_s = spin_s
        self._began = 0.0  # the present wait
        self._looked_at = 0.0
        self._is_looking = False

    def worked(self, now: float) -> None:
        """Something was done: what it waited for came when it last looked."""
        if self._is_looking:
            self._learn(self._looked_at - self._began)
        self._began = self._looked_at = now
        self._is_looking = self._budget_s > 0

    def goes_on(self, now: float) -> bool:
        """Whether to look once more."""
        if not self._is_looking:
            return False
        if now >= self._began + self._budget_s:
            self._is_looking = False
            self._learn(self._spin_s)
            return False
        self._looked_at = now
        return True

    def slept(self, now: float) -> None:
        """A sleep ended, by a message or by itself."""
        if now - self._began < self._short_s:
            self._budget_s = self._spin_s

    def _learn(self, waited_s: float) -> None:
        if waited_s < self._short_s:
            self._budget_s = self._spin_s
        else:
            self._budget_s = self._budget_s / 2 if self._budget_s > MIN_SPIN_S else 0.0


def drive(
    endpoint: Endpoint,
    transport: Waitable,
    should_stop: Callable[[], bool],
    clock: Callable[[], float],
    *,
    spin_s: float = 0.0,
) -> None:
    """Run `endpoint` until `should_stop()`; waits without using a core.

    Args:
        endpoint: What is driven.
        transport: What wakes it.
        should_stop: Asked before each step.
        clock: Seconds, as in the endpoint's deadlines.
        spin_s: How long it may look for messages before it sleeps, as long as that
            pays; 0 where others need the core.
    """
    patience = Patience(spin_s)
    while not should_stop():
        worked = endpoint.step()
        if endpoint.has_work():
            continue
        now = clock()
        if worked and spin_s:
            patience.worked(now)
        deadline = endpoint.next_deadline()
        until = now + MAX_WAIT_S if deadline is None else deadline
        while now < until and patience.goes_on(now):
            if transport.poll():  # costs a fifth of a step that finds nothing
                break
            now = clock()
        else:
            _sleep(transport, patience, until, clock)


def _sleep(
    transport: Waitable, patience: Patience, until: float, clock: Callable[[], float]
) -> None:
    now = clock()
    if now < until:
        transport.wait(min(until - now, MAX_WAIT_S))
        patience.slept(clock())
