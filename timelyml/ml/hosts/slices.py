"""A virtual slice as a host sees it: real devices, of which some are its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from timelyml.ml.functions import (
    ArrayType,
    LogicalMesh,
    Spec,
    abstract_mesh,
    named_sharding,
)
from timelyml.ml.functions.types import dtype_named
from timelyml.ml.hosts.boxes import Box, boxes_by_device
from timelyml.ml.hosts.messages import Piece, SliceMade


class HostSlice:
    """Devices of an island in the shape of a mesh.

    Attributes:
        devices: All of them, those of other processes included, in row-major order.
        own: Position and device of those that are this process's.
        own_devices: Names of these.
    """

    def __init__(self, made: SliceMade, by_rank: Sequence[Sequence[jax.Device]]):
        self.name = made.name
        self.logical = LogicalMesh(made.axis_names, made.axis_sizes)
        self.devices = tuple(by_rank[rank][index] for rank, index in made.devices)
        grid = np.array(self.devices, dtype=object).reshape(made.axis_sizes)
        axis_types = abstract_mesh(self.logical).axis_types
        self.mesh = Mesh(grid, made.axis_names, axis_types=axis_types)
        rank = jax.process_index()
        self.own = tuple(
            (position, device)
            for position, device in enumerate(self.devices)
            if device.process_index == rank
        )
        self.own_devices = tuple(str(device.id) for _, device in self.own)
        self._shardings: dict[Spec, NamedSharding] = {}

    def sharding(self, spec: Spec) -> NamedSharding:
        """Return the sharding over these devices."""
        found = self._shardings.get(spec)
        if found is None:
            found = self._shardings[spec] = named_sharding(self.mesh, spec)
        return found

    def own_boxes(self, spec: Spec, shape: Sequence[int]) -> list[Box]:
        """Return the box of each own device."""
        boxes = boxes_by_device(self.logical, spec, shape)
        return [boxes[position] for position, _ in self.own]

    def make_array(
        self, array_type: ArrayType, spec: Spec, parts: Mapping[Box, Any]
    ) -> jax.Array:
        """Make the array whose boxes on own devices are given; of keys, their words."""
        boxes = self.own_boxes(spec, array_type.shape)
        impl = array_type.key_impl
        with jax.enable_x64(True):  # or 64-bit elements would be cut
            shards = [
                jax.device_put(parts[box], device)
                for box, (_, device) in zip(boxes, self.own, strict=True)
            ]
            if impl is not None:
                shards = [jax.random.wrap_key_data(each, impl=impl) for each in shards]
            return jax.make_array_from_single_device_arrays(
                array_type.shape, self.sharding(spec), shards
            )


def gather(
    array: jax.Array, array_type: ArrayType, boxes: Sequence[Box]
) -> tuple[Piece, ...]:
    """Return pieces of an array that lie on this process's devices; waits for it."""
    held = {
        box_of(shard.index, array.shape): shard.data
        for shard in array.addressable_shards
    }
    return pieces_of(held, boxes, is_key=array_type.key_impl is not None)


def pieces_of(
    held: Mapping[Box, Any], boxes: Sequence[Box], *, is_key: bool
) -> tuple[Piece, ...]:
    """Return pieces of what is held by box, each from a box that has all of it."""
    pieces = []
    for wanted in boxes:
        for box, data in held.items():
            inside = all(
                a <= c and d <= b for (a, b), (c, d) in zip(box, wanted, strict=True)
            )
            if inside:
                pieces.append(_cut(words_of(data, is_key=is_key), box, wanted))
                break
    return tuple(pieces)


def words_of(data: Any, *, is_key: bool) -> np.ndarray[Any, Any]:
    """Return a view of the elements of a shard; of keys their words."""
    # Keys become words by a computation, on the one device of their shard.
    return np.asarray(jax.random.key_data(data) if is_key else data)


def box_of(index: tuple[slice, ...], shape: Sequence[int]) -> Box:
    """Return the box that JAX names by slices."""
    # The index of a key without dimensions has one for its words.
    return tuple(
        each.indices(length)[:2] for each, length in zip(index, shape, strict=False)
    )


def zeros(array_type: ArrayType, boxes: Sequence[Box]) -> tuple[Piece, ...]:
    """Return pieces of nothing but zeros, in place of what could not be computed."""
    physical = array_type.physical
    words = physical.shape[len(array_type.shape) :]
    dtype = dtype_named(physical.dtype)
    return tuple(
        Piece(
            tuple(start for start, _ in box),
            np.zeros((*(stop - start for start, stop in box), *words), dtype),
        )
        for box in boxes
    )


def _cut(host: np.ndarray[Any, Any], box: Box, wanted: Box) -> Piece:
    inner: tuple[Any, ...] = tuple(
        slice(start - offset, stop - offset)
        for (start, stop), (offset, _) in zip(wanted, box, strict=True)
    )
    return Piece(tuple(start for start, _ in wanted), host[(*inner, ...)])
