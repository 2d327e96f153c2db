"""What every device carries: how many slices, and bytes reserved for them."""

from __future__ import annotations

from collections.abc import Iterable

from timelyml.ml.resources.fitting import Load
from timelyml.ml.resources.inventory import Device

_FULL = 1 << 30  # slices


class Loads:
    """Counts of slices and reserved bytes by device.

    >>> loads = Loads()
    >>> loads.add(["d"], 100)
    >>> loads.add(["d"], 0)
    >>> device = Device("d", "a", "h", "cpu", 150, (0,))
    >>> loads.of(device), loads.has_room(device, 60), loads.has_room(device, 50)
    ((2, 100), False, True)
    """

    def __init__(self) -> None:
        self._num_slices: dict[str, int] = {}
        self._reserved: dict[str, int] = {}

    def add(self, names: Iterable[str], memory_bytes: int) -> None:
        """Count a slice on these devices."""
        for name in names:
            self._num_slices[name] = self._num_slices.get(name, 0) + 1
            self._reserved[name] = self._reserved.get(name, 0) + memory_bytes

    def drop(self, names: Iterable[str], memory_bytes: int) -> None:
        """Count a slice off again."""
        for name in names:
            self._num_slices[name] -= 1
            self._reserved[name] -= memory_bytes
            if not self._num_slices[name]:
                del self._num_slices[name], self._reserved[name]

    def of(self, device: Device) -> Load:
        """Return the number of slices on a device and the bytes they reserve.

        One of which all is reserved counts as carrying more than any other: who shares
        it can compute nothing there.
        """
        num_slices = self._num_slices.get(device.name, 0)
        reserved = self._reserved.get(device.name, 0)
        is_full = reserved >= device.memory_bytes
        return num_slices + (_FULL if is_full else 0), reserved

    def is_free(self, name: str) -> bool:
        """Whether no slice stands on a device or moves to it."""
        return name not in self._num_slices

    def has_room(self, device: Device, memory_bytes: int) -> bool:
        """Whether so much can still be reserved on a device."""
        free_bytes = device.memory_bytes - self._reserved.get(device.name, 0)
        return memory_bytes <= free_bytes
