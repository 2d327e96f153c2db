"""Buffers that take memory: on which devices and hosts, and whether they could leave."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

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

    def promise(self, buffers: Iterable[Buffer]) -> None:
        """Make buffers known that a program will make."""
        for buffer in buffers:
            live = self._live[buffer.number] = Live(buffer)
            if self._labels:
                live.label = self._labels.pop(buffer.number, None)

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
        taken = set(claim.donated)
        exported = claim.exported
        for number in claim.arguments:
            live = self._live.get(number)
            if live is None:
                continue  # it was lost or never came, and the program will hear of it
            if exported and live.is_only_on_host and number in exported:
                continue
            buffer, missing = live.buffer, 0 if live.is_on_device else 1
            if number in taken:
                missing -= 1
            placement = buffer.placement
            needs[placement] = needs.get(placement, 0) + missing * buffer.size_bytes
        return needs

    def are_settled(self, numbers: Iterable[int]) -> bool:
        """Whether none of these is about to leave its devices."""
        for number in numbers:
            live = self._live.get(number)
            if live is not None and live.is_spilling:
                return False
        return True

    def take(self, claim: Claim) -> list[Buffer]:
        """Have a program use its arguments; return those that have to come back to it.

        They are the ones most recently used from now on.
        """
        used: list[Live] = []
        for number in claim.arguments:
            live = self._live.pop(number, None)
            if live is not None:
                self._live[number] = live
                live.num_users += 1
                used.append(live)
        exported = claim.exported
        returned = [
            live
            for live in used
            if not live.is_on_device
            and not (live.is_on_host and live.buffer.number in exported)
        ]
        self._enter_devices(returned)
        return [live.buffer for live in returned]

    def make(self, claim: Claim) -> None:
        """Have a program make its outputs, which take memory from now on."""
        found = [self._live.get(each.number) for each in claim.outputs]
        made = [live for live in found if live is not None]
        for live in made:
            live.num_users += 1
        self._enter_devices(made)

    def leave(self, numbers: Iterable[int]) -> list[int]:
        """Take note that a program uses buffers no longer; return those that are over."""
        for number in numbers:
            if (live := self._live.get(number)) is not None:
                live.num_users -= 1
        return self.over(numbers)

    def made(self, numbers: Sequence[int]) -> list[int]:
        """Take note that what makes buffers is over; return those that are over too.

        Gauges count them from now on.
        """
        for number in numbers:
            live = self._live.get(number)
            if live is None:
                continue
            live.is_made = True
            if live.label is not None and live.is_on_device:
                self._gauge(live.label, live.buffer)
        return self.leave(numbers)

    def free(self, numbers: Iterable[int]) -> list[int]:
        """Take note that nobody can ask for buffers any more; return what is over."""
        over: list[int] = []
        for number in numbers:
            live = self._live.get(number)
            if live is not None:
                live.is_freed = True
            if live is None or _is_over(live):
                over.append(number)
        return over

    def over(self, numbers: Iterable[int]) -> list[int]:
        """Return the buffers that nobody can ask for and no program uses."""
        found: list[int] = []
        for number in numbers:
            live = self._live.get(number)
            if live is not None and _is_over(live):
                found.append(number)
        return found

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
        self._leave_devices([live])

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
            self.forget([number])
            return
        live.is_spilling = False
        self._leave_devices([live])
        if not live.is_on_host:
            live.is_on_host = True
            self.hosts.add(live.buffer.placement, live.buffer.host_bytes)

    def forget(self, numbers: Iterable[int]) -> None:
        """Count buffers nowhere any more."""
        found: list[Live] = []
        for number in numbers:
            live = self._live.pop(number, None)
            if live is not None:
                found.append(live)
            elif self._labels:
                self._labels.pop(number, None)
        self._leave_devices(found)
        for live in found:
            self._leave_hosts(live)

    def _enter_devices(self, entering: Sequence[Live]) -> None:
        """Count buffers on their devices, and on hosts no longer."""
        sizes: dict[str, int] = {}
        for live in entering:
            buffer = live.buffer
            sizes[buffer.placement] = sizes.get(buffer.placement, 0) + buffer.size_bytes
            live.is_on_device = True
            if live.label is not None and live.is_made:
                self._gauge(live.label, buffer)
            self._leave_hosts(live)
        for placement, size_bytes in sizes.items():
            self.devices.add(placement, size_bytes)

    def _leave_devices(self, leaving: Sequence[Live]) -> None:
        sizes: dict[str, int] = {}
        for live in leaving:
            if not live.is_on_device:
                continue
            live.is_on_device = False
            buffer = live.buffer
            sizes[buffer.placement] = sizes.get(buffer.placement, 0) + buffer.size_bytes
            if live.label is not None and live.is_made:
                self._gauge(live.label, buffer, has_left=True)
        for placement, size_bytes in sizes.items():
            self.devices.add(placement, -size_bytes)

    def _gauge(self, label: Label, buffer: Buffer, *, has_left: bool = False) -> None:
        change = label.gauge.leave if has_left else label.gauge.enter
        change(label.group, label.item, buffer.size_bytes)

    def _leave_hosts(self, live: Live) -> None:
        if live.is_on_host:
            live.is_on_host = False
            self.hosts.add(live.buffer.placement, -live.buffer.host_bytes)


def _is_over(live: Live) -> bool:
    return live.is_freed and not live.num_users and not live.num_waiting
