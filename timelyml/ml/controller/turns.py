"""Doing things in turn: what comes of one is done after it, not within it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable


class InTurn:
    """Runs actions in the order in which they come, also those that others add.

    A chain of calls that each let the next one go on may be long, and what an action
    finds must not change under its hands.

    >>> turns, done = InTurn(), []
    >>> first = lambda: (turns.do([lambda: done.append(2)]), done.append(1))
    >>> turns.do([first])
    >>> done
    [1, 2]
    """

    def __init__(self) -> None:
        self._actions: deque[Callable[[], object]] = deque()
        self._is_running = False

    def do(self, actions: Iterable[Callable[[], object]]) -> None:
        """Run actions: now, or if one is running, after those that came before."""
        self._actions.extend(actions)
        if self._is_running:
            return
        self._is_running = True
        try:
            while self._actions:
                self._actions.popleft()()
        finally:
            self._is_running = False
