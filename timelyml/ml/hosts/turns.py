"""Turns: launches that were let through, one after the other.

One may have to know what was computed before it can be launched, as one on rows how many
there are. Then it waits, and those after it, but not the thread that launches: what ends
the wait may need that thread, to send a peer what the peer's part of it takes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeAlias

import jax

from timelyml.ml.jax_private import is_ready
from timelyml.ml.scheduling import Ticket

PATIENCE_S = 1e-3
"""How long what is mostly computed at once is waited for; then a thread does it."""

Turn: TypeAlias = Iterator[jax.Array]
"""A launch that goes on when asked for the next array that it has to wait for."""


class Turns:
    """Launches tickets in order, each once the one before it is launched.

    Args:
        begin: Returns the turn of a ticket.
        wake: Called, from a thread of its own, when `go_on` has something to do.
    """

    def __init__(
        self, begin: Callable[[Ticket], Turn], wake: Callable[[], None]
    ) -> None:
        self._begin = begin
        self._wake = wake
        self._line: deque[Ticket] = deque()
        self._turn: Turn | None = None  # of the first
        self._pending: jax.Array | None = None  # what it waits for
        self._is_launching = False

    def is_due(self) -> bool:
        """Whether what the first waited for is computed."""
        return self._pending is not None and is_ready(self._pending)

    def take(self, tickets: Iterable[Ticket]) -> None:
        """Launch in order; what comes of a launch meanwhile goes after all of these."""
        self._line.extend(tickets)
        if self._is_launching or self._pending is not None:
            return
        self._is_launching = True
        while self._line and self._is_launched(self._line[0]):
            self._line.popleft()
        self._is_launching = False

    def go_on(self) -> None:
        """Go on with the first if it may."""
        if self.is_due():
            self._pending = None
            self.take(())

    def hurry(self, slices: Collection[str]) -> None:
        """Launch what is first without waiting, as long as it is on these slices."""
        while self._pending is not None and self._line[0].placement in slices:
            self._pending = None
            self.take(())

    def _is_launched(self, ticket: Ticket) -> bool:
        """Launch as much as may be; return whether that is all."""
        if self._turn is None:
            self._turn = self._begin(ticket)
        for pending in self._turn:
            if not _is_soon_ready(pending):
                self._pending = pending
                self._watch(pending)
                return False
        self._turn = None
        return True

    def _watch(self, array: jax.Array) -> None:
        def watch() -> None:
            with contextlib.suppress(Exception):  # the computation's own
                array.block_until_ready()
            self._wake()

        threading.Thread(target=watch, name="timelyml-pending", daemon=True).start()


def _is_soon_ready(array: jax.Array) -> bool:
    until = time.monotonic() + PATIENCE_S
    while not is_ready(array):
        if time.monotonic() > until:
            return False
        time.sleep(0)
    return True
