"""Cuts the gradients of a stage into chunks of one size, and joins chunks to gradients.

Leaves that every device of a slice has whole are laid end to end, one vector for each
element type, so that a chunk is a few arrays however many leaves there are. A leaf that
is cut over devices is cut into chunks in another dimension: its pieces stay where they
are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from timelyml.ml.functions import Spec, partition_spec, type_of
from timelyml.ml.functions.specs import logical_mesh, num_pieces

Chunk: TypeAlias = tuple[Any, ...]
"""An array for each group of leaves."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Leaves that are cut into chunks together.

    Attributes:
        positions: Among the leaves of a stage; one, unless all are vectors here.
        shapes: As they are in the stage.
        shape: As what each is laid end to end with the others.
        axis: The dimension that chunks are cut from, which lies whole everywhere.
        length: Of that dimension, without what is added to fill the last chunk.
        spec: How the other dimensions are cut over devices.
    """

    positions: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    axis: int
    length: int
    spec: Spec

    def cut(self, leaves: Sequence[Any], num_chunks: int) -> list[Any]:
        """Return the array of each chunk, the last filled up with zeros."""
        joined = jnp.concatenate(
            [leaves[i].reshape(self.shape) for i in self.positions]
        )
        added = [(0, 0)] * joined.ndim
        added[self.axis] = 0, -self.length % num_chunks
        return jnp.split(jnp.pad(joined, added), num_chunks, self.axis)

    def joined(self, chunks: Sequence[Any]) -> dict[int, Any]:
        """Return the leaves by their positions."""
        filled = jnp.concatenate(chunks, self.axis)
        whole = jax.lax.slice_in_dim(filled, 0, self.length, axis=self.axis)
        ends, end = [], 0
        for shape in self.shapes[:-1]:
            end += math.prod(shape)
            ends.append(end)
        leaves = jnp.split(whole, ends)
        named = zip(self.positions, self.shapes, leaves, strict=True)
        return {position: leaf.reshape(shape) for position, shape, leaf in named}


@dataclass(frozen=True, slots=True)
class Chunking:
    """How the gradients of one stage are cut; the same in all of its replicas."""

    num_chunks: int
    tree: Any
    groups: tuple[_Group, ...]

    @classmethod
    def of(
        cls, params: Any, mesh: AbstractMesh, num_chunks: int, borrowed: set[int]
    ) -> Chunking:
        """Look at the weights of a stage, without those that another one owns."""
        leaves, tree = jax.tree.flatten(params)
        vectors: dict[str, list[int]] = {}
        groups = []
        for position, leaf in enumerate(leaves):
            if position in borrowed:
                continue
            array_type = type_of(leaf)
            spec = getattr(leaf, "spec", None) or ()
            pieces = num_pieces(logical_mesh(mesh), spec, len(array_type.shape))
            if math.prod(pieces) == 1:
                vectors.setdefault(array_type.dtype, []).append(position)
            else:
                groups.append(_cut_leaf(position, array_type.shape, spec, pieces))
        for positions in vectors.values():
            shapes = tuple(type_of(leaves[i]).shape for i in positions)
            length = sum(map(math.prod, shapes))
            groups.append(_Group(tuple(positions), shapes, (-1,), 0, length, ()))
        return cls(num_chunks, tree, tuple(groups))

    @property
    def specs(self) -> tuple[PartitionSpec, ...]:
        """How the arrays of a chunk lie on a slice."""
        return tuple(partition_spec(each.spec) for each in self.groups)

    def cut(self, gradients: Any) -> list[Chunk]:
        """Return all chunks of gradients; for tracing."""
        leaves = jax.tree.leaves(gradients)
        arrays = [each.cut(leaves, self.num_chunks) for each in self.groups]
        return list(zip(*arrays, strict=True))

    def joined(self, chunks: Sequence[Chunk]) -> Any:
        """Return the tree that was cut, without borrowed leaves; for tracing."""
        found: dict[int, Any] = {}
        for each, arrays in zip(self.groups, zip(*chunks, strict=True), strict=True):
            found.update(each.joined(arrays))
        leaves = [found.get(i) for i in range(self.tree.num_leaves)]
        return jax.tree.unflatten(self.tree, leaves)


def _cut_leaf(
    position: int, shape: tuple[int, ...], spec: Spec, pieces: Sequence[int]
) -> _Group:
    """Return the group of a leaf that devices have pieces of."""
    whole = [dim for dim, count in enumerate(pieces) if count == 1]
    if whole:
        axis = max(whole, key=lambda dim: shape[dim])
        return _Group((position,), (shape,), shape, axis, shape[axis], spec)
    # Each device's piece of the last dimension gets a dimension of its own.
    length = shape[-1] // pieces[-1]
    folded = *shape[:-1], pieces[-1], length
    return _Group((position,), (shape,), folded, len(shape), length, spec)
