"""The gate of a host: launches happen in the island's order, or not at all."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from timelyml.errors import LaunchOrderError
from timelyml.ml.scheduling.values import MAX_UNFINISHED, GangKey, Grant
from timelyml.progress import new_tuple


class Ticket(NamedTuple):
    """A grant as one host sees it; it knows which of its devices the placement has."""

    generation: int
    position: int
    sequence: int
    key: GangKey
    placement: str


def tickets_of(grant: Grant) -> dict[str, Ticket]:
    """Return what to tell each host of a gang."""
    generation, sequence, key, _, placement, positions, _ = grant
    found: dict[str, Ticket] = {}
    for host, position in positions:
        fields = generation, position, sequence, key, placement
        found[host] = new_tuple(Ticket, fields)
    return found


class LaunchGate:
    """Lets a host's gangs through one by one, strictly in the order of the island.

    A gang is launched when it is its turn and the host has prepared it: executable at
    hand, memory reserved, inputs there or promised. Preparation may come before or after
    the ticket, in any order. Until the first in line is prepared, all wait: what another
    host launches in that order must meet the same here.

    The scheduler keeps the number of unfinished launches low; the gate holds back what
    would exceed it, so that no mistake elsewhere can hang XLA.

    >>> gate = LaunchGate("host", generation=0)
    >>> first, second = GangKey("p", 0, 0), GangKey("p", 1, 0)
    >>> gate.prepare(second)
    ()
    >>> gate.admit([Ticket(0, 0, 5, first, "s"), Ticket(0, 1, 9, second, "s")])
    ()
    >>> [ticket.sequence for ticket in gate.prepare(first)]
    [5, 9]
    """

    def __init__(
        self, host: str, *, generation: int, max_unfinished: int = MAX_UNFINISHED
    ) -> None:
        self._host = host
        self._generation = generation
        self._max_unfinished = max_unfinished
        self._next_position = 0
        self._last_sequence = -1
        self._line: deque[Ticket] = deque()
        self._prepared: set[GangKey] = set()
        self._unfinished: dict[int, Ticket] = {}
        self._weights: dict[GangKey, int] = {}
        self._num_unfinished: dict[str, int] = {}
        self._devices: dict[str, tuple[str, ...]] = {}

    def place(self, placement: str, devices: Iterable[str]) -> None:
        """Say which devices of this host a placement has; else it stands for one."""
        self._devices[placement] = tuple(devices)

    def unplace(self, placement: str) -> None:
        """Forget a placement of which nothing is launched any more."""
        self._devices.pop(placement, None)

    def admit(self, tickets: Iterable[Ticket]) -> tuple[Ticket, ...]:
        """Take tickets as they come from the scheduler; return what to launch now.

        Raises:
            LaunchOrderError: One is missing, doubled, out of order or of another
                generation; the host must not launch anything any more.
        """
        for ticket in tickets:
            self._check(ticket)
            self._next_position += 1
            self._last_sequence = ticket.sequence
            self._line.append(ticket)
        return self._launch()

    def weigh(self, key: GangKey, num_launches: int) -> None:
        """Note that a gang is several launches, which have one place in the order."""
        if num_launches > 1:
            self._weights[key] = num_launches

    def prepare(self, key: GangKey) -> tuple[Ticket, ...]:
        """Note that a gang could be launched; return what to launch now, in order."""
        self._prepared.add(key)
        return self._launch()

    def finish(self, sequence: int) -> tuple[Ticket, ...]:
        """Note that a launch is over; return what to launch now."""
        ticket = self._unfinished.pop(sequence, None)
        if ticket is None:
            raise LaunchOrderError(
                f"host {self._host!r} ends a launch that it did not begin; got sequence "
                f"{sequence}; expected one of {list(self._unfinished)[:8]}",
                host=self._host,
            )
        weight = self._weights.pop(ticket.key, 1)
        for device in self._devices_of(ticket):
            self._num_unfinished[device] -= weight
        return self._launch()

    def forget(self, key: GangKey) -> None:
        """Drop the preparation of a gang that will not be ordered."""
        self._prepared.discard(key)
        self._weights.pop(key, None)

    @property
    def num_ordered(self) -> int:
        """Gangs that it was given and that are not over."""
        return len(self._line) + len(self._unfinished)

    def awaited(self) -> Ticket | None:
        """Return the gang that is next and not prepared, which holds up the rest."""
        if self._line and self._line[0].key not in self._prepared:
            return self._line[0]
        return None

    def _check(self, ticket: Ticket) -> None:
        expected = self._generation, self._next_position
        is_next = (ticket.generation, ticket.position) == expected
        if is_next and ticket.sequence > self._last_sequence:
            return
        raise LaunchOrderError(
            f"host {self._host!r} is told to launch out of order; got generation "
            f"{ticket.generation}, position {ticket.position}, sequence "
            f"{ticket.sequence}; expected generation {self._generation}, position "
            f"{self._next_position}, a sequence above {self._last_sequence}",
            host=self._host,
            position=ticket.position,
            expected=self._next_position,
        )

    def _launch(self) -> tuple[Ticket, ...]:
        launched = []
        while self._line and self._may_launch(self._line[0]):
            ticket = self._line.popleft()
            self._prepared.discard(ticket.key)
            self._unfinished[ticket.sequence] = ticket
            weight = self._weights.get(ticket.key, 1)
            for device in self._devices_of(ticket):
                count = self._num_unfinished.get(device, 0)
                self._num_unfinished[device] = count + weight
            launched.append(ticket)
        return tuple(launched)

    def _may_launch(self, ticket: Ticket) -> bool:
        if ticket.key not in self._prepared:
            return False
        # What is heavier than all that may be under way goes when nothing is.
        most = max(0, self._max_unfinished - self._weights.get(ticket.key, 1))
        counts = map(self._num_unfinished.get, self._devices_of(ticket))
        return all(not count or count <= most for count in counts)

    def _devices_of(self, ticket: Ticket) -> tuple[str, ...]:
        return self._devices.get(ticket.placement) or (ticket.placement,)
