"""What operators have outside of a run's one thread: wakes from it, and its end."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable

from timelyml.runtime.instance import OperatorInstance
from timelyml.runtime.signals import is_interrupt


class Wakes:
    """Activations asked for by other threads, until the worker takes them."""

    def __init__(self, wake_worker: Callable[[], None]) -> None:
        self._wake_worker = wake_worker
        self._asked: dict[tuple[int, int], None] = {}  # atomic: it needs no lock

    def waker(self, operator: int, shard: int) -> Callable[[], None]:
        """Return what asks for one shard's activation, from any thread."""

        def wake() -> None:
            self._asked[operator, shard] = None
            self._wake_worker()

        return wake

    def take(self) -> Iterable[tuple[int, int]]:
        """Remove and return what was asked for, as (operator, shard)."""
        if not self._asked:
            return ()
        found = sorted(self._asked.copy())
        for asked in found:
            del self._asked[asked]  # one that is asked for anew meanwhile is found too
        return found


def close_outside(instances: Iterable[OperatorInstance]) -> None:
    """Let every operator free what it has; one that fails to is told on stderr."""
    for instance in instances:
        if instance.logic.on_close is None:
            continue
        try:
            instance.logic.on_close()
        except BaseException as error:
            if is_interrupt(error):
                raise
            # The run is over: nobody is left to catch it.
            print(f"operator {instance.name!r} did not close:", file=sys.stderr)  # noqa: T201
            traceback.print_exc()
