"""Buffers that take memory: on which devices and hosts, and whether they could leave."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from timelyml.ml.store.accounts import MemoryAccounts
from timelyml.ml.store.gauges import Label
from timelyml.ml.store.values import Buffer, Claim


class Live:
    """A buffer that is promised or there.

    Attributes:
        num_users: Admitted programs that read it or make it.
        num_waiting: Programs that wait for memory and will read it or make it.
        is_on_device: Its bytes are counted on its placement.
        is_on_host: Its bytes are counted on the hosts of its placement.
        is_spilling: Its bytes on devices are about to be freed, once they are copied.
        is_freed: Nobody can ask for it any more.
        is_made: What makes it is over.
        label: Which gauge counts it, and as what, if one does.
    """

    __slots__ = (
        "buffer",
        "is_freed",
        "is_made",
        "is_on_device",
        "is_on_host",
        "is_spilling",
        "label",
        "num_users",
        "num_waiting",
    )

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.num_users = 0
        self.num_waiting = 0
        self.is_on_device = False
        self.is_on_host = False
        self.is_spilling = False
        self.is_freed = False
        self.is_made = False
        self.label: Label | None = None

    @property
    def is_only_on_host(self) -> bool:
        """Whether it was spilled."""
        return self.is_on_host and not self.is_on_device

    @property
    def is_idle(self) -> bool:
        """Whether it could be spilled now."""
        return self.is_on_device and not self.num_users and not self.is_spilling


class LiveBuffers:
    """All of them, those least recently used first, and what they take where.

    Attributes:
        devices: Accounts of devices, of which others may take memory too.
        hosts: Accounts of the memory that hosts have for what is spilled.
    """

    def __init__(self) -> None:
        self.devices = MemoryAccounts()
        self.hosts = MemoryAccounts()
        self._live: dict[int, Live] = {}
        self._labels: dict[int, Label] = {}  # of what is not promised yet

    def __iter__(self) -> Iterator[Live]:
        return iter(self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    def add_hosts(self, hosts: Iterable[str], memory_bytes: int | None) -> None:
        """Make hosts known that have so much memory for what is spilled; None: any."""
        self.hosts.add_devices(
            hosts, sys.maxsize if memory_bytes is None else memory_bytes
        )

    def get(self, number: int) -> Live | None:
        """Return a buffer, if it is there or promised."""
        return self._live.get(number)

    def promise(self, buffer: Buffer) -> None:
        """Make a buffer known that a program will make."""
        live = self._live[buffer.number] = Live(buffer)
        if self._labels:
            live.label = self._labels.pop(buffer.number, None)

    def touch(self, live: Live) -> None:
        """Make a buffer the one most recently used."""
        self._live[live.buffer.number] = self._live.pop(live.buffer.number)

    def on(self, placement: str) -> list[Live]:
        """Return the buffers of a placement."""
        return [live for live in self if live.buffer.placement == placement]

    def keepers(self, short: Iterable[int]) -> list[Buffer]:
        """Return what is on groups of devices, or spilled to their hosts; largest first."""
        groups = set(short)
        there = [
            live
            for live in self
            if not groups.isdisjoint(self.devices.groups_of(live.buffer.placement))
        ]
        hosts = {
            host
            for live in there
            for host in self.hosts.groups_of(live.buffer.placement)
        }
        found = [live.buffer for live in there if live.is_on_device]
        found += [
            live.buffer
            for live in self
            if live.is_on_host
            and not live.is_on_device
            and not hosts.isdisjoint(self.hosts.groups_of(live.buffer.placement))
        ]
        return sorted(found, key=lambda buffer: -buffer.size_bytes)

    def kept_by(self, claim: Claim) -> list[Buffer]:
        """Return what has to be on devices beside all that a program takes."""
        return [
            live.buffer
            for number in claim.arguments
            if number not in claim.donated
            and (live := self._live.get(number))
            and not (number in claim.exported and live.is_only_on_host)
        ]

    def needs_of(self, claim: Claim) -> dict[str, int]:
        """Return by placement what a program takes beyond what is there already."""
        needs = dict(claim.scratch_bytes)
        for output in claim.outputs:
            needs[output.placement] = needs.get(output.placement, 0) + output.size_bytes
        for number in claim.arguments:
            live = self._live.get(number)
            if live is None:
                continue  # it was lost or never came, and the program will hear of it
            if number in claim.exported and live.is_only_on_host:
                continue
            size = live.buffer.size_bytes
            is_taken_over = number in claim.donated
            missing = (0 if live.is_on_device else size) - (
                size if is_taken_over else 0
            )
            placement = live.buffer.placement
            needs[placement] = needs.get(placement, 0) + missing
        return needs

    def are_settled(self, numbers: Iterable[int]) -> bool:
        """Whether none of these is about to leave its devices."""
        for number in numbers:
            live = self._live.get(number)
            if live is not None and live.is_spilling:
                return False
        return True

    def enter_devices(self, live: Live) -> None:
        """Count a buffer on its devices, and on hosts no longer."""
        buffer = live.buffer
        live.is_on_device = True
        self.devices.add(buffer.placement, buffer.size_bytes)
        if live.label is not None and live.is_made:
            self._gauge(live.label, buffer)
        self._leave_hosts(live)

    def made(self, live: Live) -> None:
        """Take note that what makes a buffer is over; a gauge counts it from now on."""
        live.is_made = True
        if live.label is not None and live.is_on_device:
            self._gauge(live.label, live.buffer)

    def count(self, number: int, label: Label) -> None:
        """Have a gauge count a buffer, and no other gauge any more.

        It may be promised later, as a call waits until it is compiled.
        """
        live = self._live.get(number)
        if live is None:
            self._labels[number] = label
            return
        is_counted = live.is_made and live.is_on_device
        if live.label is not None and is_counted:
            self._gauge(live.label, live.buffer, has_left=True)
        live.label = label
        if is_counted:
            self._gauge(label, live.buffer)

    def spill(self, live: Live, *, is_forced: bool = False) -> bool:
        """Count a buffer on its hosts too while it is copied; False if without room."""
        buffer = live.buffer
        needs = {buffer.placement: buffer.host_bytes}
        if self.hosts.shortage(needs) and not is_forced:
            return False
        live.is_spilling = live.is_on_host = True
        self.hosts.add(buffer.placement, buffer.host_bytes)
        return True

    def spilled(self, live: Live) -> None:
        """Count a buffer on its devices no longer, now that it is copied."""
        live.is_spilling = False
        self._leave_devices(live)

    def put_elsewhere(
        self, placement: str, devices: Iterable[str], hosts: Iterable[str]
    ) -> None:
        """Name other devices and hosts; what is on the hosts goes with it."""
        moved = [live for live in self.on(placement) if live.is_on_host]
        for live in moved:
            self.hosts.add(placement, -live.buffer.host_bytes)
        self.devices.unplace(placement)
        self.hosts.unplace(placement)
        self.devices.place(placement, devices)
        self.hosts.place(placement, hosts)
        for live in moved:
            self.hosts.add(placement, live.buffer.host_bytes)

    def replace(self, buffer: Buffer, *, is_arriving: bool = False) -> None:
        """Take note of what a buffer is from now on, as its placement has moved."""
        live = self._live.get(buffer.number)
        if live is None:
            return
        if live.is_on_host:
            change = buffer.host_bytes - live.buffer.host_bytes
            self.hosts.add(buffer.placement, change)
        live.buffer, live.is_spilling = buffer, is_arriving

    def lose(self, number: int, *, is_kept: bool) -> None:
        """Count a buffer on its devices no longer, and on hosts only if it is kept."""
        live = self._live[number]
        if not is_kept:
            self.forget(number)
            return
        live.is_spilling = False
        self._leave_devices(live)
        if not live.is_on_host:
            live.is_on_host = True
            self.hosts.add(live.buffer.placement, live.buffer.host_bytes)

    def forget(self, number: int) -> None:
        """Count a buffer nowhere any more."""
        live = self._live.pop(number, None)
        if live is None:
            self._labels.pop(number, None)
        else:
            self._leave_devices(live)
            self._leave_hosts(live)

    def _leave_devices(self, live: Live) -> None:
        if live.is_on_device:
            live.is_on_device = False
            self.devices.add(live.buffer.placement, -live.buffer.size_bytes)
            if live.label is not None and live.is_made:
                self._gauge(live.label, live.buffer, has_left=True)

    def _gauge(self, label: Label, buffer: Buffer, *, has_left: bool = False) -> None:
        change = label.gauge.leave if has_left else label.gauge.enter
        change(label.group, label.item, buffer.size_bytes)

    def _leave_hosts(self, live: Live) -> None:
        if live.is_on_host:
            live.is_on_host = False
            self.hosts.add(live.buffer.placement, -live.buffer.host_bytes)
