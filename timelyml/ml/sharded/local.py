"""Calls that move rows about on their own shard, on the host: nothing is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from timelyml.errors import RoutingError
from timelyml.ml.sharded.functions import Leaves, Needs, Prepared


@dataclass(frozen=True, slots=True)
class Same:
    """Gives its leaves as they are: a place where columns are sent from or arrive."""

    def prepared(self, needs: Needs) -> Prepared:
        """Needs nothing; see `Function`."""
        del needs
        return self

    def forward(self, leaves: Leaves) -> tuple[list[Any], Any]:
        """Give the leaves."""
        return list(leaves), None

    def backward(self, leaves: Leaves, kept: Any, cotangents: Leaves) -> list[Any]:
        """Give the cotangents."""
        del leaves, kept
        return list(cotangents)


@dataclass(frozen=True, slots=True)
class Part:
    """Parts rows by an index: `columns` leaves, then the index of each row.

    Gives the columns of the first part, then those of the second, and so on.
    """

    num_parts: int

    def prepared(self, needs: Needs) -> Prepared:
        """Needs nothing; see `Function`."""
        del needs
        return self

    def forward(self, leaves: Leaves) -> tuple[list[Any], Any]:
        """Give each part its rows, in order."""
        *columns, index = leaves
        parts = rows_by_part(np.asarray(index), self.num_parts)
        return [np.asarray(c)[rows] for rows in parts for c in columns], None

    def backward(self, leaves: Leaves, kept: Any, cotangents: Leaves) -> list[Any]:
        """Put the cotangents of all parts where their rows stood."""
        del kept
        *columns, index = leaves
        width = len(columns)
        parts = rows_by_part(np.asarray(index), self.num_parts)
        found: list[Any] = []
        for place, column in enumerate(columns):
            pieces = cotangents[place::width]
            whole = np.zeros(np.shape(column), column.dtype)
            for rows, piece in zip(parts, pieces, strict=True):
                if piece is not None:
                    whole[rows] = piece
            found.append(whole)
        return [*found, None]


@dataclass(frozen=True, slots=True)
class Merge:
    """Puts parts together: the columns of each, one after the other, then the index."""

    num_parts: int

    def prepared(self, needs: Needs) -> Prepared:
        """Needs nothing; see `Function`."""
        del needs
        return self

    def forward(self, leaves: Leaves) -> tuple[list[Any], Any]:
        """Give every row its place."""
        *pieces, index = leaves
        width = len(pieces) // self.num_parts
        parts = rows_by_part(np.asarray(index), self.num_parts)
        return [
            _merged(parts, pieces[place::width], len(index)) for place in range(width)
        ], None

    def backward(self, leaves: Leaves, kept: Any, cotangents: Leaves) -> list[Any]:
        """Give each part the cotangents of its rows."""
        del kept
        *_, index = leaves
        parts = rows_by_part(np.asarray(index), self.num_parts)
        return [
            *(
                None if each is None else np.asarray(each)[rows]
                for rows in parts
                for each in cotangents
            ),
            None,
        ]


def rows_by_part(index: NDArray[Any], num_parts: int) -> list[NDArray[np.intp]]:
    """Give the rows of each part, ascending.

    Raises:
        RoutingError: A row names a part that is not there.
    """
    if index.size and not 0 <= index.min() <= index.max() < num_parts:
        wrong = index[(index < 0) | (index >= num_parts)][0]
        raise RoutingError(
            f"branch has no such part; got {wrong}; expected 0 to {num_parts - 1}; "
            "correct the index"
        )
    return [np.flatnonzero(index == part) for part in range(num_parts)]


def _merged(parts: list[Any], pieces: Sequence[Any], count: int) -> Any:
    first = np.asarray(pieces[0])
    whole = np.empty((count, *first.shape[1:]), first.dtype)
    for rows, piece in zip(parts, pieces, strict=True):
        whole[rows] = piece
    return whole
