"""Moves of rows whose number is known only when a program runs: who sends what to whom.

Both ends are told one matrix of counts, and each host works out what it sends and how
much it gets. Who has no rows for a host sends it nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from timelyml.ml.programs.layout import Layout
from timelyml.ml.programs.places import Place

Matrix: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
"""`(sources, targets)`: how many rows go from where to where, on the way there."""


class Rows(NamedTuple):
    """Neighbouring rows that one shard sends another.

    Attributes:
        source: The shard that sends.
        target: The shard that gets them.
        start: Where they lie in the whole array of the source.
        target_start: Where they go in that of the target.
    """

    source: int
    target: int
    start: int
    target_start: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class SparseMove:
    """Rows that go from shard to shard.

    On the way there, a shard of the source has its rows in the order of where they go,
    and a shard of the target gets them in the order of where they come from, whatever
    arrives first. On the way back it is the other way round.

    Attributes:
        is_back: Which way; source and target are those of this move.
    """

    source: Layout
    source_place: Place
    target: Layout
    target_place: Place
    is_back: bool

    @property
    def source_hosts(self) -> tuple[str, ...]:
        """The hosts that may send."""
        return tuple(self.source_place.shards_by_host)

    def sends(self, host: str, matrix: Matrix) -> dict[str, list[Rows]]:
        """Return what a host sends, by the host that it goes to; itself included."""
        own = set(self.source_place.shards_by_host.get(host, ()))
        found: dict[str, list[Rows]] = {}
        for rows in self._rows(matrix, own):
            found.setdefault(self.target_place.hosts[rows.target], []).append(rows)
        return found

    def num_received(self, host: str, matrix: Matrix) -> int:
        """Return how many rows a host gets, from itself included."""
        own = list(self.target_place.shards_by_host.get(host, ()))
        by_target = matrix.sum(1) if self.is_back else matrix.sum(0)
        return int(by_target[own].sum())

    def _rows(self, matrix: Matrix, own: Collection[int]) -> Iterator[Rows]:
        """Return the rows that some shards send, in their order."""
        per_source = self.source.shape[0] // self.source.mesh.size
        per_target = self.target.shape[0] // self.target.mesh.size
        by_target = matrix.cumsum(1) - matrix  # where rows start in their source
        by_source = matrix.cumsum(0) - matrix
        for i, j in np.argwhere(matrix > 0).tolist():
            source, target = (j, i) if self.is_back else (i, j)
            if source not in own:
                continue
            starts = int(by_target[i, j]), int(by_source[i, j])
            start, target_start = reversed(starts) if self.is_back else starts
            yield Rows(
                source,
                target,
                source * per_source + start,
                target * per_target + target_start,
                int(matrix[i, j]),
            )
