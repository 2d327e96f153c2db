"""Partition specs and meshes, as JAX has them and as plain values; shapes of shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from timelyml.errors import ConfigError
from timelyml.ml.functions.computation import LogicalMesh, Spec

_AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def logical_mesh(mesh: AbstractMesh | Mesh) -> LogicalMesh:
    """Return the axes of a mesh.

    >>> logical_mesh(AbstractMesh((2, 4), ("data", "model")))
    LogicalMesh(axis_names=('data', 'model'), axis_sizes=(2, 4), \
axis_types=('auto', 'auto'))
    """
    names = {axis_type: name for name, axis_type in _AXIS_TYPES.items()}
    return LogicalMesh(
        tuple(mesh.axis_names),
        tuple(mesh.axis_sizes),
        tuple(names[axis_type] for axis_type in mesh.axis_types),
    )


def abstract_mesh(mesh: LogicalMesh) -> AbstractMesh:
    """Return the mesh as JAX has one without devices."""
    types = tuple(_AXIS_TYPES[name] for name in mesh.axis_types)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)


def spec_of(sharding: Any) -> Spec:
    """Return the spec of a `PartitionSpec`, or of a sharding that has one.

    Trailing dimensions that are not sharded are left out, so that equal specs are
    equal values.

    >>> spec_of(PartitionSpec("data", ("x", "y"), None))
    ('data', ('x', 'y'))

    Raises:
        ConfigError: It is neither, or it leaves dimensions open.
    """
    spec = getattr(sharding, "spec", sharding)
    if not isinstance(spec, PartitionSpec):
        raise ConfigError(
            f"not a sharding; got {sharding!r}; expected a PartitionSpec, or a sharding "
            f"with one; write P(axis, ...) or slice.sharding(P(axis, ...))",
            option="sharding",
        )
    entries = [_entry(each, spec) for each in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def partition_spec(spec: Spec) -> PartitionSpec:
    """Return the spec as JAX has it."""
    return PartitionSpec(*spec)  # type: ignore[no-untyped-call]  # JAX is typed in part


def named_sharding(mesh: AbstractMesh | Mesh, spec: Spec) -> NamedSharding:
    """Return the sharding over the devices of a mesh, or over one without devices."""
    return NamedSharding(mesh, partition_spec(spec))


def num_pieces(mesh: LogicalMesh, spec: Spec, num_dims: int) -> tuple[int, ...]:
    """Return into how many pieces each dimension is cut.

    >>> num_pieces(LogicalMesh(("a", "b"), (2, 3)), (None, ("a", "b")), 3)
    (1, 6, 1)
    """
    sizes = mesh.sizes
    counts = [math.prod(sizes[name] for name in axes_of(entry)) for entry in spec]
    return (*counts, *(1,) * (num_dims - len(counts)))


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes of an entry of a spec, the slowest first."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else entry


def check_spec(who: str, mesh: LogicalMesh, spec: Spec, shape: Sequence[int]) -> None:
    """Raise unless an array of this shape can be sharded so.

    Raises:
        ConfigError: An axis is unknown or used twice, there are more entries than
            dimensions, or a dimension is not a multiple of its number of pieces.
    """
    axes = [axis for entry in spec for axis in axes_of(entry)]
    unknown = [axis for axis in axes if axis not in mesh.axis_names]
    if unknown or len(set(axes)) < len(axes):
        raise ConfigError(
            f"{who} cannot be sharded; got {partition_spec(spec)}; expected each of the "
            f"axes {', '.join(mesh.axis_names)} at most once; name axes of the slice",
            option="sharding",
        )
    if len(spec) > len(shape):
        raise ConfigError(
            f"{who} cannot be sharded; got {partition_spec(spec)} for shape "
            f"{tuple(shape)}; expected at most {len(shape)} entries",
            option="sharding",
        )
    for dim, (length, pieces) in enumerate(
        zip(shape, num_pieces(mesh, spec, len(shape)), strict=True)
    ):
        if length % pieces:
            raise ConfigError(
                f"{who} cannot be sharded; got {length} in dimension {dim} for "
                f"{partition_spec(spec)}; expected a multiple of {pieces}; pad it, or "
                f"shard another dimension",
                option="sharding",
            )


def fits(mesh: LogicalMesh, spec: Spec | None, shape: Sequence[int]) -> bool:
    """Whether there is a spec by which an array of this shape can be sharded."""
    if spec is None:
        return False
    try:
        check_spec("an array", mesh, spec, shape)
    except ConfigError:
        return False
    return True


def specs_for(tree: Any, shardings: Any, who: str) -> list[Spec | None]:
    """Return the spec for each leaf of a tree; None where it is left open.

    Args:
        tree: Of arrays, or of anything in their place.
        shardings: A tree of the same structure, or one that ends earlier and stands
            for all below, of what `spec_of` takes, or None.
        who: Names the tree in errors.

    Raises:
        ConfigError: The structures do not match, or a leaf is no sharding.
    """
    try:
        full = jax.tree.broadcast(shardings, tree, is_leaf=_is_sharding)
    except ValueError as error:
        raise ConfigError(
            f"{who} do not match the tree of shardings; got {shardings!r}; expected a "
            f"tree that begins like {jax.tree.structure(tree)}; give one sharding for "
            f"all, or one for each",
            option="sharding",
        ) from error
    # Not all leaves: a None of the tree itself has no sharding.
    structure: Any = jax.tree.structure(tree)
    leaves = structure.flatten_up_to(full)
    return [None if each is None else spec_of(each) for each in leaves]


def _is_sharding(value: Any) -> bool:
    return value is None or isinstance(value, PartitionSpec) or hasattr(value, "spec")


def _entry(entry: Any, spec: PartitionSpec) -> str | tuple[str, ...] | None:
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, tuple):
        names = tuple(map(str, entry))
        return names[0] if len(names) == 1 else names or None
    raise ConfigError(
        f"a sharding leaves a dimension open; got {spec}; expected axis names or None; "
        f"leave out the whole sharding to have it chosen",
        option="sharding",
    )
