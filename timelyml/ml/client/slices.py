"""Virtual slices as a client sees them: a shape and a name, no devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from timelyml.errors import ConfigError
from timelyml.ml.client.gauge import MemoryGauge
from timelyml.ml.client.tracing import DeviceTrace
from timelyml.ml.functions import (
    ArrayType,
    Runner,
    Spec,
    partition_spec,
    spec_of,
    type_of,
)
from timelyml.ml.functions.specs import check_spec, logical_mesh


class SliceOwner(Runner, Protocol):
    """Whoever a slice belongs to: a client."""

    def give_back(self, slice_: Slice) -> None:
        """Give a slice back."""

    def put(self, tree: Any, sharding: Any) -> Any:
        """Bring arrays to a slice and return handles in their place."""

    @property
    def resources(self) -> Resources:
        """The devices of the cluster."""


class Resources(Protocol):
    """Who changes where slices stand, and tells what runs there."""

    def trace(self) -> DeviceTrace:
        """Return a context manager that tells what devices did inside of it."""

    def gauge(self) -> MemoryGauge:
        """Return a gauge that tells how much of chosen values devices held at once."""

    def change_slice(
        self, slice_: Slice, change: str, island: str | None, timeout_s: float | None
    ) -> None:
        """Change where a slice stands; returns once it is so."""


@dataclass(slots=True, eq=False)
class Slice:
    """Devices of one island in the shape of a mesh; where they are may change.

    It goes elsewhere between two computations, when it is told to or when its devices
    are taken out of use. What was computed goes with it, and calls wait meanwhile, so a
    program that uses it need not know. Island, platform and devices tell where it
    stands, or stood last.

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

    def suspend(self, *, timeout_s: float | None = None) -> None:
        """Leave the devices to others, and keep all values in the memory of hosts.

        What was called before comes to its end; later calls wait until `resume`. Values can be
        fetched, and taken by calls on other slices. They count as host memory, but wait
        for none.

        Args:
            timeout_s: How long to wait until it is so; it becomes so all the same.

        Raises:
            SliceError: The slice is gone.
            DeadlineError: It was not in time.
        """
        self.client.resources.change_slice(self, "suspend", None, timeout_s)

    def resume(self, *, timeout_s: float | None = None) -> None:
        """Have devices again, perhaps others, and go on; returns once that is so.

        Args:
            timeout_s: How long to wait while others reserve the devices.

        Raises:
            SliceError: The slice is gone.
            DeadlineError: It was not in time; it goes on as soon as there are devices.
        """
        self.client.resources.change_slice(self, "resume", None, timeout_s)

    def migrate(
        self, *, island: str | None = None, timeout_s: float | None = None
    ) -> None:
        """Move to other devices; returns once it stands there.

        All functions are compiled for the target before anything stops at the source.

        Args:
            island: Where to; None: anywhere.
            timeout_s: How long to wait.

        Raises:
            SliceError: There are no other devices for it, or it does not stand on any.
            DeadlineError: It was not in time; it moves all the same.
        """
        self.client.resources.change_slice(self, "migrate", island, timeout_s)

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
    is_right = (
        isinstance(axes, Mapping)
        and bool(axes)
        and all(
            isinstance(name, str) and isinstance(size, int) and size >= 1
            for name, size in axes.items()
        )
    )
    if not is_right:
        raise ConfigError(
            f"a slice has an impossible shape; got {axes!r}; expected names of axes with "
            f'sizes of 1 or more; write {{"data": 2}}',
            option="axes",
        )


def check_demands(memory_bytes: Any, adjacent: Any) -> None:
    """Raise unless a slice may be asked for with these.

    Raises:
        ConfigError: The memory is no number of bytes, or `adjacent` is no bool.
    """
    is_size = isinstance(memory_bytes, int) and not isinstance(memory_bytes, bool)
    if memory_bytes is not None and not (is_size and memory_bytes >= 0):
        raise ConfigError(
            f"a slice cannot reserve what is no memory; got {memory_bytes!r}; expected a "
            f"whole number of bytes, 0 or more; leave it out to share",
            option="memory_bytes",
        )
    if not isinstance(adjacent, bool):
        raise ConfigError(
            f"a slice has neighbours or not; got adjacent={adjacent!r}; expected True or "
            f"False; leave it out to take devices by load",
            option="adjacent",
        )


def placed_leaves(
    tree: Any, sharding: Any, client: object
) -> tuple[list[tuple[Any, Slice, ArrayType, Spec]], Any]:
    """Return each leaf of a tree, and how it is to lie; and the structure of the tree.

    Raises:
        ConfigError: A sharding is none of a slice of this client, or does not fit.
        TypeError: A leaf is no array.
    """
    leaves, treedef = jax.tree.flatten(tree)
    full = jax.tree.broadcast(sharding, tree, is_leaf=_is_sharding)
    placed = []
    for leaf, each in zip(
        leaves, jax.tree.leaves(full, is_leaf=_is_sharding), strict=True
    ):
        if not isinstance(each, SliceSharding) or each.slice.client is not client:
            raise ConfigError(
                f"put needs a sharding of a slice of this client; got {each!r}; "
                f"expected slice.sharding(P(...)); ask the client for a slice",
                option="sharding",
            )
        array_type, spec = type_of(leaf), spec_of(each.spec)
        mesh = logical_mesh(each.slice.mesh)
        check_spec("what is put", mesh, spec, array_type.shape)
        placed.append((leaf, each.slice, array_type, spec))
    return placed, treedef


def _is_sharding(value: Any) -> bool:
    return isinstance(value, SliceSharding)
