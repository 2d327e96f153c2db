"""Doing things in turn: what comes of one is done after it, not within it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any


class InTurn:
    """Runs actions in the order in which they come, also those that others add.

    A chain of calls that each let the next one go on may be long, and what an action
    finds must not change under its hands.

    >>> turns, done = InTurn(), []
    >>> def count_down(number):
    ...     turns.do(count_down, range(number))
    ...     done.append(number)
    >>> turns.do(count_down, [2])
    >>> done
    [2, 0, 1, 0]
    """

    def __init__(self) -> None:
        self._actions: deque[tuple[Callable[[Any], object], Any]] = deque()
        self._is_running = False

    def do(self, action: Callable[[Any], object], things: Iterable[Any]) -> None:
        """Do something to each: now, or if one is running, after what came before."""
        for thing in things:
            self._actions.append((action, thing))
        if self._is_running:
            return
        self._is_running = True
        try:
            while self._actions:
                act, thing = self._actions.popleft()
                act(thing)
        finally:
            self._is_running = False
