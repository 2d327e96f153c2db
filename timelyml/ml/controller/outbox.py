"""What the controller has to say: to hosts, to clients, and about processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from timelyml.exchange import Lane
from timelyml.ml.controller.messages import Finished
from timelyml.ml.controller.upkeep import Epochs
from timelyml.ml.hosts import (
    Cancel,
    CleanUp,
    Expect,
    Export,
    Orders,
    Prepare,
    Run,
)
from timelyml.ml.scheduling import GangKey, Ticket
from timelyml.progress import new_tuple


@dataclass(frozen=True, slots=True)
class ToHost:
    """Send a message to a host."""

    host: int
    body: Any
    lane: Lane = Lane.CONTROL


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Have a host carry out orders in an epoch, after all that it was told before."""

    host: int
    epoch: int
    orders: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ToClient:
    """Send a message to a client."""

    client: int
    body: Any


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Let a host leave, after what was sent to it before.

    Attributes:
        is_at_once: Whether it is ended, as it may not come back from what it runs.
    """

    host: int
    is_at_once: bool = False


@dataclass(frozen=True, slots=True)
class StartHosts:
    """Start processes that take the place of an island, if that can be.

    Attributes:
        order: Of the island before.
        island: Its name.
    """

    order: str
    island: str
    num_hosts: int


Effect: TypeAlias = ToHost | Upkeep | ToClient | Dismiss | StartHosts


class OrderBook:
    """Orders for one host, until they leave as one message."""

    __slots__ = (
        "cancels",
        "dropped",
        "expects",
        "exports",
        "forgets",
        "prepares",
        "releases",
        "returns",
        "runs",
        "spills",
        "tickets",
    )

    def __init__(self) -> None:
        self.returns: list[int] = []
        self.expects: list[Expect] = []
        self.prepares: list[Prepare] = []
        self.runs: list[Run] = []
        self.exports: list[Export] = []
        self.cancels: list[Cancel] = []
        self.forgets: list[GangKey] = []
        self.spills: list[int] = []
        self.releases: list[int] = []
        self.tickets: list[Ticket] = []
        self.dropped: list[str] = []

    def as_message(self) -> Orders:
        """Return all of it as one message."""
        fields = (
            tuple(self.returns),
            tuple(self.expects),
            tuple(self.prepares),
            tuple(self.runs),
            tuple(self.exports),
            tuple(self.cancels),
            tuple(self.forgets),
            tuple(self.spills),
            tuple(self.releases),
            tuple(self.tickets),
            tuple(self.dropped),
        )
        orders: Orders = new_tuple(Orders, fields)
        return orders


class News:
    """What a client hears of calls that are over, until it leaves as one message."""

    __slots__ = ("buffers", "device_ns", "is_alone", "num_calls", "values")

    def __init__(self) -> None:
        self.num_calls = 0
        self.buffers: list[int] = []
        self.values: list[tuple[int, Any]] = []
        self.device_ns = 0
        self.is_alone = True

    def as_message(self) -> Finished:
        """Return all of it as one message."""
        return Finished(
            self.num_calls,
            tuple(self.buffers),
            tuple(self.values),
            self.device_ns,
            self.is_alone,
        )


class Outbox:
    """What follows from events, in order; what a step has for one host leaves together.

    Everything that is sent to a host leaves before its orders of the same step, and what
    is upkeep before all. So upkeep that comes after orders for its host begins another
    part of the step, which leaves after them: a host that is to send a value, and then to
    forget it, would else hear of it in the other order.
    """

    def __init__(self) -> None:
        self.epochs = Epochs()
        self._parts: list[Effect] = []  # of this step, that are complete
        self._effects: list[Effect] = []
        self._books: dict[int, OrderBook] = {}
        self._news: dict[int, News] = {}
        self._muted: set[int] = set()
        self._dismissed: set[int] = set()
        self._is_cleaning = False

    def mute(self, hosts: Iterable[int]) -> None:
        """Say nothing to these hosts any more."""
        for host in hosts:
            self._muted.add(host)
            self.epochs.lose(host)

    def is_muted(self, host: int) -> bool:
        """Whether nothing is said to a host any more."""
        return host in self._muted

    def book(self, host: int) -> OrderBook:
        """Return the orders for a host, to be added to."""
        found = self._books.get(host)
        if found is None:
            found = self._books[host] = OrderBook()
        return found

    def send(self, host: int, body: Any, lane: Lane = Lane.CONTROL) -> None:
        """Send something that is no order."""
        self._effects.append(ToHost(host, body, lane))

    def order(self, host: int, order: Any) -> int:
        """Have a host do something beside launches, after all that it is told so far.

        Returns:
            The epoch of its upkeep.
        """
        if host in self._books:
            self._end_part()
        return self.epochs.order(host, order)

    def dismiss(self, host: int, *, is_at_once: bool = False) -> None:
        """Let a host leave."""
        self._effects.append(Dismiss(host, is_at_once))
        self._dismissed.add(host)
        self.epochs.lose(host)

    def clean_up(self) -> None:
        """Let what this step drops go by upkeep: it is what clients left behind."""
        self._is_cleaning = True

    def start_hosts(self, wanted: StartHosts) -> None:
        """Start processes."""
        self._effects.append(wanted)

    def tell(self, client: int, body: Any) -> None:
        """Tell a client; what calls finished before is told before."""
        self._tell_finished(client)
        self._effects.append(ToClient(client, body))

    def news(self, client: int) -> News:
        """Return what a client hears of calls that are over, to be added to."""
        found = self._news.get(client)
        if found is None:
            found = self._news[client] = News()
        return found

    def flush(self) -> list[Effect]:
        """Return everything, and begin anew."""
        for client in list(self._news):
            self._tell_finished(client)
        self._end_part()
        self._is_cleaning = False
        effects, self._parts = self._parts, []
        if not self._muted:
            return effects
        return [
            each
            for each in effects
            if not (isinstance(each, ToHost | Upkeep) and each.host in self._muted)
        ]

    def _end_part(self) -> None:
        """Let all that follows leave after what there is."""
        if self.epochs:
            self._parts += self._begin_epoch()
        self._parts += self._effects
        self._effects = []
        if self._is_cleaning:
            self._parts += self._clean_up()
        self._parts += [
            ToHost(host, each.as_message()) for host, each in self._books.items()
        ]
        self._books = {}

    def _clean_up(self) -> list[Effect]:
        """Return what is dropped as an epoch of its own, in its place among orders."""
        effects: list[Effect] = []
        for host, book in list(self._books.items()):
            if not (book.releases or book.dropped):
                continue
            self.epochs.order(host, CleanUp(tuple(book.releases), tuple(book.dropped)))
            last = OrderBook()  # what is launched next may need their memory
            last.tickets, book.tickets = book.tickets, []
            book.releases, book.dropped = [], []
            if any(before := book.as_message()):
                effects.append(ToHost(host, before))
            del self._books[host]
            if last.tickets:
                self._books[host] = last
        return effects + (self._begin_epoch() if self.epochs else [])

    def _begin_epoch(self) -> list[Effect]:
        epoch, orders = self.epochs.take(self._muted | self._dismissed)
        return [Upkeep(host, epoch, tuple(each)) for host, each in orders.items()]

    def _tell_finished(self, client: int) -> None:
        news = self._news.pop(client, None)
        if news is not None:
            self._effects.append(ToClient(client, news.as_message()))
