"""The device sets of an island: their hosts, and what is under way on their devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from timelyml.errors import ProgramError
from timelyml.ml.resources.groups import DeviceGroups
from timelyml.ml.scheduling.accounts import Accounts

KEPT_BUSY = 2
"""Launches that a device may have however long they are: one runs, and one is next. With
one alone it had nothing to do from its end until the news of it had come to the
controller and the next order back: 1 to 5 ms on two busy cores."""


@dataclass(slots=True)
class _Load:
    """Launches under way on one group of devices."""

    num_unfinished: int = 0
    pending_ns: int = 0


class Placements:
    """Named device sets with bounded work under way on every device.

    A device takes another launch while it has fewer than `max_unfinished`, and less
    than `window_ns` of expected device time, under way, or `window_alone_ns` while it
    has had one client only; however long they are, it takes one to run and one to be
    next.
    """

    def __init__(
        self,
        accounts: Accounts,
        window_ns: int,
        window_alone_ns: int,
        max_unfinished: int,
    ) -> None:
        self._accounts = accounts
        self._window_ns = window_ns
        self._window_alone_ns = window_alone_ns
        self._max_unfinished = max_unfinished
        self._groups = DeviceGroups()
        self._loads: dict[int, _Load] = {}
        self._hosts: dict[str, tuple[str, ...]] = {}
        self._devices: dict[str, tuple[str, ...]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._hosts

    @property
    def num_groups(self) -> int:
        """How many groups of devices are told apart."""
        return len(self._groups)

    def add(self, name: str, devices_by_host: Mapping[str, Sequence[str]]) -> None:
        """Register a device set.

        Raises:
            ProgramError: The name is taken, or a host of it has no devices.
        """
        if name in self._hosts:
            raise ProgramError(
                f"placement {name!r} is there already; got it again; expected a new "
                f"name; move it instead",
                placement=name,
            )
        self.check(name, devices_by_host)
        devices = tuple(d for each in devices_by_host.values() for d in each)
        if new := [device for device in devices if device not in self._groups]:
            self._loads[self._groups.add_devices(new)] = _Load()
        for split in self._groups.register(name, devices):
            before = self._loads[split.parent]
            load = _Load(before.num_unfinished, before.pending_ns)
            self._loads[split.child] = load
            self._accounts.split(split.parent, split.child)
        self._hosts[name] = tuple(devices_by_host)
        self._devices[name] = devices

    def check(self, name: str, devices_by_host: Mapping[str, Sequence[str]]) -> None:
        """Raise unless there are devices, on each host, and none twice."""
        devices = [d for each in devices_by_host.values() for d in each]
        is_whole = all(devices_by_host.values()) and bool(devices)
        if not is_whole or len(set(devices)) < len(devices):
            raise ProgramError(
                f"placement {name!r} has impossible devices; got "
                f"{dict(devices_by_host)!r}; expected at least one on each host, each "
                f"device once",
                placement=name,
            )

    def remove(self, name: str) -> None:
        """Forget a set on which nothing runs, and devices that no other set uses."""
        self._groups.unregister(name)
        del self._hosts[name], self._devices[name]
        used = {group for other in self._hosts for group in self._groups.of(other)}
        for group in [group for group in self._groups if group not in used]:
            self._groups.remove_devices(self._groups.members(group))
            del self._loads[group]
            self._accounts.drop_group(group)

    def groups_of(self, name: str) -> tuple[int, ...]:
        """Return the groups of a set, as they are now."""
        return self._groups.of(name)

    def hosts_of(self, name: str) -> tuple[str, ...]:
        """Return the hosts of a set."""
        return self._hosts[name]

    def devices_of(self, name: str) -> tuple[str, ...]:
        """Return the devices of a set."""
        return self._devices[name]

    def has_room(self, groups: Iterable[int]) -> bool:
        """Whether all of these groups take another launch."""
        return all(map(self._has_room, groups))

    def has_any_room(self) -> bool:
        """Whether some device takes another launch."""
        return any(map(self._has_room, self._loads))

    def launch(self, name: str, estimate_ns: int) -> None:
        """Count a launch that is decided."""
        for group in self._groups.of(name):
            load = self._loads[group]
            load.num_unfinished += 1
            load.pending_ns += estimate_ns

    def complete(self, name: str, estimate_ns: int) -> None:
        """Count a launch that is over; with the estimate it was launched with."""
        for group in self._groups.of(name):
            load = self._loads[group]
            load.num_unfinished -= 1
            load.pending_ns -= estimate_ns

    def _has_room(self, group: int) -> bool:
        load = self._loads[group]
        if load.num_unfinished >= self._max_unfinished:
            return False
        if load.num_unfinished < KEPT_BUSY:
            return True
        is_alone = self._accounts.num_clients(group) < 2
        return load.pending_ns < (
            self._window_alone_ns if is_alone else self._window_ns
        )
