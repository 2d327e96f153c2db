"""Where the devices of an island stand in its mesh, of what its hosts say of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from timelyml.ml.resources.inventory import MAX_MESH_DIMENSIONS

Coordinates: TypeAlias = tuple[int, ...]


def mesh_of(told: Sequence[Coordinates]) -> list[Coordinates]:
    """Return the place of each device of an island in its mesh.

    Those that the platform tells are counted from 0, without the axes on which all are
    the same. Devices of which it tells nothing, or the same as of another, are a line in
    the order in which they come. So are those of a mesh of more than three axes: what
    would be left out might be all that parts two of them.

    Args:
        told: What the platform says of each device, in the order of hosts; empty if it
            says nothing.

    >>> mesh_of([(4, 2, 0), (4, 3, 0), (5, 2, 0), (5, 3, 0)])
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    >>> mesh_of([(), ()])
    [(0,), (1,)]
    """
    line: list[Coordinates] = [(number,) for number in range(len(told))]
    ranks = {len(each) for each in told}
    if len(ranks) != 1 or len(set(told)) < len(told):
        return line
    axes = [
        (axis, min(places))
        for axis, places in enumerate(zip(*told, strict=True))
        if len(set(places)) > 1
    ]
    if not 1 <= len(axes) <= MAX_MESH_DIMENSIONS:
        return line
    return [tuple(each[axis] - least for axis, least in axes) for each in told]
