"""Boxes: the part of an array that a device holds, and what two parts have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from timelyml.ml.functions import LogicalMesh, Spec
from timelyml.ml.functions.specs import axes_of

Box: TypeAlias = tuple[tuple[int, int], ...]
"""Start and stop in each dimension."""


class HeldBox(NamedTuple):
    """A box and who has it, or wants it."""

    host: int
    box: Box


def boxes_by_device(mesh: LogicalMesh, spec: Spec, shape: Sequence[int]) -> list[Box]:
    """Return the box of each device, in row-major order of the mesh.

    >>> boxes_by_device(LogicalMesh(("a", "b"), (2, 2)), ("b",), (4,))
    [((0, 2),), ((2, 4),), ((0, 2),), ((2, 4),)]
    """
    sizes = mesh.sizes
    found = []
    for position in np.ndindex(mesh.axis_sizes):
        at = dict(zip(mesh.axis_names, position, strict=True))
        box = []
        for dim, length in enumerate(shape):
            axes = axes_of(spec[dim]) if dim < len(spec) else ()
            index = 0
            for axis in axes:
                index = index * sizes[axis] + at[axis]
            part = length // math.prod(sizes[axis] for axis in axes)
            box.append((index * part, (index + 1) * part))
        found.append(tuple(box))
    return found


def size_of(box: Box) -> int:
    """Return how many elements a box has."""
    return math.prod(stop - start for start, stop in box)


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole array."""
    return tuple((0, length) for length in shape)


def intersection(one: Box, other: Box) -> Box | None:
    """Return what two boxes have in common; None if nothing.

    >>> intersection(((0, 4), (0, 2)), ((2, 6), (0, 9)))
    ((2, 4), (0, 2))
    """
    common = tuple(
        (max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)
    )
    return common if all(start < stop for start, stop in common) else None


def cover(
    wanted: Iterable[HeldBox], held: Iterable[HeldBox]
) -> list[tuple[int, HeldBox]]:
    """Say who sends what: each wanted element once for each host that wants it.

    Args:
        wanted: Boxes by the host that needs them.
        held: Boxes by the host that has them; of a box on several hosts the wanting
            host's own copy is taken, or else that of the first.

    Returns:
        The host that sends, and the part with the host that gets it. Empty boxes, as
        of arrays without elements, are sent by nobody.
    """
    holders: dict[Box, list[int]] = {}
    for host, box in held:
        holders.setdefault(box, []).append(host)
    found = []
    for target, box in dict.fromkeys(wanted):
        for source, hosts in holders.items():
            common = intersection(box, source)
            if common is not None:
                sender = target if target in hosts else hosts[0]
                found.append((sender, HeldBox(target, common)))
    return found
