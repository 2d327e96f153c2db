"""Bytes used on devices, in one account for all devices that are always used alike.

A placement may reserve some: what it has not taken of that counts as used for all others.
"""

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
    >>> accounts.shortage({"one": 50})
    {1: 10}
    """

    def __init__(self) -> None:
        self._groups = DeviceGroups()
        self._capacity: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._reserved: dict[str, int] = {}
        self._taken: dict[str, int] = {}  # by placements that reserve, now or at times

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
        """Forget a set of devices, and what it reserves."""
        self._groups.unregister(placement)
        self._reserved.pop(placement, None)
        self._taken.pop(placement, None)

    @property
    def has_reserved(self) -> bool:
        """Whether any memory is reserved."""
        return bool(self._reserved)

    def reserve(self, placement: str, size_bytes: int) -> None:
        """Keep so much of each device of a set from all others; 0: nothing.

        Nothing of it has been counted, or it has reserved before.
        """
        self._taken.setdefault(placement, 0)
        self._reserved.pop(placement, None)
        if size_bytes:
            self._reserved[placement] = size_bytes

    def is_reserved(self, needs: Mapping[str, int]) -> bool:
        """Whether all that is needed lies within what its placements reserve."""
        return self.has_reserved and all(
            size <= 0
            or self._taken.get(placement, 0) + size <= self._reserved.get(placement, 0)
            for placement, size in needs.items()
        )

    def beyond_reserved(self, needs: Mapping[str, int]) -> dict[str, int]:
        """Return what who reserves has taken beyond that, once it has these needs too."""
        return {
            placement: max(0, self._taken[placement] + needs.get(placement, 0) - size)
            for placement, size in self._reserved.items()
        }

    def reserved_beside(self, placement: str) -> dict[str, int]:
        """Return who else reserves memory on devices of a set, and how much."""
        groups = set(self._groups.of(placement))
        return {
            other: size
            for other, size in self._reserved.items()
            if other != placement and not groups.isdisjoint(self._groups.of(other))
        }

    def groups_of(self, placement: str) -> tuple[int, ...]:
        """Return the groups of a set, as they are now."""
        return self._groups.of(placement)

    def add(self, placement: str, size_bytes: int) -> None:
        """Count so many bytes on each device of a set, or off if negative."""
        for group in self._groups.of(placement):
            self._used[group] += size_bytes
        if self._taken and placement in self._taken:
            self._taken[placement] += size_bytes

    def by_group(self, needs: Mapping[str, int]) -> dict[int, int]:
        """Sum needs by placement for each group of devices."""
        found: dict[int, int] = {}
        for placement, size in needs.items():
            for group in self._groups.of(placement):
                found[group] = found.get(group, 0) + size
        return found

    def shortage(self, needs: Mapping[str, int]) -> dict[int, int]:
        """Return by group how many bytes are missing for these needs; empty if none.

        What others reserve and have not taken counts as used, but for needs that lie
        within what is reserved for them.
        """
        kept: dict[int, int] = {}
        if self._reserved and not self.is_reserved(needs):
            kept = self._kept_from(needs, self._taken)
        return {
            group: missing
            for group, size in self.by_group(needs).items()
            if (
                missing := self._used[group]
                + size
                + kept.get(group, 0)
                - self._capacity[group]
            )
            > 0
        }

    def tightest(self, placement: str, needs: Mapping[str, int]) -> tuple[int, int]:
        """Return the need and the room of the device of a set that has least left.

        The room is what others leave that reserve some.
        """
        sums = self.by_group(needs)
        kept = self._kept_from(needs, {})
        room = {x: self._capacity[x] - kept.get(x, 0) for x in sums}
        groups = self._groups.of(placement)
        worst = max(groups, key=lambda group: sums[group] - room[group])
        return sums[worst], room[worst]

    def _kept_from(
        self, needs: Mapping[str, int], taken: Mapping[str, int]
    ) -> dict[int, int]:
        """Sum by group what is reserved beyond what is taken and these needs."""
        kept: dict[int, int] = {}
        for placement, size in self._reserved.items():
            left = size - taken.get(placement, 0) - needs.get(placement, 0)
            for group in self._groups.of(placement) if left > 0 else ():
                kept[group] = kept.get(group, 0) + left
        return kept

    def used_bytes(self) -> dict[str, int]:
        """Return what is used on each device."""
        return {
            device: self._used[group]
            for group in self._groups
            for device in self._groups.members(group)
        }
