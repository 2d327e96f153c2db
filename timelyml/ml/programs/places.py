"""Slices as programs name them, and where they stand once that is known."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from timelyml.errors import ProgramError
from timelyml.ml.functions import LogicalMesh


@dataclass(frozen=True)  # no slots: a place is looked up by its hash at every call
class Place:
    """Where a slice stands: its devices in row-major order of its mesh.

    Attributes:
        hosts: The host of each device.
    """

    island: str
    devices: tuple[str, ...]
    hosts: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.devices) != len(self.hosts):
            raise ProgramError(
                f"a place names a host for each device; got {len(self.devices)} devices "
                f"and {len(self.hosts)} hosts; expected as many"
            )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.island, self.devices, self.hosts))

    @cached_property
    def shards_by_host(self) -> dict[str, tuple[int, ...]]:
        """For each host the positions of its devices, hosts in order of their first."""
        found: dict[str, list[int]] = {}
        for position, host in enumerate(self.hosts):
            found.setdefault(host, []).append(position)
        return {host: tuple(each) for host, each in found.items()}


@dataclass(frozen=True, slots=True)
class SliceNode:
    """A slice that a program uses; `place` once it is known."""

    name: str
    mesh: LogicalMesh
    platform: str
    place: Place | None = None
