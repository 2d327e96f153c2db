"""What clients ask for and what they are given: virtual slices, as values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from timelyml.errors import SliceError
from timelyml.ml.resources.inventory import MAX_MESH_DIMENSIONS


@dataclass(frozen=True, slots=True)
class SliceRequest:
    """A virtual slice that a client asks for, on one island.

    Attributes:
        name: Unique among the slices of all clients.
        shape: Mesh axes with their sizes, 1 to 3 of them, such as
            `(("data", 2), ("model", 2))`.
        kind: Kind of device; any one kind if None.
        island: Island; any if None.
        memory_bytes: Reserved on every device for this slice alone; 0 shares.
        is_adjacent: Neighbours in the slice must be neighbours in the island's mesh;
            otherwise they are where that is possible.

    Raises:
        SliceError: The shape is none.
    """

    client: str
    name: str
    shape: tuple[tuple[str, int], ...]
    kind: str | None = None
    island: str | None = None
    memory_bytes: int = 0
    is_adjacent: bool = False

    def __post_init__(self) -> None:
        sizes = [size for _, size in self.shape]
        axes = [axis for axis, _ in self.shape]
        is_shape = 1 <= len(axes) <= MAX_MESH_DIMENSIONS and len(set(axes)) == len(axes)
        if not is_shape or not all(isinstance(s, int) and s >= 1 for s in sizes):
            raise SliceError(
                f"slice {self.name!r} has an impossible shape; got {dict(self.shape)!r}; "
                f"expected 1 to {MAX_MESH_DIMENSIONS} axes of 1 device or more, each "
                f'axis once; write it as {{"data": 2, "model": 2}}',
                slice=self.name,
            )
        if self.memory_bytes < 0:
            raise SliceError(
                f"slice {self.name!r} reserves less than nothing; got memory_bytes="
                f"{self.memory_bytes}; expected 0 or more bytes per device; leave it "
                f"out to share memory with other slices",
                slice=self.name,
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(size for _, size in self.shape)

    @property
    def num_devices(self) -> int:
        """How many devices it has."""
        return math.prod(self.sizes)


class SliceState(StrEnum):
    """Where a slice stands."""

    WAITING = "waiting"  # for its first devices
    ACTIVE = "active"
    SUSPENDED = "suspended"  # it holds no devices, and asks for none
    DISPLACED = "displaced"  # its devices are gone or withdrawn; it waits for others
    MOVING = "moving"  # new devices are being prepared, it still runs on the old ones


@dataclass(frozen=True, slots=True)
class Granted:
    """A slice has its first devices, in row-major order of its shape."""

    client: str
    slice: str
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TimedOut:
    """A request has waited as long as its client would; it is withdrawn."""

    client: str
    slice: str
    error: SliceError


@dataclass(frozen=True, slots=True)
class Prepare:
    """Compile for `devices`, while the slice still runs where it is.

    Answered by `ResourceManager.prepared` with the ticket.
    """

    client: str
    slice: str
    devices: tuple[str, ...]
    ticket: int


@dataclass(frozen=True, slots=True)
class Vacate:
    """Let what runs come to its end, and take the buffers to host memory.

    Answered by `ResourceManager.vacated` with the ticket. Programs of the slice wait
    until it is `Remapped`.
    """

    client: str
    slice: str
    devices: tuple[str, ...]
    ticket: int


@dataclass(frozen=True, slots=True)
class Remapped:
    """A slice stands on these devices from now on, in row-major order of its shape.

    Attributes:
        before: Where it stood last; empty if those devices died.
    """

    client: str
    slice: str
    devices: tuple[str, ...]
    before: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Released:
    """Nobody has a slice any more; its devices and memory are free."""

    client: str
    slice: str


@dataclass(frozen=True, slots=True)
class Displaced:
    """Devices of a slice died with what only they held; it waits for others."""

    client: str
    slice: str
    lost: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Freed:
    """No slice stands on these withdrawn devices any more."""

    devices: tuple[str, ...]


ResourceEffect: TypeAlias = (
    Granted | TimedOut | Prepare | Vacate | Remapped | Released | Displaced | Freed
)
