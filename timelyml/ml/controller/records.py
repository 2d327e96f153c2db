"""What the controller knows of slices, buffers and calls, and what it has to say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from timelyml.exchange import Lane
from timelyml.ml.controller.messages import Finished
from timelyml.ml.functions import ArrayType, LogicalMesh, Spec
from timelyml.ml.hosts import (
    Expect,
    Export,
    HeldBox,
    Orders,
    Prepare,
    boxes_by_device,
)
from timelyml.ml.scheduling import GangKey, Ticket


def device_name(host: int, index: int) -> str:
    """Return how the scheduler and the resource manager call a device."""
    return f"{host}:{index}"


@dataclass(slots=True)
class SliceRecord:
    """A virtual slice on its devices.

    Attributes:
        client: Whose it is.
        platform: What JAX calls its devices.
        devices: Host and position on the host of each, in row-major order.
        num_calls: Calls on it that are not over.
        num_buffers: Buffers that lie on it.
        loaded: Identities of the computations that its hosts were told to compile.
        is_dropped: Whether it goes once nothing of it runs.
        error: Pickled, why it cannot be used any more.
    """

    name: str
    client: int
    mesh: LogicalMesh
    island: str
    platform: str
    devices: tuple[tuple[int, int], ...]
    num_calls: int = 0
    num_buffers: int = 0
    loaded: set[str] = field(default_factory=set)
    is_dropped: bool = False
    error: bytes | None = None

    @property
    def hosts(self) -> tuple[int, ...]:
        """The hosts that have devices of it, in order."""
        return tuple(dict.fromkeys(host for host, _ in self.devices))

    @property
    def devices_by_host(self) -> dict[str, tuple[str, ...]]:
        """Names of devices by the name of their host, as the scheduler has them."""
        found: dict[str, tuple[str, ...]] = {}
        for host, index in self.devices:
            found[str(host)] = (*found.get(str(host), ()), device_name(host, index))
        return found

    def held(self, spec: Spec, shape: tuple[int, ...]) -> list[HeldBox]:
        """Return who holds which box of an array that lies here so."""
        boxes = boxes_by_device(self.mesh, spec, shape)
        hosts = (host for host, _ in self.devices)
        return [HeldBox(host, box) for host, box in zip(hosts, boxes, strict=True)]


class State(Enum):
    """How far a buffer is."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"


@dataclass(slots=True)
class BufferRecord:
    """A logical buffer, whatever the number of its shards.

    Attributes:
        client: Whose it is; 0 of those that only a transfer needs.
        error: Pickled, if it failed.
        producer: Name of the call that makes it.
        num_uses: Calls under way that make or take it, and fetches of it.
        num_exports: Those of them that read it on the host, at a time of their own.
        is_held: Whether its client may still ask for it.
    """

    buffer: int
    client: int
    slice: str
    type: ArrayType
    spec: Spec
    state: State
    error: bytes | None = None
    producer: str | None = None
    num_uses: int = 0
    num_exports: int = 0
    is_held: bool = True

    @property
    def is_unused(self) -> bool:
        """Whether nobody will ever ask for it."""
        return not self.is_held and self.num_uses == 0


@dataclass(slots=True)
class CallRecord:
    """A call that is not over.

    Attributes:
        uses: Every buffer that it keeps alive.
        exported: Those of them that are sent elsewhere for it.
        num_waits: Calls that have to be ordered before it can be.
        dependants: Calls that may be ordered once this one is, and their slot for it.
        error: Pickled, what the first host that failed reported.
        values: Small results.
    """

    program: str
    client: int
    slice: str
    uses: tuple[BufferRecord, ...]
    exported: tuple[BufferRecord, ...]
    outs: tuple[int, ...]
    is_ordered: bool = False
    num_waits: int = 0
    dependants: list[tuple[str, int]] = field(default_factory=list)
    error: bytes | None = None
    values: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToHost:
    """Send a message to a host."""

    host: int
    body: Any
    lane: Lane = Lane.CONTROL


@dataclass(frozen=True, slots=True)
class ToClient:
    """Send a message to a client."""

    client: int
    body: Any


Effect: TypeAlias = ToHost | ToClient


@dataclass(slots=True)
class OrderBook:
    """Orders for one host, until they leave as one message."""

    expects: list[Expect] = field(default_factory=list)
    prepares: list[Prepare] = field(default_factory=list)
    exports: list[Export] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)
    forgets: list[GangKey] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def as_message(self) -> Orders:
        """Return all of it as one message."""
        return Orders(
            tuple(self.expects),
            tuple(self.prepares),
            tuple(self.exports),
            tuple(self.tickets),
            tuple(self.forgets),
            tuple(self.releases),
            tuple(self.dropped),
        )


class Outbox:
    """What follows from events, in order; orders of one step leave as one message.

    Everything that is sent to a host leaves before the orders of the same step.
    """

    def __init__(self) -> None:
        self._effects: list[Effect] = []
        self._books: dict[int, OrderBook] = {}
        self._finished: dict[int, Finished] = {}
        self._muted: set[int] = set()

    def mute(self, hosts: Iterable[int]) -> None:
        """Say nothing to these hosts any more."""
        self._muted.update(hosts)

    def book(self, host: int) -> OrderBook:
        """Return the orders for a host, to be added to."""
        found = self._books.get(host)
        if found is None:
            found = self._books[host] = OrderBook()
        return found

    def send(self, host: int, body: Any, lane: Lane = Lane.CONTROL) -> None:
        """Send something that is no order."""
        self._effects.append(ToHost(host, body, lane))

    def tell(self, client: int, body: Any) -> None:
        """Tell a client; what calls finished before is told before."""
        self._tell_finished(client)
        self._effects.append(ToClient(client, body))

    def finished(
        self, client: int, buffers: tuple[int, ...], values: dict[int, Any]
    ) -> None:
        """Tell a client that a call is over, together with others."""
        before = self._finished.get(client, Finished(0, (), ()))
        self._finished[client] = Finished(
            before.num_calls + 1,
            before.buffers + buffers,
            before.values + tuple(values.items()),
        )

    def flush(self) -> list[Effect]:
        """Return everything, and begin anew."""
        for client in list(self._finished):
            self._tell_finished(client)
        effects = self._effects
        effects += [
            ToHost(host, each.as_message()) for host, each in self._books.items()
        ]
        self._effects, self._books = [], {}
        if not self._muted:
            return effects
        return [
            each
            for each in effects
            if not (isinstance(each, ToHost) and each.host in self._muted)
        ]

    def _tell_finished(self, client: int) -> None:
        finished = self._finished.pop(client, None)
        if finished is not None:
            self._effects.append(ToClient(client, finished))
