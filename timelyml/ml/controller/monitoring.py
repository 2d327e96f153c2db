"""What hosts have, asked of all of them in one epoch of their upkeep. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from timelyml.errors import InvariantError
from timelyml.ml.controller.monitored import AskHosts, HostInfo, Hosts
from timelyml.ml.controller.outbox import Outbox
from timelyml.ml.controller.renewals import Island
from timelyml.ml.hosts import AskHoldings, CarriedOut, Holdings


@dataclass(slots=True)
class _Question:
    """What was asked in an epoch: by which clients and requests, and of which hosts."""

    asked_by: list[tuple[int, int]]
    islands: dict[int, Island]
    found: dict[int, HostInfo] = field(default_factory=dict)

    @property
    def is_answered(self) -> bool:
        """Whether each host has answered, or is gone."""
        return all(
            host in self.found or host in island.dead
            for host, island in self.islands.items()
        )


class Monitor:
    """Answers clients that ask for the state of hosts.

    They need not wait for what goes on in the background on hosts, which may take long:
    an answer comes once each host has obeyed the orders, and not with its epoch's end.

    Args:
        islands: All islands, by their order.
        outbox: Takes questions and answers.
    """

    def __init__(self, islands: Mapping[str, Island], outbox: Outbox) -> None:
        self._islands = islands
        self._outbox = outbox
        self._waiting: list[tuple[int, int]] = []  # clients and requests
        self._questions: dict[int, _Question] = {}  # by epoch

    def handle(self, client: int, message: Any) -> bool:
        """Take what a client asks; return whether it was that."""
        if isinstance(message, AskHosts):
            self._waiting.append((client, message.request))
            return True
        return False

    def step(self) -> None:
        """Answer what can be."""
        for epoch, question in list(self._questions.items()):
            if question.is_answered:
                del self._questions[epoch]
                hosts = tuple(info for _, info in sorted(question.found.items()))
                for client, request in question.asked_by:
                    self._outbox.tell(client, Hosts(request, hosts))

    def ask(self) -> bool:
        """Ask all hosts that are there, if anybody wants to know; all by one epoch."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return False
        epochs = self._outbox.epochs
        islands = {
            host: island
            for island in self._islands.values()
            for host in island.living
            if host in island.present
        }
        self._questions[epochs.next] = _Question(waiting, islands)
        for host in islands:
            epochs.order(host, AskHoldings())
        self.step()  # there may be none
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
        if question := self._questions.get(holdings.epoch):
            question.found[host] = HostInfo(
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
                self._outbox.epochs.num_open_on(host, holdings.epoch),
            )

    def leave(self, client: int) -> None:
        """Answer a client no more."""
        self._waiting = [each for each in self._waiting if each[0] != client]
        for question in self._questions.values():
            question.asked_by = [x for x in question.asked_by if x[0] != client]
