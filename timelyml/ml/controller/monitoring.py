"""What hosts have, asked of all of them in one epoch of their upkeep. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timelyml.errors import InvariantError
from timelyml.ml.controller.monitored import AskHosts, HostInfo, Hosts
from timelyml.ml.controller.outbox import Outbox
from timelyml.ml.controller.renewals import Island
from timelyml.ml.hosts import AskHoldings, CarriedOut, Holdings


class Monitor:
    """Answers clients that ask for the state of hosts.

    Args:
        islands: All islands, by their order.
        outbox: Takes questions and answers.
    """

    def __init__(self, islands: Mapping[str, Island], outbox: Outbox) -> None:
        self._islands = islands
        self._outbox = outbox
        self._waiting: list[tuple[int, int]] = []  # clients and requests
        self._found: dict[int, dict[int, HostInfo]] = {}  # by epoch and host
        self._asked: dict[int, list[tuple[int, int]]] = {}  # by epoch

    def handle(self, client: int, message: Any) -> bool:
        """Take what a client asks; return whether it was that."""
        if isinstance(message, AskHosts):
            self._waiting.append((client, message.request))
            return True
        return False

    def ask(self) -> bool:
        """Ask all hosts that are there, if anybody wants to know; all by one epoch."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return False
        epochs = self._outbox.epochs
        epoch = epochs.next
        self._asked[epoch] = waiting
        for island in self._islands.values():
            for host in island.living:
                if host in island.present:
                    epochs.order(host, AskHoldings())
        epochs.when_closed(epoch, lambda: self._answer(epoch))
        if not epochs:
            epochs.take()
        return True

    def heard(self, host: int, island: Island, message: Any) -> None:
        """Take what a host says of its upkeep.

        Raises:
            InvariantError: It is none that a host says.
        """
        match message:
            case CarriedOut():
                self._outbox.epochs.carried_out(host, message.before)
            case Holdings():
                self._note(host, island, message)
            case _:
                raise InvariantError(
                    f"host {host} said what nobody understands; got {message!r:.200}"
                )

    def _note(self, host: int, island: Island, holdings: Holdings) -> None:
        if holdings.epoch in self._asked:
            info = HostInfo(
                host,
                island.name,
                holdings.process_id,
                island.present[host].num_devices,
                holdings.num_slices,
                holdings.num_functions,
                holdings.num_programs,
                holdings.num_buffers,
                holdings.num_launches,
                holdings.epoch,
            )
            self._found.setdefault(holdings.epoch, {})[host] = info

    def leave(self, client: int) -> None:
        """Answer a client no more."""
        self._waiting = [each for each in self._waiting if each[0] != client]
        for epoch, asked in self._asked.items():
            self._asked[epoch] = [each for each in asked if each[0] != client]

    def _answer(self, epoch: int) -> None:
        """Tell what was found, when each host has answered or is gone."""
        found = self._found.pop(epoch, {})
        hosts = tuple(info for _, info in sorted(found.items()))
        for client, request in self._asked.pop(epoch):
            self._outbox.tell(client, Hosts(request, hosts))
