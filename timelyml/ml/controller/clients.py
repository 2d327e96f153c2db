"""Clients as the schedulers of all islands know them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from timelyml.errors import ConfigError
from timelyml.ml.controller.records import SliceRecord
from timelyml.ml.controller.usage import DeviceTime
from timelyml.ml.controller.work import Work
from timelyml.ml.scheduling import Effect, GangScheduler, Islands

_MAX_NUMBER = 1 << 31


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """What a client asks of the schedulers.

    Attributes:
        weight: Its share of device time, under the policy "share".
        priority: Larger ones go first, under the policy "priority".

    Raises:
        ConfigError: A number makes no sense.
    """

    weight: int = 1
    priority: int = 0

    def __post_init__(self) -> None:
        if not _is_whole(self.weight) or self.weight < 1:
            raise ConfigError(
                f"a client has an impossible weight; got {self.weight!r}; expected a "
                f"whole number of 1 or more; scale all weights up instead",
                option="weight",
            )
        if not _is_whole(self.priority):
            raise ConfigError(
                f"a client has an impossible priority; got {self.priority!r}; expected a "
                f"whole number, of which larger ones go first; correct it",
                option="priority",
            )


class Clients:
    """Clients that are there, with their weights and priorities.

    Args:
        islands: The schedulers of islands, which come and go too.
        device_time: Counts what clients ran.
    """

    def __init__(self, islands: Islands, device_time: DeviceTime) -> None:
        self._islands = islands
        self._device_time = device_time
        self._clients: dict[int, ClientOptions] = {}

    def __contains__(self, client: object) -> bool:
        return client in self._clients

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def join(self, client: int, options: ClientOptions) -> None:
        """Admit a client on all islands."""
        self._clients[client] = options
        self._device_time.join(client, options.weight, options.priority)
        for scheduler in self._islands.schedulers.values():
            scheduler.join(str(client), weight=options.weight)

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

    def is_alone(self, work: Work, slices: Mapping[str, SliceRecord]) -> bool:
        """Whether no other client that is there has wanted the devices of work."""
        for name in work.slices:
            scheduler = self._islands.schedulers.get(slices[name].order)
            if scheduler is None or not scheduler.is_alone(str(work.client), name):
                return False
        return True

    def priority(self, client: int) -> int:
        """Return the priority of what a client runs; 0 once it is gone."""
        found = self._clients.get(client)
        return 0 if found is None else found.priority


def _is_whole(number: object) -> bool:
    if not isinstance(number, int) or isinstance(number, bool):
        return False
    return -_MAX_NUMBER < number < _MAX_NUMBER
