"""The resource manager: who gets which devices, and what follows when devices change.

Clients ask for virtual slices and name virtual devices; which physical devices these
are is decided here, and may change between two computations without their knowing
(the paper's section 4.1). The manager is pure: methods are events, the lists that they
return are what follows from them, and time is an argument.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from timelyml.errors import SliceError
from timelyml.ml.resources.fitting import fit, pools
from timelyml.ml.resources.inventory import Device, Inventory
from timelyml.ml.resources.loads import Loads
from timelyml.ml.resources.refusals import (
    impossible,
    not_active,
    not_granted,
    not_in_time,
    nowhere_to_go,
    taken_name,
    unknown_slice,
)
from timelyml.ml.resources.requests import (
    Displaced,
    Freed,
    Granted,
    Prepare,
    Released,
    Remapped,
    ResourceEffect,
    SliceRequest,
    SliceState,
    TimedOut,
    Vacate,
)
from timelyml.ml.resources.slices import SliceQueue, VirtualSlice


class ResourceManager:
    """Maps the virtual slices of all clients to devices.

    Slices share devices unless they reserve memory. Those that cannot have devices now
    wait in the order in which they came; one that reserves memory never overtakes an
    earlier one that could use the same devices, so that none waits for ever.
    """

    def __init__(self) -> None:
        self.inventory = Inventory()
        self._slices: dict[str, VirtualSlice] = {}
        self._queue = SliceQueue()
        self._loads = Loads()
        self._last_ticket = 0
        self._to_free: set[str] = set()  # withdrawn, and a slice still stands there

    def add_host(self, host: str, devices: Sequence[Device]) -> list[ResourceEffect]:
        """Let a host join with its devices.

        Raises:
            PlacementError: Its name, a device or a place in a mesh is taken.
        """
        self.inventory.add_host(host, devices)
        return self._serve()

    def lose_host(self, host: str) -> list[ResourceEffect]:
        """Take note that a host is dead, with all that only it held.

        A host that leaves in peace has its devices withdrawn first: once they are
        `Freed`, nothing is left to be lost.

        Raises:
            PlacementError: There is no such host.
        """
        gone = {device.name for device in self.inventory.remove_host(host)}
        self._to_free -= gone
        effects: list[ResourceEffect] = []
        for each in self._slices.values():
            if each.goes_to(gone):
                self._drop_target(each)
                self._queue.add(each)
            if each.stands_on(gone):
                lost = tuple(name for name in each.devices if name in gone)
                effects.append(Displaced(each.request.client, each.request.name, lost))
                self._drop_devices(each)
                each.before = ()
                effects += self._arrive(each)
        return effects + self._serve()

    def withdraw(self, names: Iterable[str]) -> list[ResourceEffect]:
        """Take devices out of use; slices on them move away, or wait for others.

        `Freed` follows when nothing stands on them any more.

        Raises:
            PlacementError: A device is unknown.
        """
        withdrawn = set(names)
        self.inventory.withdraw(withdrawn)
        self._to_free |= withdrawn
        for each in self._slices.values():
            if each.goes_to(withdrawn):
                self._drop_target(each)
                self._queue.add(each)
            if each.stands_on(withdrawn) and each.is_wanted and not each.target:
                self._queue.add(each)
        effects = self._serve()
        for each in self._slices.values():
            if each.stands_on(withdrawn) and not each.target and not each.is_vacating:
                effects += self._vacate(each)
        return effects + self._freed()

    def restore(self, names: Iterable[str]) -> list[ResourceEffect]:
        """Give devices back to use.

        Raises:
            PlacementError: A device is unknown.
        """
        restored = set(names)
        self.inventory.restore(restored)
        self._to_free -= restored
        return self._serve()

    def request(
        self, request: SliceRequest, now_s: float, timeout_s: float | None = None
    ) -> list[ResourceEffect]:
        """Give a slice devices, or let it wait until there are some.

        Args:
            request: What is asked for.
            now_s: The time.
            timeout_s: How long it may wait; without end if None, not at all if 0.

        Raises:
            SliceError: Its name is taken, or no devices that are there could ever do;
                the error says what there is.
        """
        if request.name in self._slices:
            raise taken_name(request.name)
        self._refuse_if_impossible(request)
        deadline_s = None if timeout_s is None else now_s + timeout_s
        self._slices[request.name] = VirtualSlice(request, deadline_s)
        self._queue.add(self._slices[request.name])
        return self._serve() + self.tick(now_s)

    def release(self, name: str) -> list[ResourceEffect]:
        """Take a slice back; its devices and memory are free at once.

        Raises:
            SliceError: There is no such slice.
        """
        self._get(name)
        return self._forget([name])

    def leave(self, client: str) -> list[ResourceEffect]:
        """Take back all slices of a client that is gone."""
        mine = [
            name for name, each in self._slices.items() if each.request.client == client
        ]
        return self._forget(mine)

    def suspend(self, name: str) -> list[ResourceEffect]:
        """Free the devices of a slice, keeping its buffers in host memory.

        Raises:
            SliceError: There is no such slice, or it was given no devices yet.
        """
        each = self._granted(name, "suspended")
        each.is_wanted = False
        self._queue.drop(each)
        self._drop_target(each)
        effects = self._vacate(each) if each.devices and not each.is_vacating else []
        return effects + self._serve()

    def resume(self, name: str) -> list[ResourceEffect]:
        """Let a suspended slice have devices again, as soon as there are some.

        Raises:
            SliceError: There is no such slice, or it was given no devices yet.
        """
        each = self._granted(name, "resumed")
        if not each.is_wanted:
            each.is_wanted = True
            self._queue.add(each)
        return self._serve()

    def migrate(
        self, name: str, *, island: str | None = None, avoid: Collection[str] = ()
    ) -> list[ResourceEffect]:
        """Move a slice that runs to other devices.

        Args:
            name: The slice.
            island: Where to; None: where it may be by its request. It may be nowhere else
                from now on, if it was asked for on an island.
            avoid: Devices not to use, besides those on which it stands.

        Raises:
            SliceError: There is no such slice, it does not run or is moving already, or
                no devices are free for it.
        """
        each = self._granted(name, "migrated")
        if each.state is not SliceState.ACTIVE:
            raise not_active(name, each.state)
        request = replace(each.request, island=island or each.request.island)
        avoided = {*avoid, *each.devices}
        free = (x for x in self._candidates(request) if x.name not in avoided)
        chosen = fit(request, free, self._loads.of)
        if chosen is None:
            raise nowhere_to_go(request, self.inventory.describe())
        if each.request.island is not None:
            each.request = request
        return [self._aim(each, chosen)]

    def prepared(self, name: str, ticket: int) -> list[ResourceEffect]:
        """Take note that a slice's functions are compiled for its target."""
        each = self._slices.get(name)
        if each is None or each.prepare_ticket != ticket or not each.target:
            return []  # released, or aimed elsewhere, in the meantime
        each.is_prepared = True
        if each.devices and not each.is_vacating:
            return self._vacate(each)
        return self._arrive(each)

    def vacated(self, name: str, ticket: int) -> list[ResourceEffect]:
        """Take note that nothing of a slice is left on its devices."""
        each = self._slices.get(name)
        if each is None or each.vacate_ticket != ticket or not each.is_vacating:
            return []
        each.before = each.devices
        self._drop_devices(each)
        if each.is_wanted and not each.target:
            self._queue.add(each)
        return self._arrive(each) + self._serve() + self._freed()

    def tick(self, now_s: float) -> list[ResourceEffect]:
        """Withdraw requests that have waited for too long."""
        late = self._queue.late(now_s)
        effects: list[ResourceEffect] = []
        for each in late:
            request = each.request
            error = self._timeout_error(request)
            effects.append(TimedOut(request.client, request.name, error))
            self._queue.drop(each)
            del self._slices[request.name]
        return effects + (self._serve() if late else [])

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, if ever."""
        return self._queue.next_deadline()

    def is_wanted(self, name: str) -> bool:
        """Whether a slice is to have devices: not if it is suspended.

        Raises:
            SliceError: There is no such slice.
        """
        return self._get(name).is_wanted

    def is_awaited(self, names: Iterable[str]) -> bool:
        """Whether one of these devices was withdrawn and is not free of slices yet."""
        return not self._to_free.isdisjoint(names)

    def state(self, name: str) -> SliceState:
        """Return where a slice stands.

        Raises:
            SliceError: There is no such slice.
        """
        return self._get(name).state

    def devices_of(self, name: str) -> tuple[str, ...]:
        """Return the devices on which a slice stands, row-major; empty if on none.

        Raises:
            SliceError: There is no such slice.
        """
        return self._get(name).devices

    def slices(self) -> tuple[tuple[SliceRequest, SliceState, tuple[str, ...]], ...]:
        """Return all slices with their state and devices, in the order asked for."""
        return tuple(
            (each.request, each.state, each.devices) for each in self._slices.values()
        )

    def _serve(self) -> list[ResourceEffect]:
        """Give devices to slices that want some, in the order in which they came."""
        effects: list[ResourceEffect] = []
        blocked: set[str] = set()  # devices that an earlier one waits to reserve
        for each in list(self._queue):
            request = each.request
            candidates = [
                device
                for device in self._candidates(request)
                if not (request.memory_bytes and device.name in blocked)
            ]
            chosen = fit(request, candidates, self._loads.of)
            if chosen is None:
                for pool in pools(request, self.inventory):
                    blocked.update(device.name for device in pool)
                continue
            self._queue.drop(each)
            effects.append(self._aim(each, chosen))
        return effects

    def _candidates(self, request: SliceRequest) -> list[Device]:
        return [
            device
            for device in self.inventory.usable()
            if self._loads.has_room(device, request.memory_bytes)
        ]

    def _aim(self, each: VirtualSlice, chosen: Sequence[Device]) -> ResourceEffect:
        """Reserve devices: for a first grant at once, else as the target of a move."""
        request = each.request
        devices = tuple(device.name for device in chosen)
        self._loads.add(devices, request.memory_bytes)
        if not each.is_granted:
            each.is_granted = True
            each.devices = devices
            return Granted(request.client, request.name, devices)
        each.target = devices
        each.is_prepared = False
        each.prepare_ticket = self._next_ticket()
        return Prepare(request.client, request.name, devices, each.prepare_ticket)

    def _vacate(self, each: VirtualSlice) -> list[ResourceEffect]:
        each.is_vacating = True
        each.vacate_ticket = self._next_ticket()
        request = each.request
        return [Vacate(request.client, request.name, each.devices, each.vacate_ticket)]

    def _arrive(self, each: VirtualSlice) -> list[ResourceEffect]:
        """Put a slice on its target, if it is prepared and the source is vacated."""
        if not each.target or not each.is_prepared or each.devices:
            return []
        request = each.request
        each.devices, each.target, each.is_prepared = each.target, (), False
        before, each.before = each.before, ()
        return [Remapped(request.client, request.name, each.devices, before)]

    def _drop_target(self, each: VirtualSlice) -> None:
        self._loads.drop(each.target, each.request.memory_bytes)
        each.target, each.is_prepared = (), False

    def _drop_devices(self, each: VirtualSlice) -> None:
        self._loads.drop(each.devices, each.request.memory_bytes)
        each.devices, each.is_vacating = (), False
        if each.is_wanted and not each.target:
            self._queue.add(each)

    def _forget(self, names: Sequence[str]) -> list[ResourceEffect]:
        effects: list[ResourceEffect] = []
        for name in names:
            each = self._slices.pop(name)
            self._queue.drop(each)
            self._loads.drop(each.devices, each.request.memory_bytes)
            self._loads.drop(each.target, each.request.memory_bytes)
            effects.append(Released(each.request.client, name))
        return effects + self._serve() + self._freed()

    def _freed(self) -> list[ResourceEffect]:
        freed = sorted(name for name in self._to_free if self._loads.is_free(name))
        self._to_free.difference_update(freed)
        return [Freed(tuple(freed))] if freed else []

    def _next_ticket(self) -> int:
        self._last_ticket += 1
        return self._last_ticket

    def _get(self, name: str) -> VirtualSlice:
        if name not in self._slices:
            raise unknown_slice(name, sorted(self._slices))
        return self._slices[name]

    def _granted(self, name: str, done: str) -> VirtualSlice:
        each = self._get(name)
        if not each.is_granted:
            raise not_granted(name, done)
        return each

    def _refuse_if_impossible(self, request: SliceRequest) -> None:
        large_enough = [
            device
            for device in self.inventory
            if device.memory_bytes >= request.memory_bytes
        ]
        if fit(request, large_enough, lambda _: (0, 0)) is None:
            raise impossible(request, self.inventory.describe())

    def _timeout_error(self, request: SliceRequest) -> SliceError:
        holders = sorted(
            each.request.name
            for each in self._slices.values()
            if each.request.memory_bytes and (each.devices or each.target)
        )
        return not_in_time(request, self.inventory.describe(), holders)
