"""Virtual slices as a client sees them: a shape and a name, no devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from jax.sharding import AbstractMesh, PartitionSpec

from timelyml.errors import ConfigError
from timelyml.ml.functions import Runner, partition_spec


class SliceOwner(Runner, Protocol):
    """Whoever a slice belongs to: a client."""

    def give_back(self, slice_: Slice) -> None:
        """Give a slice back."""

    def put(self, tree: Any, sharding: Any) -> Any:
        """Bring arrays to a slice and return handles in their place."""


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """Devices of one island in the shape of a mesh; where they are may change.

    Attributes:
        name: Unique among the slices of all clients.
        mesh: Its axes, without devices.
        platform: What JAX calls its devices: "cpu", "cuda" or "tpu".
        island: Name of the island that it is on.
        devices: Host and position on the host of each device, in row-major order.
    """

    name: str
    mesh: AbstractMesh
    platform: str
    island: str
    devices: tuple[tuple[int, int], ...]
    client: SliceOwner = field(repr=False)

    def sharding(self, spec: PartitionSpec | None = None) -> SliceSharding:
        """Return a sharding over this slice; without a spec, a copy on each device."""
        return SliceSharding(self, spec or partition_spec(()))

    def close(self) -> None:
        """Give the devices back, once nothing is left on them."""
        self.client.give_back(self)


@dataclass(frozen=True, slots=True)
class SliceSharding:
    """How an array lies on a slice.

    >>> tuple(SliceSharding(None, PartitionSpec("data")).spec)
    ('data',)
    """

    slice: Any
    spec: PartitionSpec

    @property
    def mesh(self) -> AbstractMesh:
        """The mesh of the slice."""
        mesh: AbstractMesh = self.slice.mesh
        return mesh


def check_axes(axes: Mapping[str, int]) -> None:
    """Raise unless these are axes of a mesh.

    Raises:
        ConfigError: There are none, or a name or a size is impossible.
    """
    is_right = bool(axes) and all(
        isinstance(name, str) and isinstance(size, int) and size >= 1
        for name, size in axes.items()
    )
    if not is_right:
        raise ConfigError(
            f"a slice has an impossible shape; got {axes!r}; expected names of axes with "
            f'sizes of 1 or more; write {{"data": 2}}',
            option="axes",
        )
