"""The join of columns: one sort of the right keys, and two binary searches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from timelyml.errors import PayloadError
from timelyml.exchange import concat
from timelyml.operators.columns import Columns, column, columns_of
from timelyml.operators.grouping import Array
from timelyml.operators.schema import Schema

ROWS_PER_BLOCK = 1 << 16

Indices = npt.NDArray[np.intp]
NOTHING = -1  # in place of a row that is missing


Known = dict[Any, Any]
"""State of a shard: for each side, its columns without rows, once some came."""


class ColumnJoin:
    """Joins columns; see `join`."""

    def __init__(
        self,
        who: str,
        keys: tuple[str, str],
        how: str,
        *,
        suffix: str,
        fill: dict[str, Any],
    ) -> None:
        self._who = who
        self._keys = keys
        self._how = how
        self._suffix = suffix
        self._fill = fill
        self._declared: list[Columns | None] = [None, None]  # without rows, by side

    def expect(self, left: Schema | None, right: Schema | None) -> None:
        """Note the columns of both sides, as far as they are known beforehand."""
        for side, schema in enumerate((left, right)):
            self._declared[side] = None if schema is None else schema.empty()

    def results(
        self, lefts: list[Any], rights: list[Any], known: Known
    ) -> Iterator[Columns]:
        """Yield the joined columns of one time, a bounded number of rows at a time."""
        both = self.columns_of(lefts, 0, known), self.columns_of(rights, 1, known)
        if self._gives_nothing(lefts, rights):
            return
        left = both[0] or self.known(0, known)
        right = both[1] or self.known(1, known)
        keys = self.key_of(left, 0), self.key_of(right, 1)
        self.check_kinds(*keys)
        keys = comparable(*keys)
        order = np.argsort(keys[1], kind="stable")
        keeps_all = self._how != "inner"
        for at, nth in matches(keys[0], keys[1][order], keeps_all=keeps_all):
            is_met = nth != NOTHING
            to = np.full(len(at), NOTHING)
            to[is_met] = order[nth[is_met]]
            yield self.joined(left, right, at, to)
        if self._how == "outer":
            alone = np.flatnonzero(~np.isin(keys[1], keys[0]))
            for start in range(0, len(alone), ROWS_PER_BLOCK):
                to = alone[start : start + ROWS_PER_BLOCK]
                yield self.joined(left, right, np.full(len(to), NOTHING), to)

    def key_of(self, columns: Columns, side: int) -> npt.NDArray[Any]:
        """Return the keys of one side's columns."""
        keys = column(self._who, columns, self._keys[side])
        if keys.ndim != 1:
            raise PayloadError(
                f"operator {self._who!r} cannot join by column {self._keys[side]!r}; "
                f"got rows of shape {list(keys.shape[1:])}; expected single values; "
                f"choose another key",
                operator=self._who,
                column=self._keys[side],
            )
        return keys

    def check_kinds(
        self, left: npt.NDArray[Any], right: npt.NDArray[Any], port: int = 0
    ) -> None:
        """Refuse keys that cannot be compared; with `port` 1, right ones come first."""
        if port:
            left, right = right, left
        kinds = [
            "number" if keys.dtype.kind in "iufb" else keys.dtype.kind
            for keys in (left, right)
        ]
        if kinds[0] != kinds[1]:
            raise PayloadError(
                f"operator {self._who!r} cannot join keys of two kinds; got "
                f"{self._keys[0]!r} of {left.dtype} and {self._keys[1]!r} of "
                f"{right.dtype}; expected equal kinds; convert one of them",
                operator=self._who,
                column=self._keys[0],
            )

    def columns_of(
        self, payloads: list[Any], side: int, known: Known
    ) -> Columns | None:
        """Return the columns of a side, without rows if nothing came of it."""
        if not payloads:
            return self._declared[side] or known.get(side)
        columns = columns_of(concat(payloads))
        if self._declared[side] is None and side not in known:
            # copies, or views would keep the block
            known[side] = {name: c[:0].copy() for name, c in columns.items()}
        return columns

    def known(self, side: int, known: Known) -> Columns:
        """Return the columns of a side without rows.

        Raises:
            PayloadError: They are not known yet.
        """
        found: Columns | None = self._declared[side] or known.get(side)
        return found or self._unknown(side)

    def _gives_nothing(self, lefts: list[Any], rights: list[Any]) -> bool:
        if self._how == "inner":
            return not (lefts and rights)
        return not lefts and (self._how == "left" or not rights)

    def _unknown(self, side: int) -> Columns:
        name = ("left", "right")[side]
        raise PayloadError(
            f"operator {self._who!r} cannot name the columns of its {name} stream, which "
            f"had no rows so far; got how={self._how!r}; expected a known schema; "
            f"declare it where the stream begins, with schema=",
            operator=self._who,
        )

    def joined(
        self, left: Columns, right: Columns, at: Indices, to: Indices
    ) -> Columns:
        """Return the columns of the joined rows; -1 stands for none."""
        key, right_key = self._keys
        has_left = at[0] != NOTHING if len(at) else True
        keys = left[key].take(at) if has_left else right[right_key].take(to)
        joined = {key: keys}
        for name, values in left.items():
            if name != key:
                joined[name] = self._taken(name, values, at)
        for name, values in right.items():
            if name == right_key:
                continue
            as_name = name + self._suffix if name in left else name
            joined[as_name] = self._taken(as_name, values, to)
        return joined

    def _taken(
        self, name: str, values: npt.NDArray[Any], indices: Indices
    ) -> npt.NDArray[Any]:
        missing = indices == NOTHING
        if not missing.any():
            return values.take(indices, axis=0)
        fill = self._fill.get(name, np.nan if values.dtype.kind == "f" else None)
        if fill is None:
            raise PayloadError(
                f"operator {self._who!r} has rows without a value for column {name!r}; "
                f"got {values.dtype}, which has no NaN; expected a value to stand for "
                f"none; pass fill={{{name!r}: ...}}",
                operator=self._who,
                column=name,
            )
        taken = np.empty((len(indices), *values.shape[1:]), values.dtype)
        try:
            taken[missing] = fill
        except (OverflowError, TypeError, ValueError) as error:
            raise PayloadError(
                f"operator {self._who!r} cannot fill column {name!r}; got {fill!r} "
                f"({error}); expected a value of {values.dtype}; correct fill=",
                operator=self._who,
                column=name,
            ) from None
        taken[~missing] = values[indices[~missing]]
        return taken


def comparable(left: Array, right: Array) -> tuple[Array, Array]:
    """Return keys of two kinds of numbers such that only equal ones compare as equal.

    Numpy compares signed with unsigned integers, and large integers with floats, as
    floats of 64 bits; on Linux those of extended precision hold all of them exactly.
    """
    is_float = left.dtype.kind == right.dtype.kind == "f"
    if is_float or np.result_type(left, right).kind != "f":
        return left, right
    return left.astype(np.longdouble), right.astype(np.longdouble)


def matches(
    keys: npt.NDArray[Any], ordered: npt.NDArray[Any], *, keeps_all: bool
) -> Iterator[tuple[Indices, Indices]]:
    """Yield pairs of rows of equal keys, a bounded number at a time.

    Args:
        keys: Of the rows to find partners for, in this order.
        ordered: Keys of the partners, ascending.
        keeps_all: Whether a row without a partner is paired with -1.

    >>> [at.tolist() + to.tolist() for at, to in
    ...     matches(np.array([5, 1]), np.array([1, 1, 2]), keeps_all=True)]
    [[0, 1, 1, -1, 0, 1]]
    """
    low = np.searchsorted(ordered, keys, "left")
    counts = np.searchsorted(ordered, keys, "right") - low
    rows = np.maximum(counts, 1) if keeps_all else counts
    for start, stop in _pieces(rows):
        at = np.repeat(np.arange(start, stop), rows[start:stop])
        begin = np.cumsum(rows[start:stop]) - rows[start:stop]
        nth = np.arange(len(at)) - np.repeat(begin, rows[start:stop])
        yield at, np.where(counts[at] > 0, low[at] + nth, NOTHING)


def _pieces(rows: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Cut left rows into runs of about `ROWS_PER_BLOCK` joined rows, at least one."""
    ends = np.cumsum(rows)
    start = 0
    while start < len(rows):
        done = ends[start - 1] if start else 0
        stop = int(np.searchsorted(ends, done + ROWS_PER_BLOCK, "right"))
        stop = max(stop, start + 1)
        if ends[stop - 1] > done:
            yield start, stop
        start = stop
