"""Whole rows of columns as keys: compared, made unique and routed without a loop.

Numbers are brought to eight bytes each, so that equal numbers are equal bytes whatever
their width; times, to the same units. Rows that hold text are compared as tuples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from timelyml.operators.columns import Columns
from timelyml.operators.keys import destinations_of

Words = npt.NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)
# Finer than picoseconds, or of no known length: compared as they are.
_ODD_UNITS = frozenset({"fs", "as", "generic"})


def words_of(columns: Columns) -> Words | None:
    """Return rows as words, equal where the rows are; None if there is text.

    NaNs are equal if their bits are.
    """
    parts = []
    for column in columns.values():
        kind = column.dtype.kind
        wide: npt.NDArray[Any]
        if kind == "f":
            wide = column.astype(np.float64) + 0.0  # no negative zeros
        elif kind in "iub":
            wide = column.astype(np.uint64 if column.dtype == np.uint64 else np.int64)
        elif kind in "mM":
            wide = _spans(column)
        else:
            return None
        parts.append(wide.reshape(len(column), -1).view(np.uint64))
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _spans(column: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return moments or spans of time as seconds and picoseconds, whatever their unit."""
    kind, (unit, _) = column.dtype.kind, np.datetime_data(column.dtype)
    if unit in _ODD_UNITS or (kind == "m" and unit in "YM"):
        return column.astype(column.dtype.newbyteorder("=")).view(np.int64)
    seconds = column.astype(f"{kind}8[s]")
    rest = (column - seconds).astype("m8[ps]")
    return np.stack([seconds.view(np.int64), rest.view(np.int64)], axis=-1)


def keys_of_rows(columns: Columns) -> list[Any]:
    """Return a key for each row: bytes or a tuple."""
    words = words_of(columns)
    if words is not None:
        keys: list[Any] = as_bytes(words).tolist()
        return keys
    return list(zip(*(column.tolist() for column in columns.values()), strict=True))


def as_bytes(words: Words) -> npt.NDArray[np.void]:
    """Return each row of words as one item."""
    width = words.shape[1] * 8
    flat = np.ascontiguousarray(words)
    if not width:  # rows without values are all equal
        return np.zeros(len(words), "V1")
    return flat.view(f"V{width}")[:, 0]


def first_of_each(columns: Columns) -> npt.NDArray[np.intp] | None:
    """Return the index of the first of equal rows, ascending; None if there is text."""
    words = words_of(columns)
    if words is None:
        return None
    rows = words[:, 0] if words.shape[1] == 1 else as_bytes(words)
    _, firsts = np.unique(rows, return_index=True)
    return np.sort(firsts)


def destinations_of_rows(columns: Columns, num_shards: int) -> npt.NDArray[np.intp]:
    """Return a shard for each row, the same for equal rows."""
    words = words_of(columns)
    if words is None:
        return destinations_of(list(columns.values()), num_shards)
    mixed = np.zeros(len(words), np.uint64)
    for index in range(words.shape[1]):
        mixed ^= words[:, index]
        for multiplier in _MULTIPLIERS:
            mixed ^= mixed >> _SHIFT
            mixed *= multiplier
    return (mixed % np.uint64(num_shards)).astype(np.intp)
