"""What clients and the controller tell each other about slices and devices that change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChangeSlice:
    """Change where a slice stands; `Acknowledged` or `Refused` answers once it is so.

    Attributes:
        change: "suspend", "resume" or "migrate".
        island: Where to migrate; any if None.
    """

    request: int
    slice: str
    change: str
    island: str | None = None


@dataclass(frozen=True, slots=True)
class ChangeDevices:
    """Take devices out of use, or give them back; `Acknowledged` or `Refused` answers.

    Attributes:
        devices: Names, as `DeviceInfo` has them.
        is_usable: What they are to be; answered once no slice stands on those withdrawn.
        force: Whether to take them from the slices of other clients.
    """

    request: int
    devices: tuple[str, ...]
    is_usable: bool
    force: bool = False


MAX_HOSTS = 1024
"""Of an island that forms anew: they are started at once, so a slip must not be many."""


@dataclass(frozen=True, slots=True)
class ReformIsland:
    """Have other processes take the place of an island's; answered once it is so.

    Attributes:
        force: Whether to do so under the slices of other clients.
    """

    request: int
    island: str
    num_hosts: int
    force: bool = False


@dataclass(frozen=True, slots=True)
class AskDevices:
    """Ask which devices there are; `Devices` answers."""

    request: int


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device of a cluster.

    Attributes:
        name: Its host and its position there.
        kind: What the maker calls it.
        memory_bytes: What values and computations may take on it.
        coordinates: Its place in the mesh of its island.
        is_usable: Whether slices may get it; not if it was withdrawn.
        slices: Those that stand on it.
    """

    name: str
    island: str
    host: str
    kind: str
    memory_bytes: int
    coordinates: tuple[int, ...]
    is_usable: bool
    slices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Devices:
    """All devices there are, by island."""

    request: int
    devices: tuple[DeviceInfo, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """A slice stands elsewhere; attributes as of `SliceGiven`."""

    slice: str
    island: str
    platform: str
    devices: tuple[tuple[int, int], ...]
