"""The devices there are: islands, hosts, kinds, memory and mesh coordinates.

An island is a set of devices whose collectives work among themselves; a host is a
process that owns some of them. Devices join and leave with their host, and can be
withdrawn from use and given back while it runs (the paper's section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from timelyml.errors import ConfigError, PlacementError

MAX_MESH_DIMENSIONS = 3


@dataclass(frozen=True, slots=True)
class Device:
    """One physical device.

    Attributes:
        name: Unique in the cluster, such as `island0/host1/device3`.
        kind: What it is, such as `cpu` or `NVIDIA H200`.
        memory_bytes: What buffers and temporaries may take on it.
        coordinates: Its place in the mesh of its island; up to three numbers. Devices
            are neighbours if these differ by one in one place.
        generation: How often its island had formed anew before it came; collectives do
            not work between devices of several.
    """

    name: str
    island: str
    host: str
    kind: str
    memory_bytes: int
    coordinates: tuple[int, ...]
    generation: int = 0

    def __post_init__(self) -> None:
        if self.memory_bytes <= 0:
            raise ConfigError(
                f"device {self.name!r} has no memory; got {self.memory_bytes!r} bytes; "
                f"expected more than 0; state what buffers may take on it",
                option="memory_bytes",
            )
        is_mesh = 1 <= len(self.coordinates) <= MAX_MESH_DIMENSIONS
        if not is_mesh or min(self.coordinates) < 0:
            raise ConfigError(
                f"device {self.name!r} has impossible coordinates; got "
                f"{self.coordinates!r}; expected 1 to {MAX_MESH_DIMENSIONS} whole "
                f"numbers from 0; number the devices of an island if it has no mesh",
                option="coordinates",
            )


class Inventory:
    """All devices by name, island and host, with those withdrawn from use.

    >>> device = Device("a/h/0", "a", "h", "cpu", 1 << 30, (0,))
    >>> inventory = Inventory()
    >>> inventory.add_host("h", [device])
    >>> inventory.withdraw(["a/h/0"])
    >>> list(inventory.usable()), list(inventory) == [device]
    ([], True)
    """

    def __init__(self) -> None:
        self._devices: dict[str, Device] = {}
        self._hosts: dict[str, tuple[str, ...]] = {}
        self._withdrawn: set[str] = set()

    def __iter__(self) -> Iterator[Device]:
        return iter(self._devices.values())

    def __contains__(self, name: object) -> bool:
        return name in self._devices

    def __getitem__(self, name: str) -> Device:
        return self._devices[name]

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts, in the order in which they joined."""
        return tuple(self._hosts)

    def add_host(self, host: str, devices: Sequence[Device]) -> None:
        """Let a host join with its devices.

        Raises:
            PlacementError: The host or a device is there already, a device belongs to
                another host, or two devices of an island share coordinates or differ
                in how many they have.
        """
        problem = self._problem(host, devices)
        if problem:
            raise PlacementError(
                f"host {host!r} cannot join; {problem}; give every host, device and "
                f"place in a mesh to one only",
                host=host,
            )
        self._hosts[host] = tuple(device.name for device in devices)
        self._devices.update({device.name: device for device in devices})

    def remove_host(self, host: str) -> tuple[Device, ...]:
        """Forget a host and its devices; returns them.

        Raises:
            PlacementError: There is no such host.
        """
        if host not in self._hosts:
            raise PlacementError(
                f"host {host!r} cannot leave; got a name that is unknown; expected one "
                f"of {sorted(self._hosts)}; see the hosts of the cluster",
                host=host,
            )
        names = self._hosts.pop(host)
        self._withdrawn.difference_update(names)
        return tuple(self._devices.pop(name) for name in names)

    def withdraw(self, names: Iterable[str]) -> None:
        """Take devices out of use until `restore`.

        Raises:
            PlacementError: A device is unknown.
        """
        self._withdrawn.update(self._checked(names))

    def restore(self, names: Iterable[str]) -> None:
        """Give devices back to use.

        Raises:
            PlacementError: A device is unknown.
        """
        self._withdrawn.difference_update(self._checked(names))

    def is_usable(self, name: str) -> bool:
        """Whether a device is there and not withdrawn."""
        return name in self._devices and name not in self._withdrawn

    def usable(self) -> Iterator[Device]:
        """Return the devices that are in use or could be."""
        return (each for each in self if each.name not in self._withdrawn)

    def describe(self) -> str:
        """Say in a line what there is, for errors.

        >>> inventory = Inventory()
        >>> devices = [Device(f"a/h/{i}", "a", "h", "cpu", 1 << 30, (i,)) for i in (0, 1)]
        >>> inventory.add_host("h", devices)
        >>> inventory.describe()
        'island a: 2 of kind cpu with 1,024 MiB each'
        """
        counts: dict[tuple[str, str, int], int] = {}
        for device in self.usable():
            key = (device.island, device.kind, device.memory_bytes)
            counts[key] = counts.get(key, 0) + 1
        lines = [
            f"island {island}: {count} of kind {kind} with {size >> 20:,} MiB each"
            for (island, kind, size), count in sorted(counts.items())
        ]
        return ", ".join(lines) or "no devices"

    def _checked(self, names: Iterable[str]) -> list[str]:
        found = list(names)
        if unknown := sorted(set(found) - self._devices.keys()):
            raise PlacementError(
                f"devices are unknown; got {unknown[:5]}; expected ones that joined "
                f"with a host; see the devices of the cluster",
                devices=unknown,
            )
        return found

    def _problem(self, host: str, devices: Sequence[Device]) -> str:
        """Say what is wrong about a host that wants to join; empty if nothing is."""
        if host in self._hosts:
            return "got its name again; expected a new one"
        taken = {_place_of(each): each.name for each in self}
        ranks = {_mesh_of(each): len(each.coordinates) for each in self}
        seen = set(self._devices)
        for device in devices:
            place = _place_of(device)
            if device.host != host:
                return (
                    f"got {device.name!r} of {device.host!r}; expected its own devices"
                )
            if device.name in seen:
                return f"got device {device.name!r} twice; expected new names"
            if place in taken:
                return (
                    f"got {device.name!r} at {device.coordinates} of island "
                    f"{device.island!r}; expected another place than {taken[place]!r}'s"
                )
            rank = ranks.setdefault(_mesh_of(device), len(device.coordinates))
            if rank != len(device.coordinates):
                return (
                    f"got {device.name!r} with {len(device.coordinates)} coordinates; "
                    f"expected {rank} as in the rest of island {device.island!r}"
                )
            seen.add(device.name)
            taken[place] = device.name
        return ""


def _mesh_of(device: Device) -> tuple[str, int]:
    """An island that forms anew may be another mesh beside what it was."""
    return device.island, device.generation


def _place_of(device: Device) -> tuple[str, int, tuple[int, ...]]:
    return device.island, device.generation, device.coordinates
