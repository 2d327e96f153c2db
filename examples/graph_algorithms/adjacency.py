"""The part of a graph that one shard has: the edges that leave its vertices.

Vertex `v` belongs to shard `v % num_shards`, where it is number `v // num_shards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from timelyml import Shard, Timestamp

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Columns = dict[str, npt.NDArray[Any]]


class Adjacency:
    """Edges by source, so that the targets of a vertex stand together."""

    def __init__(self, blocks: Sequence[Columns], shard: Shard) -> None:
        sources = _joined(blocks, "source") // shard.num_shards
        order = np.argsort(sources, kind="stable")
        self._targets = _joined(blocks, "target")[order]
        self._sources = sources[order]

    def targets_of(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Return the targets of some vertices, and for each which vertex it is of."""
        low = np.searchsorted(self._sources, numbers, "left")
        counts = np.searchsorted(self._sources, numbers, "right") - low
        which = np.repeat(np.arange(len(numbers)), counts)
        begin = np.cumsum(counts) - counts
        at = np.repeat(low - begin, counts) + np.arange(len(which))
        return self._targets[at], which

    def out_degrees(self, num_vertices: int) -> Ints:
        """Return the number of edges that leave each of the shard's vertices."""
        return np.bincount(self._sources, minlength=num_vertices)


def by_column(name: str) -> Any:
    """Return a route to the shard of the vertex in a column."""

    def route(block: Columns, num_shards: int) -> Ints:
        shards: Ints = block[name] % num_shards
        return shards

    return route


def forget_closed(shard: Shard, cell: dict[int, Any]) -> None:
    """Forget what `cell` holds of epochs that no input can bring anything of."""
    coming = [*shard.frontier(0).elements, *shard.frontier(1).elements]
    oldest = min((epoch_of(time) for time in coming), default=None)
    for epoch in [e for e in cell if oldest is None or e < oldest]:
        del cell[epoch]


def epoch_of(time: Timestamp) -> int:
    """Return the outermost coordinate of a time."""
    return time if isinstance(time, int) else time[0]


def _joined(blocks: Sequence[Columns], name: str) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *(block[name] for block in blocks)])
