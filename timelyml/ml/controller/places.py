"""Islands and their devices, and the slices of clients that stand on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from timelyml.errors import SliceError, TimelyError
from timelyml.ml.controller.buffers import Buffers
from timelyml.ml.controller.changes import Changes
from timelyml.ml.controller.code import Code
from timelyml.ml.controller.dispatching import Dispatch
from timelyml.ml.controller.messages import (
    AskSlice,
    Refused,
    SliceGiven,
)
from timelyml.ml.controller.moves import Moves
from timelyml.ml.controller.outbox import Outbox
from timelyml.ml.controller.records import SliceRecord, device_name
from timelyml.ml.controller.renewals import Island, Renewals
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
    TimedOut,
    Vacate,
)
from timelyml.ml.resources.meshes import mesh_of
from timelyml.runtime.failure import pack_error


@dataclass(slots=True)
class _Asked:
    """A request for a slice; late once it may wait no more, if that is known by now."""

    client: int
    message: AskSlice
    late_s: float | None = None


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
        add_order: Makes a scheduler under a name.
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
        add_order: Callable[[str], None],
    ) -> None:
        self.manager = ResourceManager()
        self.islands: dict[str, Island] = {}
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
        self._waiting: list[_Asked] = []  # until it is known what there is
        self._asked: dict[str, tuple[int, AskSlice]] = {}  # until devices are given
        self.renewals = Renewals(
            self.islands,
            self._of_host,
            manager=self.manager,
            moves=self._moves,
            slices=slices,
            buffers=buffers,
            dispatch=dispatch,
            outbox=outbox,
            follow=self.follow,
            add_order=add_order,
        )
        self._changes = Changes(
            self.manager,
            slices=slices,
            islands=self.islands,
            of_host=self._of_host,
            devices=self._devices,
            renewals=self.renewals,
            follow=self.follow,
            outbox=outbox,
        )
        self._numbers = itertools.count(1)

    @property
    def is_complete(self) -> bool:
        """Whether every host has come, or is lost and nobody comes in its place."""
        islands = self.islands.values()
        is_awaiting = any(
            each.is_renewing and not (each.living or each.is_replaced)
            for each in islands
        )
        return not is_awaiting and all(
            each.is_complete for each in islands if each.is_own
        )

    def names(self) -> list[str]:
        """Return the names of all islands, also of those that are lost."""
        return list(dict.fromkeys(each.name for each in self.islands.values()))

    def add(self, name: str, hosts: Sequence[int], *, is_own: bool) -> None:
        """Make an island known, with its hosts in the order of their ranks."""
        island = Island(name, name, tuple(hosts), is_own)
        self.islands[name] = island
        self._of_host.update(dict.fromkeys(hosts, island))

    def coming(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return names of islands on their way, and the hosts that are not there yet."""
        return [
            (each.name, tuple(x for x in each.hosts if x not in each.present))
            for each in self.islands.values()
            if each.is_coming
        ]

    def island_of(self, host: int) -> Island | None:
        """Return the island that a host belongs to, if it does."""
        return self._of_host.get(host)

    def withdraw(self, island: Island) -> None:
        """Let slices leave an island, and give nobody its devices any more."""
        at = island.hosts
        names = [name for name, (host, _) in self._devices.items() if host in at]
        self.follow(self.manager.withdraw(names))

    def is_dead(self, host: int) -> bool:
        """Whether a host is gone, or nobody knows it."""
        island = self._of_host.get(host)
        return island is None or host in island.dead

    def lose(self, host: int, error: TimelyError, now_s: float) -> None:
        """Take note that a host is dead; its island forms anew."""
        self.renewals.lose(host, error)
        self.answer(now_s)

    def welcome(self, host: int, present: Present, now_s: float) -> None:
        """Take note of a host; once all of its island are there, of their devices."""
        island = self._of_host[host]
        island.present[host] = present
        if island.is_complete and island.error is None:
            devices = self._devices_of(island)
            self._open_accounts(island)  # before anybody is given them
            for each, own in zip(island.hosts, devices, strict=True):
                self.follow(self.manager.add_host(str(each), own))
            self.renewals.formed(island, now_s)
        self.answer(now_s)

    def _devices_of(self, island: Island) -> list[list[Device]]:
        """Return the devices of each host of an island that is complete."""
        told = [
            place
            for present in map(island.present.__getitem__, island.hosts)
            for place in present.places
        ]
        places = iter(mesh_of(told))
        devices: list[list[Device]] = []
        for host in island.hosts:
            present, own = island.present[host], []
            for index in range(present.num_devices):
                name = device_name(host, index)
                self._devices[name] = host, index
                of = name, island.name, str(host), present.kind, self._memory_bytes
                own.append(Device(*of, next(places), island.generation))
            devices.append(own)
        return devices

    def handle(self, client: int, message: Any, now_s: float) -> bool:
        """Take what a client says of slices and devices; return whether it was that."""
        match message:
            case AskSlice():
                self._waiting.append(_Asked(client, message))
                self.answer(now_s)
            case _:
                return self._changes.handle(client, message)
        return True

    def left(self, host: int) -> None:
        """Take a host's word that it has sent all it had of a slice that moved."""
        self._moves.left(host)

    def leave(self, client: int) -> None:
        """Forget what a client asked for."""
        self._waiting = [each for each in self._waiting if each.client != client]
        self._changes.leave(client)
        for name in [name for name, (who, _) in self._asked.items() if who == client]:
            del self._asked[name]
            self.follow(self.manager.release(name))

    def answer(self, now_s: float) -> None:
        """Take requests for slices, once it is known what there is.

        What no devices that are there could meet waits for those that are on their way.
        """
        if not (self._waiting and self.is_complete):
            return
        waiting, self._waiting = self._waiting, []
        for asked in waiting:
            client, message = asked.client, asked.message
            if asked.late_s is None and message.timeout_s is not None:
                asked.late_s = now_s + message.timeout_s
            left_s = None if asked.late_s is None else max(0.0, asked.late_s - now_s)
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
                    message.is_adjacent,
                )
                effects = self.manager.request(request, now_s, left_s)
            except SliceError as error:
                is_coming = any(each.is_coming for each in self.islands.values())
                # Of what makes no sense, it does not matter what there is.
                if is_coming and "available" in error.values and left_s != 0:
                    del self._asked[name]
                    self._waiting.append(asked)
                else:
                    self._refuse(name, self._explained(error))
            else:
                self.follow(effects)

    def next_deadline(self) -> float | None:
        """When a request that waits for devices to come has waited for too long."""
        late = [x.late_s for x in self._waiting if x.late_s is not None]
        return min(late, default=None)

    def _explained(self, error: SliceError) -> SliceError:
        """Say of a refusal which devices there would be, but for a loss."""
        lost = [
            f"island {each.name!r} is lost: {each.error}"
            for each in self.islands.values()
            if each.error is not None
        ]
        if not lost:
            return error
        return SliceError("; ".join([str(error), *lost]), **error.values)

    def step(self) -> None:
        """Go on with slices that move, and tell those who wait for it."""
        self._moves.step()
        self.renewals.step()
        self._changes.step()

    def follow(self, effects: Iterable[ResourceEffect]) -> None:
        """Do what the resource manager decided."""
        for effect in effects:
            match effect:
                case Granted():
                    self._give(effect.slice, effect.devices)
                case TimedOut():
                    self._refuse(effect.slice, effect.error)
                case Prepare() | Vacate() | Remapped() if (
                    effect.slice not in self._slices
                ):
                    pass  # what was decided before ended its last call
                case Prepare():
                    self._prepare(effect)
                case Vacate():
                    self._moves.vacate(effect)
                case Remapped():
                    self._moves.arrive(effect)
                case Released():
                    self._moves.stop(effect.slice)

    def _living(self, hosts: Iterable[int]) -> list[int]:
        return [host for host in hosts if not self.is_dead(host)]

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
        self._buffers.memory.ledger.place(
            name,
            names,
            map(str, slice_.hosts),
            reserved_bytes=message.memory_bytes,
        )
        made = self._made(slice_)
        for each in slice_.hosts:
            self._outbox.order(each, made)
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
        scheduler = self._dispatch.islands.schedulers.get(slice_.order)
        if scheduler is not None:
            scheduler.unplace(slice_.name)
        self._buffers.memory.unplace(slice_)
        return True
