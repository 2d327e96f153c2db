"""Hosts that come while the cluster runs, until they form islands, and those that leave.

An island is formed once, by as many processes as they say themselves: JAX joins the
processes of an island before it is used, so none can be added later. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from timelyml.errors import PeerError
from timelyml.ml.controller.outbox import Outbox
from timelyml.ml.hosts import Arrived, Formed, HostRefused


@dataclass(slots=True)
class _Forming:
    """An island that waits for the rest of its hosts."""

    wanted: Arrived
    hosts: list[int] = field(default_factory=list)


class Arrivals:
    """Forms islands of the hosts that come.

    Args:
        names: Returns the names that islands have, or had.
        add: Makes an island known whose hosts have all come.
        outbox: Takes what hosts are told.
    """

    def __init__(
        self,
        names: Callable[[], Iterable[str]],
        add: Callable[[str, tuple[int, ...]], None],
        outbox: Outbox,
    ) -> None:
        self._names = names
        self._add = add
        self._outbox = outbox
        self._forming: dict[str, _Forming] = {}
        self._guests: set[int] = set()
        self._deadlines: dict[int, float] = {}  # of hosts that leave

    def arrive(self, host: int, message: Arrived) -> None:
        """Take a host that has come; turn away one that fits nowhere."""
        name = message.island or self._new_name()
        forming = self._forming.setdefault(name, _Forming(message))
        shape = message.num_hosts, message.num_devices
        wanted = forming.wanted.num_hosts, forming.wanted.num_devices
        if name in self._names():
            del self._forming[name]
            self._turn_away(
                host,
                f"island {name!r} was formed before; got another host for it; expected "
                f"a new name; bring an island of its own",
            )
            return
        if shape != wanted or message.num_hosts < 1 or message.num_devices < 1:
            self._turn_away(
                host,
                f"island {name!r} is to be formed otherwise; got {shape[0]} hosts of "
                f"{shape[1]} devices; expected {wanted[0]} of {wanted[1]}, as those that "
                f"came before say; start all alike",
            )
            if not forming.hosts:
                del self._forming[name]
            return
        forming.hosts.append(host)
        self._guests.add(host)
        if len(forming.hosts) < message.num_hosts:
            return
        del self._forming[name]
        hosts = tuple(forming.hosts)
        self._add(name, hosts)
        for each in hosts:
            self._outbox.send(each, Formed(name, hosts))

    def lose(self, host: int) -> None:
        """Forget a host that is gone, also one whose island is not formed yet."""
        self._guests.discard(host)
        self._deadlines.pop(host, None)
        for name, forming in list(self._forming.items()):
            if host in forming.hosts:
                forming.hosts.remove(host)
                if not forming.hosts:
                    del self._forming[name]

    def leave(self, host: int, deadline_s: float) -> None:
        """Note until when a host waits for what is on its island."""
        self._deadlines.setdefault(host, deadline_s)

    def leaving(self) -> list[tuple[int, float]]:
        """Return the hosts that would leave, and until when they wait."""
        return list(self._deadlines.items())

    def dismiss(self, hosts: Iterable[int]) -> None:
        """Let those of these hosts leave that came later."""
        for host in hosts:
            if host in self._guests:
                self._outbox.dismiss(host)
                self.lose(host)

    def next_deadline(self) -> float | None:
        """When a host will wait no longer, if ever."""
        return min(self._deadlines.values(), default=None)

    def _turn_away(self, host: int, reason: str) -> None:
        self._outbox.send(host, HostRefused(reason))

    def _new_name(self) -> str:
        taken = {*self._names(), *self._forming}
        number = 0
        while f"island-{number}" in taken:
            number += 1
        return f"island-{number}"


def has_left(host: int, island: str) -> PeerError:
    """Return the error of what is lost with a host that left, as it was asked to."""
    return PeerError(
        f"worker {host} left, and island {island!r} with it; got what still lay there; "
        f"expected it to be let go of, or to move, in time; let it wait longer",
        worker=host,
    )
