"""Copies of buffers in host memory, which take their place while nobody uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from timelyml.ml.functions import ArrayType
from timelyml.ml.functions.types import is_key
from timelyml.ml.hosts.boxes import Box
from timelyml.ml.hosts.messages import Piece
from timelyml.ml.hosts.slices import HostSlice, box_of, pieces_of, words_of


@dataclass(frozen=True, slots=True)
class HostCopy:
    """All that this process had of an array on its devices.

    Attributes:
        sharding: How it lay on its devices, and will again.
        shape: Of the whole.
        parts: By box, each once however many devices held it; of keys their words.
        key_impl: Of typed keys, their implementation.
    """

    sharding: jax.sharding.Sharding
    shape: tuple[int, ...]
    parts: Mapping[Box, np.ndarray[Any, Any]]
    key_impl: str | None

    @classmethod
    def of(cls, array: jax.Array) -> HostCopy:
        """Copy an array; waits until it is computed, and raises what that raised."""
        of_keys = is_key(array.dtype)
        parts: dict[Box, np.ndarray[Any, Any]] = {}
        for shard in array.addressable_shards:
            box = box_of(shard.index, array.shape)
            if box not in parts:
                # A view of device memory would keep it, or change with it.
                parts[box] = np.array(words_of(shard.data, is_key=of_keys))
        impl = str(jax.random.key_impl(array)) if of_keys else None
        return cls(array.sharding, array.shape, parts, impl)

    @classmethod
    def of_parts(
        cls,
        array_type: ArrayType,
        sharding: jax.sharding.Sharding,
        parts: Mapping[Box, np.ndarray[Any, Any]],
    ) -> HostCopy:
        """Make the copy of an array that this process never had on its devices."""
        return cls(sharding, array_type.shape, parts, array_type.key_impl)

    def to_lie_on(self, slice_: HostSlice) -> HostCopy:
        """Return the copy to be brought to the devices where its slice stands now."""
        spec = getattr(self.sharding, "spec")  # noqa: B009 - as of all that a slice has
        return replace(self, sharding=NamedSharding(slice_.mesh, spec))

    def to_devices(self) -> jax.Array:
        """Return the array, on the devices that it was on."""
        indices = self.sharding.addressable_devices_indices_map(self.shape)
        with jax.enable_x64(True):  # or 64-bit elements would be cut
            shards = [
                jax.device_put(self.parts[box_of(index, self.shape)], device)
                for device, index in indices.items()
                if index is not None
            ]
            if self.key_impl is not None:
                shards = [
                    jax.random.wrap_key_data(each, impl=self.key_impl)
                    for each in shards
                ]
            return jax.make_array_from_single_device_arrays(
                self.shape, self.sharding, shards
            )

    def pieces(self, boxes: Sequence[Box]) -> tuple[Piece, ...]:
        """Return pieces of it, as views."""
        return pieces_of(self.parts, boxes, is_key=False)
