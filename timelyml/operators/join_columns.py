"""The join of columns: one sort of the right keys, and two binary searches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from timelyml.errors import PayloadError
from timelyml.exchange import concat
from timelyml.operators.columns import Columns, column, columns_of
from timelyml.operators.schema import Schema

ROWS_PER_BLOCK = 1 << 16

Indices = npt.NDArray[np.intp]
NOTHING = -1  # in place of a row that is missing


class ColumnJoin:
    """Joins the columns of one time; see `join`."""

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
        self._empty: list[Columns | None] = [None, None]  # sides, as they are known

    def expect(self, left: Schema | None, right: Schema | None) -> None:
        """Note the columns of both sides, as far as they are known beforehand."""
        for side, schema in enumerate((left, right)):
            self._empty[side] = None if schema is None else schema.empty()

    def results(self, lefts: list[Any], rights: list[Any]) -> Iterator[Columns]:
        """Yield the joined columns, a bounded number of rows at a time."""
        both = self._columns_of(lefts, 0), self._columns_of(rights, 1)
        if self._gives_nothing(lefts, rights):
            return
        left, right = both[0] or self._unknown(0), both[1] or self._unknown(1)
        keys = self._key_of(left, 0), self._key_of(right, 1)
        self._check_kinds(*keys)
        order = np.argsort(keys[1], kind="stable")
        ordered = keys[1][order]
        low = np.searchsorted(ordered, keys[0], "left")
        counts = np.searchsorted(ordered, keys[0], "right") - low
        rows = counts if self._how == "inner" else np.maximum(counts, 1)
        for start, stop in _pieces(rows):
            at = np.repeat(np.arange(start, stop), rows[start:stop])
            begin = np.cumsum(rows[start:stop]) - rows[start:stop]
            nth = np.arange(len(at)) - np.repeat(begin, rows[start:stop])
            is_met = counts[at] > 0
            to = np.full(len(at), NOTHING)
            to[is_met] = order[(low[at] + nth)[is_met]]
            yield self._joined(left, right, at, to)
        if self._how == "outer":
            alone = np.flatnonzero(~np.isin(keys[1], keys[0]))
            for start in range(0, len(alone), ROWS_PER_BLOCK):
                to = alone[start : start + ROWS_PER_BLOCK]
                yield self._joined(left, right, np.full(len(to), NOTHING), to)

    def _key_of(self, columns: Columns, side: int) -> npt.NDArray[Any]:
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

    def _check_kinds(self, left: npt.NDArray[Any], right: npt.NDArray[Any]) -> None:
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

    def _columns_of(self, payloads: list[Any], side: int) -> Columns | None:
        """Return the columns of a side, without rows if nothing came of it."""
        if not payloads:
            return self._empty[side]
        columns = columns_of(concat(payloads))
        if self._empty[side] is None:
            self._empty[side] = {name: c[:0] for name, c in columns.items()}
        return columns

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

    def _joined(
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
        taken[missing] = fill
        taken[~missing] = values[indices[~missing]]
        return taken


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
