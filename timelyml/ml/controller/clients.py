"""Clients as the schedulers of all islands know them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from timelyml.ml.controller.usage import DeviceTime
from timelyml.ml.scheduling import Effect, GangScheduler, Islands


@dataclass(frozen=True, slots=True)
class _Client:
    """What a client wished to be given of device time."""

    weight: int
    priority: int


class Clients:
    """Clients that are there, with their weights and priorities.

    Args:
        islands: The schedulers of islands, which come and go too.
        device_time: Counts what clients ran.
    """

    def __init__(self, islands: Islands, device_time: DeviceTime) -> None:
        self._islands = islands
        self._device_time = device_time
        self._clients: dict[int, _Client] = {}

    def __contains__(self, client: object) -> bool:
        return client in self._clients

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def join(self, client: int, weight: int, priority: int) -> None:
        """Admit a client on all islands."""
        self._clients[client] = _Client(weight, priority)
        self._device_time.join(client, weight, priority)
        for scheduler in self._islands.schedulers.values():
            scheduler.join(str(client), weight=weight)

    def leave(self, client: int) -> None:
        """Forget a client; what it has waiting is for `drop` to end."""
        del self._clients[client]
        self._device_time.leave(client)

    def drop(self, client: int) -> list[tuple[str, Effect]]:
        """Drop all that a client has waiting on any island."""
        return [
            each
            for island, scheduler in self._islands.schedulers.items()
            for each in self._islands.follow(island, scheduler.leave(str(client)))
        ]

    def add_island(self, island: str, scheduler: GangScheduler) -> None:
        """Make an island known to all clients that are there."""
        self._islands.add(island, scheduler)
        for client, each in self._clients.items():
            scheduler.join(str(client), weight=each.weight)

    def priority(self, client: int) -> int:
        """Return the priority of what a client runs; 0 once it is gone."""
        found = self._clients.get(client)
        return 0 if found is None else found.priority
