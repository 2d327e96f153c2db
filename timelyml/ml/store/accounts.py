"""Bytes used on devices, in one account for all devices that are always used alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from timelyml.ml.resources.groups import DeviceGroups


class MemoryAccounts:
    """What is used of the memory of every device, by placement or by device.

    >>> accounts = MemoryAccounts()
    >>> accounts.add_devices(["d0", "d1"], 100)
    >>> accounts.place("both", ["d0", "d1"])
    >>> accounts.place("one", ["d1"])
    >>> accounts.add("both", 60)
    >>> accounts.shortage(accounts.by_group({"one": 50}))
    {1: 10}
    """

    def __init__(self) -> None:
        self._groups = DeviceGroups()
        self._capacity: dict[int, int] = {}
        self._used: dict[int, int] = {}

    def __len__(self) -> int:
        """Return how many groups of devices are told apart."""
        return len(self._groups)

    def add_devices(self, devices: Iterable[str], memory_bytes: int) -> None:
        """Make devices known that all have this much memory."""
        group = self._groups.add_devices(devices)
        self._capacity[group] = memory_bytes
        self._used[group] = 0

    def place(self, placement: str, devices: Iterable[str]) -> None:
        """Name a set of devices."""
        for split in self._groups.register(placement, devices):
            self._capacity[split.child] = self._capacity[split.parent]
            self._used[split.child] = self._used[split.parent]

    def unplace(self, placement: str) -> None:
        """Forget a set of devices."""
        self._groups.unregister(placement)

    def groups_of(self, placement: str) -> tuple[int, ...]:
        """Return the groups of a set, as they are now."""
        return self._groups.of(placement)

    def add(self, placement: str, size_bytes: int) -> None:
        """Count so many bytes on each device of a set, or off if negative."""
        for group in self._groups.of(placement):
            self._used[group] += size_bytes

    def by_group(self, needs: Mapping[str, int]) -> dict[int, int]:
        """Sum needs by placement for each group of devices."""
        found: dict[int, int] = {}
        for placement, size in needs.items():
            for group in self._groups.of(placement):
                found[group] = found.get(group, 0) + size
        return found

    def shortage(self, needs: Mapping[int, int]) -> dict[int, int]:
        """Return by group how many bytes are missing for these needs; empty if none."""
        return {
            group: missing
            for group, size in needs.items()
            if (missing := self._used[group] + size - self._capacity[group]) > 0
        }

    def tightest(self, placement: str, needs: Mapping[str, int]) -> tuple[int, int]:
        """Return the need and the capacity of the device of a set that has least left."""
        sums = self.by_group(needs)
        groups = self._groups.of(placement)
        worst = max(groups, key=lambda group: sums[group] - self._capacity[group])
        return sums[worst], self._capacity[worst]

    def used_bytes(self) -> dict[str, int]:
        """Return what is used on each device."""
        return {
            device: self._used[group]
            for group in self._groups
            for device in self._groups.members(group)
        }
