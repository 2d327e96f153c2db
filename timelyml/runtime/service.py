"""Services: what other packages add to every worker and to the controller.

A service has two halves, one in each worker and one beside the controller. They are
stepped by the loops that step everything else, and talk over the same transport, in
any direction. What a service is for is its own business; the runtime starts it, gives
it turns, tells it who is lost, and closes it.

A service answers for what its users do. What it raises itself is a bug, and ends the
worker, or the session, that it belongs to, as a bug of the runtime would.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

from timelyml.errors import ConfigError, InvariantError, PeerError, TimelyError
from timelyml.exchange import Lane
from timelyml.graph import Graph
from timelyml.runtime.effects import Effect
from timelyml.runtime.messages import ServiceMessage


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A service, by names that every process of a cluster can import.

    Attributes:
        name: Addresses its messages.
        worker: `package.module:name` of what makes the half in a worker, given a
            `ServiceSite`.
        controller: The same for the half beside the controller.
        messages: `package.module:name` of a tuple of message classes, which travel
            as those of the runtime do; bodies of other kinds travel as user values.
        options: Values that JSON can hold, for both halves.
    """

    name: str
    worker: str
    controller: str
    messages: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_map(self) -> dict[str, Any]:
        """Return the specification as JSON can hold it."""
        return asdict(self)


class Service(Protocol):
    """One half of a service; owned by the thread that drives its endpoint."""

    def joined(self) -> None:
        """Every worker can be reached from now on. Called once, before any message."""

    def handle(self, peer: int, body: Any) -> None:
        """Take a message of the same service from a worker or the controller."""

    def step(self) -> bool:
        """Do what can be done without waiting; True if anything was done."""

    def has_work(self) -> bool:
        """Whether `step` would do something even if nothing arrives."""

    def next_deadline(self) -> float | None:
        """The clock's time at which `step` has to be called again, if any."""

    def lost(self, peer: int, error: PeerError) -> None:
        """Hear that nothing will come from a peer any more, or reach it."""

    def close(self, error: TimelyError | None) -> None:
        """Free everything; nothing is called afterwards. `error` says why, if told."""


Send = Callable[[int, object, Lane], None]


class OwnRun(Protocol):
    """A dataflow that a service runs; for the thread that drives it."""

    generation: int

    def send(self, name: str, shard: int, epoch: int, records: list[object]) -> None:
        """Send records to a shard of an input at an epoch, which never falls."""

    def advance_to(self, name: str, epoch: int) -> None:
        """Promise that an input brings nothing before an epoch any more."""

    def cancel(self) -> None:
        """Give it up."""


RunFlow = Callable[[Graph, Sequence[int], Callable[[Effect], None]], OwnRun]


def _run_nothing(
    graph: Graph, workers: Sequence[int], hear: Callable[[Effect], None]
) -> OwnRun:
    del workers, hear
    raise InvariantError(f"only the half beside the controller runs {graph.name!r}")


@dataclass(frozen=True, slots=True)
class ServiceSite:
    """Where one half of a service runs, and what it may use there.

    Attributes:
        index: The worker's, or `CONTROLLER`.
        send: Sends a body to the other halves: peer, body, lane. Never blocks; does
            nothing for a peer that is lost. Arrays inside must not change any more.
        wake: Lets the endpoint take a step soon; from any thread.
        clock: Monotonic seconds.
        options: Those of the specification.
        dismiss: Beside the controller, lets a worker leave for good, or if the second
            argument says so, ends it at once.
        start_workers: Beside the controller, starts so many workers more, which join
            later; returns their indices, or none where they cannot be started.
        run: Beside the controller, runs a dataflow on some workers: what its operators
            send and how far its probes are comes as effects, and `Ended` last. It is
            sent to at once, and gets that once it runs.
    """

    index: int
    send: Send
    wake: Callable[[], None]
    clock: Callable[[], float]
    options: Mapping[str, Any]
    dismiss: Callable[[int, bool], None] = lambda *_: None
    start_workers: Callable[[int], tuple[int, ...]] = lambda _: ()
    run: RunFlow = _run_nothing


class ServiceHost:
    """The services of one endpoint, by name.

    Args:
        specs: The services of the cluster.
        half: Which half is made: `worker` or `controller`.
        index: The endpoint's.
        send: Sends a message of the runtime; does nothing for a peer that is lost.
        wake: Ends the wait of the endpoint's loop; from any thread.
        clock: Monotonic seconds.
        dismiss: Lets a worker leave for good.
        start_workers: Starts more workers, which join later.
        run: Runs a dataflow on some workers.
    """

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        half: str,
        *,
        index: int,
        send: Send,
        wake: Callable[[], None],
        clock: Callable[[], float],
        dismiss: Callable[[int, bool], None] = lambda *_: None,
        start_workers: Callable[[int], tuple[int, ...]] = lambda _: (),
        run: RunFlow = _run_nothing,
    ) -> None:
        self._services: dict[str, Service] = {}
        self._early: list[tuple[int, ServiceMessage]] | None = []
        self._is_closed = False
        for spec in specs:
            say = partial(_send, send, spec.name)
            site = ServiceSite(
                index, say, wake, clock, spec.options, dismiss, start_workers, run
            )
            make = import_name(getattr(spec, half))
            self._services[spec.name] = make(site)

    def __iter__(self) -> Iterator[Service]:
        return iter(() if self._is_closed else self._services.values())

    def get(self, name: str) -> Any:
        """Return the half of a service that is here.

        Raises:
            ConfigError: The cluster has no such service.
        """
        if name not in self._services:
            raise ConfigError(
                f"there is no service {name!r}; got it; expected one of "
                f"{sorted(self._services)}; name it when the cluster is made",
                option="services",
            )
        return self._services[name]

    def joined(self) -> None:
        """Tell all that messages can be sent, and hand over those that came before."""
        early, self._early = self._early or [], None
        for service in self:
            service.joined()
        for peer, message in early:
            self.handle(peer, message)

    def handle(self, peer: int, message: ServiceMessage) -> None:
        """Hand a message over; one that comes after the end is dropped.

        Peers need not join at the same moment: what comes before waits.
        """
        if self._is_closed:
            return
        if self._early is not None:
            self._early.append((peer, message))
            return
        service = self._services.get(message.service)
        if service is None:
            raise InvariantError(
                f"peer {peer} speaks to a service that is not here; got "
                f"{message.service!r}; expected one of {sorted(self._services)}; "
                "report it, as this is a bug"
            )
        service.handle(peer, message.body)

    def step(self) -> bool:
        """Give each a turn; True if any did anything."""
        worked = False
        if self._services:  # most have none, and are asked at every step
            for service in self:
                worked = service.step() or worked
        return worked

    def has_work(self) -> bool:
        """Whether any has."""
        return bool(self._services) and any(each.has_work() for each in self)

    def deadlines(self) -> list[float]:
        """Return those that there are."""
        if not self._services:
            return []
        found = (service.next_deadline() for service in self)
        return [deadline for deadline in found if deadline is not None]

    def lost(self, peer: int, error: PeerError) -> None:
        """Tell all that a peer is gone."""
        for service in self:
            service.lost(peer, error)

    def close(self, error: TimelyError | None = None) -> None:
        """Close all, the last first; closing twice changes nothing."""
        services = list(self)
        self._is_closed = True
        for service in reversed(services):
            service.close(error)


def no_service(name: str) -> Any:
    """Refuse to return a service, where there is none.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(
        f"there is no service {name!r}; got a worker without any; expected one of its "
        "cluster; name it when the cluster is made",
        option="services",
    )


def message_types(specs: Sequence[ServiceSpec]) -> list[type]:
    """Return the message classes of services, in the same order everywhere."""
    return [
        cls
        for spec in specs
        if spec.messages is not None
        for cls in import_name(spec.messages)
    ]


def import_name(path: str) -> Any:
    """Return what `package.module:name` names.

    Raises:
        ConfigError: There is no such thing.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"part of a service cannot be imported; got {path!r} ({error}); expected "
            "package.module:name of something that every process can import",
            option="services",
        ) from error


def _send(send: Send, name: str, peer: int, body: object, lane: Lane) -> None:
    send(peer, ServiceMessage(name, body), lane)
