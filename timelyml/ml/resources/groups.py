"""Devices that are always used together, so that one account does for all of them.

Scheduling and memory are accounted per device. A slice of 2,048 devices would make
every decision cost 2,048 steps, though all of its devices always hold the same. This
module keeps the coarsest partition of devices in which every registered set of devices
is a union of groups; what is accounted per group costs the same however many devices
a group has. A new set that cuts through a group splits it, and its account is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from timelyml.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Split:
    """A group that lost some of its devices to a new one, `child`."""

    parent: int
    child: int


class DeviceGroups:
    """A partition of devices, of which every registered set takes whole groups.

    >>> groups = DeviceGroups()
    >>> whole = groups.add_devices("abcd")
    >>> groups.register("left", "ab")
    (Split(parent=0, child=1),)
    >>> groups.register("all", "abcd")
    ()
    >>> groups.of("left"), groups.of("all")
    ((1,), (0, 1))
    """

    def __init__(self) -> None:
        self._members: dict[int, set[str]] = {}
        self._group_of: dict[str, int] = {}
        self._sets: dict[str, tuple[int, ...]] = {}
        self._next_group = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, device: object) -> bool:
        return device in self._group_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._members)

    def add_devices(self, devices: Iterable[str]) -> int:
        """Make one group of devices that are new and all alike; return its number."""
        added = set(devices)
        if known := sorted(added & self._group_of.keys()):
            raise InvariantError(f"devices join twice; got {known}; expected new ones")
        return self._new_group(added)

    def remove_devices(self, devices: Iterable[str]) -> tuple[int, ...]:
        """Forget devices, also in registered sets; return the groups that are gone."""
        gone = []
        for device in devices:
            group = self._group_of.pop(device)
            self._members[group].discard(device)
            if not self._members[group]:
                del self._members[group]
                gone.append(group)
        if gone:
            left = {
                name: tuple(group for group in groups if group in self._members)
                for name, groups in self._sets.items()
            }
            self._sets.update(left)
        return tuple(gone)

    def register(self, name: str, devices: Iterable[str]) -> tuple[Split, ...]:
        """Name a set of devices; return the groups that had to be split for it.

        The caller copies what it keeps about each `parent` to its `child`, in order.

        Raises:
            InvariantError: The name is taken, or a device is unknown.
        """
        chosen = set(devices)
        unknown = sorted(chosen - self._group_of.keys())
        if unknown or name in self._sets:
            raise InvariantError(
                f"device set {name!r} cannot be registered; got unknown devices "
                f"{unknown}; expected a new name and known devices"
            )
        by_group: dict[int, set[str]] = {}
        for device in chosen:
            by_group.setdefault(self._group_of[device], set()).add(device)
        splits = tuple(
            self._split(group, inside)
            for group, inside in sorted(by_group.items())
            if len(inside) < len(self._members[group])
        )
        groups = {self._group_of[device] for device in chosen}
        self._sets[name] = tuple(sorted(groups))
        return splits

    def unregister(self, name: str) -> None:
        """Forget a set. Groups stay as they are: there are never more than devices."""
        del self._sets[name]

    def of(self, name: str) -> tuple[int, ...]:
        """Return the groups of a registered set."""
        return self._sets[name]

    def members(self, group: int) -> frozenset[str]:
        """Return the devices of a group."""
        return frozenset(self._members[group])

    def size(self, group: int) -> int:
        """Return how many devices a group has."""
        return len(self._members[group])

    def _new_group(self, devices: set[str]) -> int:
        group = self._next_group
        self._next_group += 1
        self._members[group] = devices
        self._group_of.update(dict.fromkeys(devices, group))
        return group

    def _split(self, parent: int, inside: set[str]) -> Split:
        self._members[parent] -= inside
        child = self._new_group(inside)
        for name, groups in self._sets.items():
            if parent in groups:
                self._sets[name] = (*groups, child)
        return Split(parent, child)
