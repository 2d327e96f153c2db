"""Whole rows of columns as keys: compared, made unique and routed without a loop.

Numbers are brought to eight bytes each, so that equal numbers are equal bytes whatever
their type; times, to the same units. Rows that hold text are compared as tuples.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from timelyml.operators.columns import Columns
from timelyml.operators.keys import column_keys, destinations_of

Words = npt.NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)
_INT64_LIMIT = 2**63
_IS_HIGH, _IS_NO_INTEGER = np.uint64(1), np.uint64(2)
# Finer than picoseconds, or of no known length: compared as they are.
_ODD_UNITS = frozenset({"fs", "as", "generic"})


def _words_of(columns: Columns) -> Words | None:
    """Return rows of a block as words, equal where the rows are; None if there is text.

    NaNs are equal if their bits are.
    """
    parts = [_words_of_column(column) for column in columns.values()]
    found = [part for part in parts if part is not None]
    return _joined(found) if len(found) == len(parts) else None


def _words_of_column(column: npt.NDArray[Any]) -> Words | None:
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
    return wide.reshape(len(column), -1).view(np.uint64)


def _joined(parts: list[Words]) -> Words:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _spans(column: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return moments or spans of time as seconds and picoseconds, whatever their unit."""
    kind, (unit, _) = column.dtype.kind, np.datetime_data(column.dtype)
    if unit in _ODD_UNITS or (kind == "m" and unit in "YM"):
        return column.astype(column.dtype.newbyteorder("=")).view(np.int64)
    seconds = column.astype(f"{kind}8[s]")
    rest = (column - seconds).astype("m8[ps]")
    return np.stack([seconds.view(np.int64), rest.view(np.int64)], axis=-1)


def _words_of_any(columns: Columns) -> tuple[Words, Words] | None:
    """Return words and marks, equal where rows of any blocks are; None if there is text.

    A number that is whole has the words of the integer that it equals, whatever its
    type. Others may share theirs with an integer; their marks tell them apart.
    """
    parts = []
    for column in columns.values():
        words = _words_of_column(column)
        if words is None:
            return None
        marks = np.zeros(words.shape, np.uint64)
        if column.dtype.kind == "f":
            words, marks = _with_integers(words.view(np.float64))
        elif column.dtype == np.uint64:
            marks[words >= _INT64_LIMIT] = _IS_HIGH
        parts.append((words, marks))
    return _joined([part[0] for part in parts]), _joined([part[1] for part in parts])


def _with_integers(values: npt.NDArray[np.float64]) -> tuple[Words, Words]:
    """Return floats as words and marks, as the integers that they equal where they do."""
    words = values.view(np.uint64).copy()
    marks = np.full(words.shape, _IS_NO_INTEGER)
    is_whole = np.floor(values) == values
    is_high = is_whole & (values >= _INT64_LIMIT) & (values < 2 * _INT64_LIMIT)
    is_low = is_whole & (values >= -_INT64_LIMIT) & (values < _INT64_LIMIT)
    words[is_high], marks[is_high] = values[is_high].astype(np.uint64), _IS_HIGH
    words[is_low] = values[is_low].astype(np.int64).view(np.uint64)
    marks[is_low] = 0
    return words, marks


def keys_of_rows(columns: Columns) -> Iterable[Any]:
    """Return a key for each row, equal where rows of any blocks are: bytes or a tuple."""
    found = _words_of_any(columns)
    if found is None:
        return zip(*map(column_keys, columns.values()), strict=True)
    words, marks = found
    is_marked = marks.any(axis=1)
    keys = np.empty(len(words), object)
    keys[~is_marked] = as_bytes(words[~is_marked]).tolist()
    longer = as_bytes(np.concatenate([words[is_marked], marks[is_marked]], axis=1))
    keys[is_marked] = longer.tolist()
    return keys


def as_bytes(words: Words) -> npt.NDArray[np.void]:
    """Return each row of words as one item."""
    width = words.shape[1] * 8
    flat = np.ascontiguousarray(words)
    if not width:  # rows without values are all equal
        return np.zeros(len(words), "V1")
    return flat.view(f"V{width}")[:, 0]


def first_of_each(columns: Columns) -> npt.NDArray[np.intp] | None:
    """Return the index of the first of equal rows, ascending; None if there is text."""
    words = _words_of(columns)
    if words is None:
        return None
    rows = words[:, 0] if words.shape[1] == 1 else as_bytes(words)
    _, firsts = np.unique(rows, return_index=True)
    return np.sort(firsts)


def destinations_of_rows(columns: Columns, num_shards: int) -> npt.NDArray[np.intp]:
    """Return a shard for each row, the same for equal rows."""
    found = _words_of_any(columns)
    if found is None:
        return destinations_of(list(columns.values()), num_shards)
    words, _ = found
    mixed = np.zeros(len(words), np.uint64)
    for index in range(words.shape[1]):
        mixed ^= words[:, index]
        for multiplier in _MULTIPLIERS:
            mixed ^= mixed >> _SHIFT
            mixed *= multiplier
    return (mixed % np.uint64(num_shards)).astype(np.intp)
