"""What threads of a host have said to the one that launches, until it listens."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from timelyml.ml.hosts.waiting import Said


class Mailbox:
    """Takes what is said, in any thread; one thread owns it and listens.

    Args:
        wake: Called, from any other thread, when there is something to hear. Who owns
            it looks for itself before it sleeps, so it is not woken by its own words.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._said: deque[Said] = deque()
        self._lock = threading.Lock()
        self._owner = 0

    def __bool__(self) -> bool:
        return bool(self._said)

    def say(self, said: Said) -> None:
        """Say something; from any thread."""
        with self._lock:
            self._said.append(said)
            is_first = len(self._said) == 1
        # Else whoever came before has woken it.
        if is_first and threading.get_ident() != self._owner:
            self._wake()

    def own(self) -> None:
        """Let the thread that calls be the one that listens."""
        self._owner = threading.get_ident()

    def next(self) -> Said:
        """Return what was said first."""
        return self._said.popleft()
