"""Ragged handles: rows on a slice of which each shard has its own number.

A shard has room for a fixed number of rows, so that types, memory and executables are
known ahead, as they are of any value. Its rows stand first, and after them zeros. How
many there are is a value too, as is the way back to where the rows came from: a ragged
handle is a tree of values, and whatever holds of those holds of it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Layout:
    """How many rows each shard has, and where they came from.

    Attributes:
        counts: `(shards,) int32`, on the slice of the rows.
        order: `(source rows,) int32`, on the slice where they came from: which row of
            its shard went where. None of rows that lie where they were.
        matrix: How many went from which shard to which, row by row, and last the largest
            destination; in pieces, and there.
        origin: The layout that they had there, if they were ragged themselves.
        number: Of the routing, as traced: rows of one have the same counts.
        num_rows: How many there are on the slice where they came from, with padding.
        num_sources: The shards there.
    """

    counts: Any
    order: Any
    matrix: tuple[Any, ...]
    origin: Layout | None
    number: int = field(metadata=_STATIC)
    num_rows: int = field(metadata=_STATIC)
    num_sources: int = field(metadata=_STATIC)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of which each shard of a slice has its own number.

    Compiled functions on that slice take it as an argument, and run shard by shard;
    `numpy.asarray` gives the rows of all shards, one shard after the other. Whatever
    asks for their number waits for it, but `row_counts` and `shape`.

    Attributes:
        rows: `(shards * max_rows, ...)`: of each shard its rows, then zeros.
        layout: How many there are, and where they came from.
    """

    rows: Any
    layout: Any

    @property
    def counts(self) -> Any:
        """`(shards,) int32`: how many rows each shard has; a value on the slice too.

        A function on rows that is given this has its own count, as an array of one.
        """
        return self.layout.counts

    @property
    def slice(self) -> Any:
        """The slice that it is on; None on the client."""
        return getattr(self.rows, "slice", None)

    @property
    def dtype(self) -> Any:
        """The type of its elements."""
        return self.rows.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions, that of rows included."""
        return len(self.rows.shape)

    @property
    def num_shards(self) -> int:
        """Over how many shards the rows are spread."""
        return int(self.counts.shape[0])

    @property
    def max_rows(self) -> int:
        """For how many rows a shard has room."""
        return int(self.rows.shape[0]) // self.num_shards

    @property
    def row_counts(self) -> tuple[int, ...] | None:
        """How many rows each shard has; None as long as that is not known here."""
        if _is_known(self.counts):
            return tuple(np.asarray(self.counts).tolist())
        if self.layout.matrix and all(map(_is_known, self.layout.matrix)):
            pieces = np.concatenate([np.asarray(x) for x in self.layout.matrix])
            matrix = pieces[:-1].reshape(-1, self.num_shards)
            return tuple(matrix.sum(0).tolist())
        return None

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Its shape; of rows None as long as their number is not known here."""
        counts = self.row_counts
        return (None if counts is None else sum(counts), *self.rows.shape[1:])

    def result(self, timeout_s: float | None = None) -> Any:
        """Return the rows of all shards, one shard after the other.

        Args:
            timeout_s: How long to wait for their number, and for them.

        Raises:
            TimelyError: What the computation failed with, or one before it.
            DeadlineError: They did not come in time.
        """
        rows, counts = (_fetched(each, timeout_s) for each in (self.rows, self.counts))
        shards = rows.reshape(self.num_shards, self.max_rows, *rows.shape[1:])
        pairs = zip(shards, counts, strict=True)
        return np.concatenate([shard[:count] for shard, count in pairs])

    def block_until_ready(self) -> Ragged:
        """Wait until it is computed, or raise what that failed with."""
        for each in (self.rows, self.counts):
            each.block_until_ready()
        return self

    def is_ready(self) -> bool:
        """Whether its value is there, or will never be; does not wait."""
        return bool(self.rows.is_ready() and self.counts.is_ready())

    def delete(self) -> None:
        """Give the memory of the rows back now; it cannot be used any more."""
        self.rows.delete()

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the rows without blocking the event loop."""
        for each in (self.rows, self.counts):
            if hasattr(each, "__await__"):  # else they are of the client, and here
                yield from each.__await__()
        return self.result()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError("rows of several shards cannot be put together in place")
        return np.asarray(self.result(), dtype)

    def __len__(self) -> int:
        return int(np.asarray(self.counts).sum())

    def __repr__(self) -> str:
        where = getattr(self.slice, "name", None)
        counts = self.row_counts
        known = "rows not known yet" if counts is None else f"rows {counts}"
        row = ",".join(map(str, self.rows.shape[1:]))
        return f"Ragged({self.dtype}[...,{row}] on {where!r}, {known})"


def is_ragged(value: Any) -> bool:
    """Whether a value is a ragged handle, or stands for one."""
    return isinstance(value, Ragged)


def has_ragged(tree: Any) -> bool:
    """Whether there is a ragged handle in a tree."""
    return any(map(is_ragged, jax.tree.leaves(tree, is_leaf=is_ragged)))


def _is_known(value: Any) -> bool:
    """Whether the elements of a value are here; does not wait."""
    is_known = getattr(value, "is_known", None)
    if is_known is None:
        return isinstance(value, np.ndarray | jax.Array)
    return bool(is_known())


def _fetched(value: Any, timeout_s: float | None) -> Any:
    result = getattr(value, "result", None)
    return np.asarray(value) if result is None else np.asarray(result(timeout_s))
