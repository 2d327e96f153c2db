"""What clients change about devices, islands and where their slices stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from timelyml.errors import PlacementError, TimelyError
from timelyml.ml.controller.buffers import no_such_slice
from timelyml.ml.controller.messages import Acknowledged, Refused
from timelyml.ml.controller.outbox import Outbox
from timelyml.ml.controller.records import SliceRecord
from timelyml.ml.controller.renewals import Island, Renewals
from timelyml.ml.controller.resource_messages import (
    MAX_HOSTS,
    AskDevices,
    ChangeDevices,
    ChangeSlice,
    DeviceInfo,
    Devices,
    ReformIsland,
)
from timelyml.ml.resources import ResourceEffect, ResourceManager, SliceState
from timelyml.runtime.failure import pack_error


@dataclass(frozen=True, slots=True)
class _Change:
    """A client that waits for a change to be over; `is_over` may raise why it will not."""

    client: int
    request: int
    is_over: Callable[[], bool]


class Changes:
    """Begins changes, and answers once they are over.

    Args:
        manager: Gives slices devices.
        slices: All slices.
        islands: All islands, by their order.
        of_host: The island of each host.
        devices: Host and position of each device, by its name.
        renewals: Lets islands form anew.
        follow: Takes what the manager decides.
        outbox: Takes the answers.
    """

    def __init__(
        self,
        manager: ResourceManager,
        *,
        slices: Mapping[str, SliceRecord],
        islands: Mapping[str, Island],
        of_host: Mapping[int, Island],
        devices: Mapping[str, tuple[int, int]],
        renewals: Renewals,
        follow: Callable[[Iterable[ResourceEffect]], None],
        outbox: Outbox,
    ) -> None:
        self._manager = manager
        self._slices = slices
        self._islands = islands
        self._of_host = of_host
        self._devices = devices
        self._renewals = renewals
        self._follow = follow
        self._outbox = outbox
        self._changes: list[_Change] = []

    def handle(self, client: int, message: Any) -> bool:
        """Take what a client says of these things; return whether it was that."""
        match message:
            case ChangeSlice():
                self._try(client, message.request, self._change_slice, message)
            case ChangeDevices():
                self._try(client, message.request, self._change_devices, message)
            case ReformIsland():
                self._try(client, message.request, self._reform, message)
            case AskDevices():
                devices = Devices(message.request, self._describe())
                self._outbox.tell(client, devices)
            case _:
                return False
        return True

    def leave(self, client: int) -> None:
        """Answer a client no more."""
        self._changes = [each for each in self._changes if each.client != client]

    def step(self) -> None:
        """Answer those whose change is over."""
        for change in list(self._changes):
            try:
                if not change.is_over():
                    continue
                self._outbox.tell(change.client, Acknowledged(change.request))
            except TimelyError as error:
                refused = Refused(change.request, pack_error(error))
                self._outbox.tell(change.client, refused)
            self._changes.remove(change)

    def _try(
        self, client: int, request: int, change: Callable[..., Any], message: Any
    ) -> None:
        """Begin a change, and answer once it is over."""
        try:
            is_over = change(client, message)
        except TimelyError as error:
            self._outbox.tell(client, Refused(request, pack_error(error)))
        else:
            self._changes.append(_Change(client, request, is_over))

    def _change_slice(self, client: int, message: ChangeSlice) -> Callable[[], bool]:
        name, manager = message.slice, self._manager
        slice_ = self._slices.get(name)
        if slice_ is None or slice_.client != client or slice_.is_dropped:
            raise no_such_slice(name)
        match message.change:
            case "suspend":
                effects, wanted = manager.suspend(name), SliceState.SUSPENDED
            case "resume":
                effects, wanted = manager.resume(name), SliceState.ACTIVE
            case _:
                effects = manager.migrate(name, island=message.island)
                wanted = SliceState.ACTIVE
        self._follow(effects)
        # Whatever becomes of it is its client's own doing, if it suspends and resumes.
        ends = {wanted, SliceState.ACTIVE, SliceState.SUSPENDED}
        return lambda: manager.state(name) in ends

    def _change_devices(
        self, client: int, message: ChangeDevices
    ) -> Callable[[], bool]:
        names = set(message.devices)
        leaving = {x for x in names & self._devices.keys() if self._is_leaving(x)}
        if message.is_usable and leaving:
            raise PlacementError(
                f"devices cannot be given back; got {sorted(leaving)}, whose hosts leave; "
                f"expected others; see which devices there are",
                devices=sorted(leaving),
            )
        if message.is_usable:
            self._follow(self._manager.restore(names))
            return lambda: True
        if not message.force:
            what = f"devices {sorted(names)} cannot be withdrawn"
            self._refuse_if_shared(client, names, what)
        self._follow(self._manager.withdraw(names))
        return lambda: not self._manager.is_awaited(names)

    def _refuse_if_shared(self, client: int, names: set[str], what: str) -> None:
        """Refuse to take devices from under slices of others."""
        owners = {
            int(request.client)
            for request, _, devices in self._manager.slices()
            if not names.isdisjoint(devices)
        }
        others = sorted(owners - {client})
        if others:
            raise PlacementError(
                f"{what} by client {client}; got slices of clients {others} there; "
                f"expected none but its own; wait until they are gone, or pass force=True",
                client=client,
                clients=others,
            )

    def _is_leaving(self, device: str) -> bool:
        host, _ = self._devices[device]
        return self._of_host[host].is_replaced

    def _reform(self, client: int, message: ReformIsland) -> Callable[[], bool]:
        found = [
            each
            for each in self._islands.values()
            if each.name == message.island and each.present and not each.is_renewing
        ]
        if not found or not 1 <= message.num_hosts <= MAX_HOSTS:
            names = sorted({each.name for each in self._islands.values()})
            raise PlacementError(
                f"island {message.island!r} cannot form anew of {message.num_hosts} "
                f"hosts; got no island of that name that is not forming already, or no "
                f"such number; expected one of {names}, and 1 to {MAX_HOSTS:,} hosts",
                island=message.island,
            )
        island = found[-1]
        if not message.force:
            hosts = island.hosts
            own = {name for name, (host, _) in self._devices.items() if host in hosts}
            what = f"island {message.island!r} cannot form anew"
            self._refuse_if_shared(client, own, what)
        self._renewals.renew(island, message.num_hosts, None)

        def is_over() -> bool:
            if island.order in self._islands and not island.is_renewing:
                raise PlacementError(
                    f"island {island.name!r} cannot form anew; got no new processes; "
                    f"expected a cluster that starts its workers on this machine, and "
                    f"room for them; look at their stderr",
                    island=island.name,
                )
            return island.order not in self._islands

        return is_over

    def _describe(self) -> tuple[DeviceInfo, ...]:
        inventory = self._manager.inventory
        on: dict[str, list[str]] = {}
        for request, _, names in self._manager.slices():
            for name in names:
                on.setdefault(name, []).append(request.name)
        return tuple(
            DeviceInfo(
                each.name,
                each.island,
                each.host,
                each.kind,
                each.memory_bytes,
                each.coordinates,
                inventory.is_usable(each.name),
                tuple(on.get(each.name, ())),
            )
            for each in inventory
        )
