"""Islands and their devices, and the slices of clients that stand on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from timelyml.errors import SliceError, TimelyError
from timelyml.ml.controller.buffers import Buffers, no_such_slice
from timelyml.ml.controller.code import Code
from timelyml.ml.controller.dispatching import Dispatch
from timelyml.ml.controller.estate import (
    AskDevices,
    ChangeDevices,
    ChangeSlice,
    DeviceInfo,
    Devices,
)
from timelyml.ml.controller.messages import (
    Acknowledged,
    AskSlice,
    Refused,
    SliceGiven,
)
from timelyml.ml.controller.moves import Moves
from timelyml.ml.controller.records import Outbox, SliceRecord, device_name
from timelyml.ml.functions import LogicalMesh
from timelyml.ml.hosts import Present, SliceMade
from timelyml.ml.resources import (
    Device,
    Granted,
    Prepare,
    Released,
    Remapped,
    ResourceEffect,
    ResourceManager,
    SliceRequest,
    SliceState,
    TimedOut,
    Vacate,
)
from timelyml.runtime.failure import pack_error


@dataclass(slots=True)
class Island:
    """The processes of an island.

    Attributes:
        name: As clients know it.
        order: Of its scheduler.
        hosts: In the order of their ranks.
        present: Those that have come, with what they have.
        is_awaited: Whether requests wait until it is there.
        error: Why it is lost, if so.
    """

    name: str
    order: str
    hosts: tuple[int, ...]
    is_awaited: bool
    present: dict[int, Present] = field(default_factory=dict)
    error: TimelyError | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every host has come, or none will."""
        return self.error is not None or len(self.present) == len(self.hosts)


@dataclass(frozen=True, slots=True)
class _Change:
    """A client that waits for a change to be over; `is_over` may raise why it will not."""

    client: int
    request: int
    is_over: Callable[[], bool]


class Places:
    """Gives slices devices, and others when devices come and go.

    Args:
        memory_bytes: What buffers and temporaries may take on a device.
        host_memory_bytes: What a host may keep of what left its devices; None: all.
        slices: Filled here.
        buffers: What lies on slices.
        dispatch: What runs on them.
        code: What is compiled for them.
        outbox: Takes what follows.
    """

    def __init__(
        self,
        memory_bytes: int,
        host_memory_bytes: int | None,
        *,
        slices: dict[str, SliceRecord],
        buffers: Buffers,
        dispatch: Dispatch,
        code: Code,
        outbox: Outbox,
    ) -> None:
        self.manager = ResourceManager()
        self._islands: dict[str, Island] = {}
        self._of_host: dict[int, Island] = {}
        self._memory_bytes = memory_bytes
        self._host_memory_bytes = host_memory_bytes
        self._slices = slices
        self._buffers = buffers
        self._dispatch = dispatch
        self._outbox = outbox
        self._moves = Moves(
            self.manager,
            slices=slices,
            buffers=buffers,
            dispatch=dispatch,
            code=code,
            outbox=outbox,
            follow=self.follow,
            living=self._living,
        )
        self._devices: dict[str, tuple[int, int]] = {}  # host and position, by name
        self._waiting: list[tuple[int, AskSlice]] = []  # until all hosts are there
        self._asked: dict[str, tuple[int, AskSlice]] = {}  # until devices are given
        self._changes: list[_Change] = []
        self._numbers = itertools.count(1)

    @property
    def is_complete(self) -> bool:
        """Whether every host has come, or is lost."""
        islands = self._islands.values()
        return all(each.is_complete for each in islands if each.is_awaited)

    def names(self) -> list[str]:
        """Return the names of all islands, also of those that are lost."""
        return list(self._islands)

    def add(self, name: str, hosts: Sequence[int], *, is_awaited: bool) -> None:
        """Make an island known, with its hosts in the order of their ranks."""
        island = Island(name, name, tuple(hosts), is_awaited)
        self._islands[name] = island
        self._of_host.update(dict.fromkeys(hosts, island))

    def island_of(self, host: int) -> Island | None:
        """Return the island that a host belongs to, if it does."""
        return self._of_host.get(host)

    def withdraw(self, island: Island) -> None:
        """Let slices leave an island, and give nobody its devices any more."""
        at = island.hosts
        names = [name for name, (host, _) in self._devices.items() if host in at]
        self.follow(self.manager.withdraw(names))

    def welcome(self, host: int, present: Present, now_s: float) -> None:
        """Take note of a host; once all of its island are there, of their devices."""
        island = self._of_host[host]
        island.present[host] = present
        if not island.is_complete:
            return
        devices = {each: self._devices_of(each, island) for each in island.hosts}
        self._open_accounts(island)  # before anybody is given them
        for each, own in devices.items():
            self.follow(self.manager.add_host(str(each), own))
        self.answer(now_s)

    def _devices_of(self, host: int, island: Island) -> list[Device]:
        present = island.present[host]
        first = island.hosts.index(host) * present.num_devices
        devices = []
        for index in range(present.num_devices):
            name = device_name(host, index)
            self._devices[name] = host, index
            of = name, island.name, str(host), present.kind
            devices.append(Device(*of, self._memory_bytes, (first + index,)))
        return devices

    def handle(self, client: int, message: Any, now_s: float) -> bool:
        """Take what a client says of slices and devices; return whether it was that."""
        match message:
            case AskSlice():
                self._waiting.append((client, message))
                self.answer(now_s)
            case ChangeSlice():
                self._try(client, message.request, self._change_slice, message)
            case ChangeDevices():
                self._try(client, message.request, self._change_devices, message)
            case AskDevices():
                devices = Devices(message.request, self._describe())
                self._outbox.tell(client, devices)
            case _:
                return False
        return True

    def leave(self, client: int) -> None:
        """Forget what a client asked for."""
        self._waiting = [each for each in self._waiting if each[0] != client]
        self._changes = [each for each in self._changes if each.client != client]
        for name in [name for name, (who, _) in self._asked.items() if who == client]:
            del self._asked[name]
            self.follow(self.manager.release(name))

    def answer(self, now_s: float) -> None:
        """Take requests for slices, once it is known what there is."""
        if not self.is_complete:
            return
        waiting, self._waiting = self._waiting, []
        for client, message in waiting:
            name = f"slice-{next(self._numbers)}"
            shape = tuple(zip(message.axis_names, message.axis_sizes, strict=True))
            self._asked[name] = client, message
            try:
                request = SliceRequest(
                    str(client),
                    name,
                    shape,
                    message.kind,
                    message.island,
                    message.memory_bytes,
                )
                effects = self.manager.request(request, now_s, message.timeout_s)
            except SliceError as error:
                self._refuse(name, error)
            else:
                self.follow(effects)

    def step(self) -> None:
        """Go on with slices that move, and tell those who wait for it."""
        self._moves.step()
        for change in list(self._changes):
            try:
                if not change.is_over():
                    continue
                self._outbox.tell(change.client, Acknowledged(change.request))
            except TimelyError as error:
                refused = Refused(change.request, pack_error(error))
                self._outbox.tell(change.client, refused)
            self._changes.remove(change)

    def follow(self, effects: Iterable[ResourceEffect]) -> None:
        """Do what the resource manager decided."""
        for effect in effects:
            match effect:
                case Granted():
                    self._give(effect.slice, effect.devices)
                case TimedOut():
                    self._refuse(effect.slice, effect.error)
                case Prepare():
                    self._prepare(effect)
                case Vacate():
                    self._moves.vacate(effect)
                case Remapped():
                    self._moves.arrive(effect)
                case Released():
                    self._moves.stop(effect.slice)

    def _living(self, hosts: Iterable[int]) -> list[int]:
        return [host for host in hosts if self._of_host[host].error is None]

    def _open_accounts(self, island: Island) -> None:
        """Count memory from now on, together for what is alike."""
        hosts = island.hosts
        devices = [name for name, (host, _) in self._devices.items() if host in hosts]
        ledger = self._buffers.memory.ledger
        ledger.add_devices(devices, self._memory_bytes)
        ledger.add_hosts(map(str, hosts), self._host_memory_bytes)

    def _refuse(self, name: str, error: SliceError) -> None:
        client, message = self._asked.pop(name)
        self._outbox.tell(client, Refused(message.request, pack_error(error)))

    def _give(self, name: str, names: Sequence[str]) -> None:
        client, message = self._asked.pop(name)
        mesh = LogicalMesh(message.axis_names, message.axis_sizes)
        slice_ = self._record(name, client, mesh, names)
        self._slices[name] = slice_
        scheduler = self._dispatch.islands.schedulers[slice_.order]
        scheduler.place(name, slice_.devices_by_host)
        self._buffers.memory.ledger.place(name, names, map(str, slice_.hosts))
        made = self._made(slice_)
        for each in slice_.hosts:
            self._outbox.send(each, made)
        where = slice_.island, slice_.platform, slice_.devices
        self._outbox.tell(client, SliceGiven(message.request, name, *where))

    def _prepare(self, effect: Prepare) -> None:
        slice_ = self._slices[effect.slice]
        name = f"{slice_.name}@{effect.ticket}"
        target = self._record(name, slice_.client, slice_.mesh, effect.devices)
        self._moves.prepare(slice_, target, self._made(target), effect.ticket)

    def _record(
        self, name: str, client: int, mesh: LogicalMesh, names: Sequence[str]
    ) -> SliceRecord:
        devices = tuple(self._devices[each] for each in names)
        host = devices[0][0]
        island = self._of_host[host]
        platform = island.present[host].platform
        return SliceRecord(
            name, client, mesh, island.name, platform, devices, order=island.order
        )

    def _made(self, slice_: SliceRecord) -> SliceMade:
        hosts = self._of_host[slice_.devices[0][0]].hosts
        ranks = {host: rank for rank, host in enumerate(hosts)}
        return SliceMade(
            slice_.name,
            slice_.mesh.axis_names,
            slice_.mesh.axis_sizes,
            tuple((ranks[host], index) for host, index in slice_.devices),
        )

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
        name, manager = message.slice, self.manager
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
        self.follow(effects)
        # Whatever becomes of it is its client's own doing, if it suspends and resumes.
        ends = {wanted, SliceState.ACTIVE, SliceState.SUSPENDED}
        return lambda: manager.state(name) in ends

    def _change_devices(
        self, client: int, message: ChangeDevices
    ) -> Callable[[], bool]:
        del client
        names = set(message.devices)
        if message.is_usable:
            self.follow(self.manager.restore(names))
            return lambda: True
        self.follow(self.manager.withdraw(names))
        return lambda: not self.manager.is_awaited(names)

    def _describe(self) -> tuple[DeviceInfo, ...]:
        inventory = self.manager.inventory
        on: dict[str, list[str]] = {}
        for request, _, names in self.manager.slices():
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

    def idle(self, slice_: SliceRecord) -> bool:
        """Take a slice apart that was given back; return whether nothing of it is left."""
        is_over = slice_.is_dropped and not (slice_.num_calls or slice_.num_buffers)
        if not is_over or slice_.name not in self._slices:
            return False
        if slice_.error is None:
            for host in slice_.hosts:
                self._outbox.book(host).dropped.append(slice_.name)
            self.follow(self.manager.release(slice_.name))
        del self._slices[slice_.name]
        self._dispatch.islands.schedulers[slice_.order].unplace(slice_.name)
        self._buffers.memory.ledger.unplace(slice_.name)
        return True
