"""Upkeep: orders beside launches, in epochs that are closed once all hosts obeyed. Pure.

Here hosts are given their orders; `upkeep_flows.py` brings them there.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


class Epochs:
    """The epochs of all hosts' orders.

    An epoch has what one step of the controller decided, or a part of it. It is closed once
    each host that it has orders for has carried them out, or is gone: then nothing is left
    there anyway.

    Attributes:
        next: The number of the one that is being given its orders.

    >>> epochs = Epochs()
    >>> epochs.order(0, "drop a"), epochs.order(1, "drop b"), epochs.order(1, "drop c")
    (1, 1, 1)
    >>> epochs.take()
    (1, {0: ['drop a'], 1: ['drop b', 'drop c']})
    >>> epochs.carried_out(0, before=2), epochs.num_open
    (None, 1)
    >>> epochs.num_open_on(0, before=2), epochs.num_open_on(1, before=2)
    (0, 1)
    >>> epochs.lose(1), epochs.num_open
    (None, 0)
    """

    def __init__(self) -> None:
        self.next = 1
        self._orders: dict[int, list[Any]] = {}
        self._open: dict[int, set[int]] = {}  # hosts that have not carried them out

    def __bool__(self) -> bool:
        """Whether there are orders to be taken."""
        return bool(self._orders)

    @property
    def num_open(self) -> int:
        """Epochs that were begun and are not closed."""
        return len(self._open)

    def num_open_on(self, host: int, before: int) -> int:
        """How many epochs before one a host has not carried out."""
        return sum(x < before and host in hosts for x, hosts in self._open.items())

    def order(self, host: int, order: Any) -> int:
        """Have a host do something; return the epoch that this belongs to."""
        self._orders.setdefault(host, []).append(order)
        return self.next

    def take(self, without: Collection[int] = ()) -> tuple[int, dict[int, list[Any]]]:
        """Begin the epoch: return its number and orders by host, but of some hosts."""
        epoch = self.next
        self.next += 1
        orders, self._orders = self._orders, {}
        found = {host: each for host, each in orders.items() if host not in without}
        if found:
            self._open[epoch] = set(found)
        return epoch, found

    def carried_out(self, host: int, before: int | None) -> None:
        """Take note that a host has carried out earlier epochs than one; None: all."""
        for epoch in [x for x in self._open if before is None or x < before]:
            self._open[epoch].discard(host)
            if not self._open[epoch]:
                del self._open[epoch]

    def lose(self, host: int) -> None:
        """Wait for nothing of a host any more."""
        self.carried_out(host, None)
