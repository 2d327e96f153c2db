"""Grouping rows by their keys and reducing each group, with array operations only.

Groups come in ascending order of their keys. Sums are taken in the order of rows.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

DENSE_FACTOR = 16
DENSE_LEAST = 1024
"""Keys within a range of so many times the rows, or of this, are counted in place."""


class Groups:
    """The groups of some rows.

    Args:
        keys: One or several columns of equal length; or none, for one group of all.
        rows: How many rows there are.
    """

    def __init__(self, keys: list[Array], rows: int) -> None:
        self._codes, self._size, self.keys = _codes_of(keys, rows)
        self._present: Array | None = None
        if keys and not self.keys:  # codes are distances, some of which no row has
            is_present = np.zeros(self._size, np.bool_)
            is_present[self._codes] = True
            self._present = np.flatnonzero(is_present)
            self.keys = [_at_distances(keys[0], self._present)]

    @cached_property
    def counts(self) -> Array:
        """Rows of each group."""
        counts = np.bincount(self._codes, minlength=self._size)
        return self._only_present(counts).astype(np.int64, copy=False)

    def sums(self, values: Array) -> Array:
        """Sums of a column by group, in 64 bits."""
        if values.ndim > 1:
            dtype = sum_dtype(values.dtype)
            return np.add.reduceat(self._sorted(values), self._starts, 0, dtype)
        if values.dtype.kind == "f":
            sums: Array = np.bincount(self._codes, values, self._size)
        else:
            sums = np.zeros(self._size, sum_dtype(values.dtype))
            np.add.at(sums, self._codes, values.astype(sums.dtype, copy=False))
        return self._only_present(sums)

    def least(self, values: Array) -> Array:
        """The least value of a column in each group; NaN if there is one."""
        return self._extreme(values, np.minimum, is_least=True)

    def greatest(self, values: Array) -> Array:
        """The greatest value of a column in each group; NaN if there is one."""
        return self._extreme(values, np.maximum, is_least=False)

    def _extreme(self, values: Array, better: np.ufunc, *, is_least: bool) -> Array:
        if values.ndim > 1 or values.dtype.kind not in "iuf":
            found: Array = better.reduceat(self._sorted(values), self._starts)
            return found
        # An order of magnitude faster than sorting.
        extremes = np.full(self._size, _bound(values.dtype, is_highest=is_least))
        with np.errstate(invalid="ignore"):  # NaN is a value like any other
            better.at(extremes, self._codes, values)
        return self._only_present(extremes)

    def _only_present(self, by_code: Array) -> Array:
        return by_code if self._present is None else by_code[self._present]

    @cached_property
    def _order(self) -> Array:
        # A stable sort of 16-bit integers is a radix sort.
        narrow = np.uint16 if self._size <= 1 << 16 else np.intp
        return np.argsort(self._codes.astype(narrow, copy=False), kind="stable")

    @cached_property
    def _starts(self) -> Array:
        counts = self.counts
        starts: Array = np.cumsum(counts) - counts
        return starts

    def _sorted(self, values: Array) -> Array:
        return values.take(self._order, axis=0)


def sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return what sums of such values are kept in.

    >>> sum_dtype(np.dtype("float32")), sum_dtype(np.dtype("int8"))
    (dtype('float64'), dtype('int64'))
    """
    if dtype.kind == "f":
        return np.dtype(np.float64)
    return np.dtype(np.uint64 if dtype.kind == "u" else np.int64)


def _bound(dtype: np.dtype[Any], *, is_highest: bool) -> Any:
    """Return the highest or lowest value of a numeric dtype."""
    if dtype.kind == "f":
        return dtype.type(np.inf if is_highest else -np.inf)
    info = np.iinfo(dtype)
    return dtype.type(info.max if is_highest else info.min)


def _codes_of(keys: list[Array], rows: int) -> tuple[Array, int, list[Array]]:
    """Return a code for each row, the number of codes, and the keys by code.

    There are no keys by code if a code is the distance of a key from the least one.
    """
    if not keys:
        return np.zeros(rows, np.intp), 1, []
    if len(keys) == 1:
        return _codes_of_one(keys[0], rows)
    codes = np.zeros(rows, np.intp)
    for column in keys:
        distinct, its_codes = np.unique(column, return_inverse=True)
        # Made small at every step, so that their product stays within 64 bits.
        _, codes = np.unique(codes * len(distinct) + its_codes, return_inverse=True)
    size = int(codes.max()) + 1
    first = np.empty(size, np.intp)
    first[codes[::-1]] = np.arange(rows - 1, -1, -1)
    return codes, size, [column[first] for column in keys]


def _codes_of_one(key: Array, rows: int) -> tuple[Array, int, list[Array]]:
    if key.dtype.kind in "iu":
        lowest, highest = int(key.min()), int(key.max())
        if highest - lowest < max(DENSE_FACTOR * rows, DENSE_LEAST):
            if lowest:
                wide: Array = key.astype(_wide(key), copy=False)
                key = wide - wide.dtype.type(lowest)
            return key.astype(np.intp, copy=False), highest - lowest + 1, []
    distinct, codes = np.unique(key, return_inverse=True)
    return codes, len(distinct), [distinct]


def _at_distances(key: Array, distances: Array) -> Array:
    """Return the keys that are so far from the least one."""
    wide = _wide(key)
    found: Array = distances.astype(wide) + wide.type(key.min())
    return found.astype(key.dtype)


def _wide(key: Array) -> np.dtype[Any]:
    return np.dtype(np.uint64 if key.dtype.kind == "u" else np.int64)
