"""Guests: workers that come and leave while a cluster runs.

A session begins with workers that it needs. Guests come later, and take part in services
and in the runs that are started while they are there: their indices follow those of the
workers and are never used again, each is introduced to all others when it comes, and the
loss of one ends no runs but those that it takes part in.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from timelyml.errors import PeerError, PeerLostError
from timelyml.exchange import (
    CONTROLLER,
    Endpoint,
    Lane,
    LinkFailure,
    Transport,
    Unreadable,
)
from timelyml.runtime.membership import Keeper, Membership
from timelyml.runtime.messages import (
    HANDSHAKE,
    Connect,
    Connected,
    GuestCame,
    Hello,
    LinkLost,
    ServiceMessage,
    Shutdown,
    generation_of,
)
from timelyml.runtime.runs import Runs
from timelyml.runtime.service import ServiceHost


@dataclass(frozen=True, slots=True)
class Invitation:
    """All that a process needs to become a guest; from the cluster, secrets included.

    Attributes:
        worker: Its index.
        token: Of the cluster, in hex.
        bind: Where its transport binds; empty: over tcp, wherever it is.
        controller: The controller's endpoint, as a mapping.
        services: Those of the cluster, as mappings.
        heartbeat_timeout_s: Silence after which peers are given up.
    """

    worker: int
    token: str
    bind: str
    controller: Any
    services: Any
    heartbeat_timeout_s: float


@dataclass(frozen=True, slots=True)
class _Guest:
    """A worker that came later; `process_id` is its own machine's."""

    process_id: int
    endpoint: Endpoint

    def describe(self, index: int) -> str:
        return f"worker {index} (joined, pid {self.process_id})"


class Guests:
    """The controller's side of all guests; owned by the thread that drives it.

    Args:
        transport: The controller's.
        membership: The workers, of which there are so many from the start.
        keeper: Who starts and ends processes, if any are started here.
        suspect: Does something after a moment in which a better reason may come.
        runs: Those that are not over; a loss ends those that the guest takes part in.
    """

    def __init__(
        self,
        transport: Transport,
        membership: Membership,
        keeper: Keeper | None,
        suspect: Callable[[Callable[[], None]], None],
        runs: Runs,
    ) -> None:
        self._first = membership.num_workers
        self._indices = itertools.count(self._first)
        self._transport = transport
        self._membership = membership
        self._keeper = keeper
        self._suspect = suspect
        self._runs = runs
        self._services: ServiceHost | None = None  # until the workers can be reached
        self._invited: set[int] = set()
        self._early: list[tuple[int, Hello]] = []
        self._guests: dict[int, _Guest] = {}

    def __contains__(self, index: object) -> bool:
        return index in self._guests

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._guests))

    @property
    def is_open(self) -> bool:
        """Whether the workers that the session began with have been reached."""
        return self._services is not None

    def invite(self) -> int:
        """Return the index of a guest to come; from any thread."""
        index = next(self._indices)
        self._invited.add(index)
        return index

    def open(self, services: ServiceHost) -> None:
        """Let in who has come, and who comes: the workers can be reached now.

        Services hear what guests say, and who is lost.
        """
        self._services = services
        early, self._early = self._early, []
        for index, hello in early:
            self._welcome(index, hello)

    def handle(self, peer: int, message: object) -> bool:
        """Take a message of a guest; return whether it is from one."""
        if peer not in self._invited and peer not in self._guests:
            return False
        match message:
            case Hello():
                self._on_hello(peer, message)
            case ServiceMessage() if self._services is not None:
                self._services.handle(peer, message)
            case LinkFailure():
                self.lose(peer, f"is gone: {message.reason}")
            case Unreadable() if generation_of(message.message) < 0:
                self.lose(peer, "sent what does not unpickle")
            case LinkLost():
                self._suspect(lambda: self._part(peer, message))
            case Connected():
                pass
            case _:
                return False
        return True

    def lose(self, index: int, what: str) -> None:
        """Forget a guest because of `what`; services hear of it."""
        is_awaited = index in self._invited
        self._invited.discard(index)
        place = self._keeper.place(index) if self._keeper is not None else None
        where, values = self._runs.told(place)
        error = self.lost_error(index, what + where, **values)
        guest = self._guests.pop(index, None)
        if self._keeper is not None:
            self._keeper.kill(index)  # so that it cannot wake up late
        if self._services is None or not (guest or is_awaited):
            return
        self._runs.lose(index, error)
        self._services.lost(index, error)

    def deliver(self, index: int, message: object, lane: Lane) -> None:
        """Send a guest a message; nothing if it is gone."""
        if index not in self._guests:
            return
        with contextlib.suppress(PeerLostError):  # which is about to be reported
            self._transport.send(index, message, lane)

    def start_workers(self, count: int) -> tuple[int, ...]:
        """Start processes that become guests; none where they cannot be started."""
        if self._keeper is None:
            return ()
        indices = tuple(self.invite() for _ in range(count))
        for index in indices:
            self._keeper.spawn(index)
        return indices

    def dismiss(self, index: int, is_at_once: bool = False) -> None:
        """Let a worker leave, or end it: nothing more is expected of it."""
        error = self._let_go(index)
        if not is_at_once:
            self._send(index, Shutdown())
        self._guests.pop(index, None)
        self._invited.discard(index)
        self._runs.lose(index, error)
        if self._keeper is not None and is_at_once:
            self._keeper.kill(index)
        elif self._keeper is not None:
            self._keeper.retire(index)

    def _let_go(self, index: int) -> PeerError:
        what = "was let go"
        if index < self._first:
            return self._membership.lose(index, what)
        return self.lost_error(index, what)

    def _part(self, index: int, lost: LinkLost) -> None:
        """Give up a guest that hears no more of a peer, unless that is gone itself."""
        if lost.peer == CONTROLLER or lost.peer in {
            *self._guests,
            *self._membership.endpoints(),
        }:
            what = f"hears no more of worker {lost.peer}: {lost.reason}"
            self.lose(index, what)

    def lost_error(self, index: int, what: str, **place: Any) -> PeerError:
        """Return the error of a guest that is gone because of `what`.

        `place` tells operator, shard and time, as values of the error.
        """
        guest = self._guests.get(index)
        who = f"worker {index}" if guest is None else guest.describe(index)
        return PeerError(
            f"{who} {what}; got a cluster without it; expected it to "
            f"leave in peace, by SIGTERM; let another join",
            worker=index,
            process_id=None if guest is None else guest.process_id,
            reason=what,
            **place,
        )

    def _on_hello(self, index: int, message: Hello) -> None:
        self._invited.discard(index)
        if message.version != HANDSHAKE or message.endpoint is None:
            return  # it gives up by itself
        if self._services is None:
            self._invited.add(index)
            self._early.append((index, message))
        else:
            self._welcome(index, message)

    def _welcome(self, index: int, message: Hello) -> None:
        """Introduce a guest and all others to each other."""
        self._invited.discard(index)
        assert message.endpoint is not None  # noqa: S101 - checked above
        members = dict(self._membership.endpoints())
        members |= {guest: each.endpoint for guest, each in self._guests.items()}
        self._transport.connect(index, message.endpoint, is_watched=True)
        guest = _Guest(message.process_id, message.endpoint)
        self._guests[index] = guest
        # Before anything that services say of it: on the same lane, so it comes first.
        for other in members:
            self._send(other, GuestCame(index, message.endpoint))
        self._send(index, Connect(_by_index(members)))

    def _send(self, index: int, message: object) -> None:
        with contextlib.suppress(PeerLostError):  # which is about to be reported
            self._transport.send(index, message, Lane.CONTROL)


def _by_index(members: Mapping[int, Endpoint | None]) -> tuple[Endpoint | None, ...]:
    return tuple(
        members.get(index) for index in range(max(members, default=CONTROLLER) + 1)
    )
