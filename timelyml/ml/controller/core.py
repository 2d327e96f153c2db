"""The core of the controller: takes events of clients and hosts, returns what follows.

Pure: no socket, thread or clock. A slice, a buffer and a call cost the same here
however many devices they have, but for the few numbers that each host must be told.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from timelyml.errors import (
    InvariantError,
    RunStoppedError,
    SliceError,
    TimelyError,
)
from timelyml.ml.controller.admission import Limits
from timelyml.ml.controller.buffers import Buffers
from timelyml.ml.controller.calls import Calls
from timelyml.ml.controller.checks import check_message
from timelyml.ml.controller.code import Code
from timelyml.ml.controller.dispatching import Dispatch
from timelyml.ml.controller.messages import (
    AskSlice,
    Call,
    CallProgram,
    DropSlice,
    Fetch,
    Put,
    Refused,
    Register,
    RegisterProgram,
    Release,
    SliceGiven,
)
from timelyml.ml.controller.names import Names
from timelyml.ml.controller.programs import Programs
from timelyml.ml.controller.records import (
    Effect,
    Outbox,
    SliceRecord,
    device_name,
)
from timelyml.ml.functions import LogicalMesh
from timelyml.ml.hosts import Compiled, Pieces, Present, Reports, SliceMade, Spilled
from timelyml.ml.resources import (
    Device,
    Granted,
    ResourceEffect,
    ResourceManager,
    SliceRequest,
    TimedOut,
)
from timelyml.ml.scheduling import GangScheduler, Policy
from timelyml.runtime.failure import pack_error

DEFAULT_MEMORY_BYTES = 4 << 30


class Core:
    """Islands, slices, computations and clients.

    Methods are events; `flush` returns what follows from them, so that what several of
    them have for one host leaves as one message.

    Args:
        islands: The hosts of each island, in the order of their ranks, by its name.
        memory_bytes: What buffers and temporaries may take on a device.
        host_memory_bytes: What a host may keep in its memory of buffers that were
            spilled from its devices; as much as there are if None.
        policy: Makes the policy of each island's scheduler; FIFO unless given.
        limits: How much clients may have at once.
    """

    def __init__(
        self,
        islands: dict[str, Sequence[int]],
        *,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        host_memory_bytes: int | None = None,
        policy: Callable[[], Policy] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._hosts = {
            host: island for island, hosts in islands.items() for host in hosts
        }
        self._islands = {island: tuple(hosts) for island, hosts in islands.items()}
        self._manager = ResourceManager()
        self._memory_bytes = memory_bytes
        self._host_memory_bytes = host_memory_bytes
        self._present: dict[int, Present] = {}
        self._devices: dict[str, tuple[int, int]] = {}  # host and position, by name
        self._lost: dict[str, TimelyError] = {}
        self._outbox = Outbox()
        self._slices: dict[str, SliceRecord] = {}
        self._code = Code(self._slices, self._hosts, self._outbox)
        self.buffers = Buffers(
            self._slices, self._outbox, self._idle, limits or Limits()
        )
        self.dispatch = Dispatch(
            self._slices, self.buffers, self._code, self._outbox, self._idle
        )
        common = self._slices, self.buffers, self._code, self._outbox
        self._calls = Calls(self.dispatch, *common)
        self._programs = Programs(self.dispatch, *common)
        self._names = Names(
            self._slices, self.buffers, self.dispatch.device_time, self._outbox
        )
        for island in islands:
            scheduler = GangScheduler(policy() if policy is not None else None)
            self.dispatch.clients.add_island(island, scheduler)
        self._clients = self.dispatch.clients
        self._waiting: list[tuple[int, AskSlice]] = []  # until all hosts are there
        self._asked: dict[str, tuple[int, AskSlice]] = {}  # until devices are given
        self._slice_numbers = itertools.count(1)

    @property
    def is_complete(self) -> bool:
        """Whether every host has come, or is lost."""
        return all(
            host in self._present or island in self._lost
            for host, island in self._hosts.items()
        )

    @property
    def slices(self) -> list[str]:
        """Names of all slices."""
        return list(self._slices)

    def join(self, client: int, *, weight: int = 1, priority: int = 0) -> None:
        """Admit a client; numbers begin at 1."""
        self._clients.join(client, weight, priority)

    def leave(self, client: int) -> None:
        """Forget a client and all that is its own; what is ordered runs to its end."""
        if client not in self._clients:
            return
        self._clients.leave(client)
        self._names.leave(client)
        self._waiting = [each for each in self._waiting if each[0] != client]
        for name in [name for name, (who, _) in self._asked.items() if who == client]:
            del self._asked[name]
            self._follow(self._manager.release(name))
        gone = pack_error(RunStoppedError("the client of a call is gone; got its end"))
        self.dispatch.cancel(lambda call: call.client == client, gone)
        self.buffers.memory.leave(client, gone)
        self.dispatch.follow(self._clients.drop(client))
        self.buffers.leave(client)
        for slice_ in [each for each in self._slices.values() if each.client == client]:
            slice_.is_dropped = True
            self._idle(slice_)

    def handle(self, client: int, message: Any, now_s: float) -> None:
        """Take a message of a client; one that has left is not heard.

        Raises:
            WireError: It is none that a client says; nothing has changed.
        """
        if client not in self._clients:
            return
        check_message(client, message, self._slices)
        match message:
            case Call():
                self._calls.start(client, message)
            case CallProgram():
                self._programs.start(client, message)
            case Put():
                self.buffers.put(client, message)
            case Release():
                released = self.buffers.directory.drop(client, message.buffers)
                self.buffers.follow(released)
            case Fetch():
                self.buffers.fetch(client, message.buffer)
            case Register():
                self._code.register(message)
            case RegisterProgram():
                self._programs.register(client, message)
            case AskSlice():
                self._waiting.append((client, message))
                self._answer_requests(now_s)
            case DropSlice():
                self._drop_slice(client, message.slice)
            case _:
                self._names.handle(client, message, now_s)

    def heard(self, host: int, message: Any, now_s: float) -> None:
        """Take a message of a host; one of an island that was given up is not heard."""
        island = self._hosts[host]
        if island in self._lost:
            return
        match message:
            case Reports():
                self.dispatch.finished(island, host, message.done)
            case Pieces():
                self.buffers.take(message)
            case Compiled():
                if self._code.compiled(host, message):
                    self.dispatch.compiled(message.identity, message.slice)
            case Spilled():
                self.buffers.memory.spilled(host, message.buffers)
            case Present():
                self._welcome(host, message)
                self._answer_requests(now_s)
            case _:
                raise InvariantError(
                    f"host {host} said what nobody understands; got {message!r:.200}"
                )

    def lose(self, host: int, error: TimelyError, now_s: float) -> None:
        """Give up the island of a host; what lay there is reported lost."""
        island = self._hosts[host]
        if island in self._lost:
            return
        self._lost[island] = error
        self._outbox.mute(self._islands[island])
        lost = [each for each in self._slices.values() if each.island == island]
        for slice_ in lost:
            slice_.error = pack_error(_gone(slice_, error))
            self._follow(self._manager.release(slice_.name))
        for each in self._islands[island]:
            if each in self._present:
                self._follow(self._manager.lose_host(str(each)))
        for slice_ in lost:
            self.buffers.lose(slice_, island, str(error))
        for slice_ in lost:
            self.buffers.memory.lose(slice_, slice_.error or b"")
        self.dispatch.lose(island, pack_error(error))
        self._answer_requests(now_s)

    def tick(self, now_s: float) -> None:
        """Give up what has waited for too long."""
        self._follow(self._manager.tick(now_s))
        self._names.tick(now_s)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, if ever."""
        deadlines = self._manager.next_deadline(), self._names.next_deadline()
        return min((each for each in deadlines if each is not None), default=None)

    def flush(self) -> list[Effect]:
        """Return what follows from all events since the last call, in order."""
        return self._outbox.flush()

    def _welcome(self, host: int, present: Present) -> None:
        """Take note of a host and its devices."""
        self._present[host] = present
        island = self._hosts[host]
        first = self._islands[island].index(host) * present.num_devices
        devices = []
        for index in range(present.num_devices):
            name = device_name(host, index)
            self._devices[name] = host, index
            coordinates = (first + index,)
            devices.append(
                Device(
                    name,
                    island,
                    str(host),
                    present.kind,
                    self._memory_bytes,
                    coordinates,
                )
            )
        self._follow(self._manager.add_host(str(host), devices))
        if self._present.keys() >= set(self._islands[island]):
            self._open_accounts(island)

    def _open_accounts(self, island: str) -> None:
        """Count memory from now on, together for what is alike."""
        hosts = self._islands[island]
        devices = [name for name, (host, _) in self._devices.items() if host in hosts]
        ledger = self.buffers.memory.ledger
        ledger.add_devices(devices, self._memory_bytes)
        ledger.add_hosts(map(str, hosts), self._host_memory_bytes)

    def _answer_requests(self, now_s: float) -> None:
        """Take requests for slices, once it is known what there is."""
        if not self.is_complete:
            return
        waiting, self._waiting = self._waiting, []
        for client, message in waiting:
            name = f"slice-{next(self._slice_numbers)}"
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
                effects = self._manager.request(request, now_s, message.timeout_s)
            except SliceError as error:
                self._refuse(name, error)
            else:
                self._follow(effects)

    def _follow(self, effects: Iterable[ResourceEffect]) -> None:
        """Do what the resource manager decided."""
        for effect in effects:
            if isinstance(effect, Granted):
                self._give(effect.slice, effect.devices)
            elif isinstance(effect, TimedOut):
                self._refuse(effect.slice, effect.error)

    def _refuse(self, name: str, error: SliceError) -> None:
        client, message = self._asked.pop(name)
        self._outbox.tell(client, Refused(message.request, pack_error(error)))

    def _give(self, name: str, names: Sequence[str]) -> None:
        client, message = self._asked.pop(name)
        devices = tuple(self._devices[each] for each in names)
        host = devices[0][0]
        island, platform = self._hosts[host], self._present[host].platform
        mesh = LogicalMesh(message.axis_names, message.axis_sizes)
        slice_ = SliceRecord(name, client, mesh, island, platform, devices)
        self._slices[name] = slice_
        scheduler = self.dispatch.islands.schedulers[island]
        scheduler.place(name, slice_.devices_by_host)
        self.buffers.memory.ledger.place(name, names, map(str, slice_.hosts))
        ranks = {host: rank for rank, host in enumerate(self._islands[island])}
        made = SliceMade(
            name,
            message.axis_names,
            message.axis_sizes,
            tuple((ranks[host], index) for host, index in devices),
        )
        for each in slice_.hosts:
            self._outbox.send(each, made)
        given = SliceGiven(message.request, name, island, platform, devices)
        self._outbox.tell(client, given)

    def _drop_slice(self, client: int, name: str) -> None:
        slice_ = self._slices.get(name)
        if slice_ is not None and slice_.client == client:
            slice_.is_dropped = True
            self._idle(slice_)

    def _idle(self, slice_: SliceRecord) -> None:
        """Take a slice apart that was given back, once nothing of it is left."""
        is_over = slice_.is_dropped and not (slice_.num_calls or slice_.num_buffers)
        if not is_over or slice_.name not in self._slices:
            return
        del self._slices[slice_.name]
        self._calls.forget_slice(slice_.name)
        self._programs.forget_slice(slice_.name)
        self.dispatch.islands.schedulers[slice_.island].unplace(slice_.name)
        self.buffers.memory.ledger.unplace(slice_.name)
        if slice_.error is None:
            for host in slice_.hosts:
                self._outbox.book(host).dropped.append(slice_.name)
            self._follow(self._manager.release(slice_.name))


def _gone(slice_: SliceRecord, error: TimelyError) -> SliceError:
    return SliceError(
        f"slice {slice_.name!r} is gone with its island {slice_.island!r}; got "
        f"{error}; expected its devices to stay; ask for another slice",
        slice=slice_.name,
        available={},
    )
