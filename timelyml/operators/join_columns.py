"""The join of columns: one sort of the right keys, and two binary searches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from timelyml.errors import PayloadError
from timelyml.exchange import concat
from timelyml.operators.keys import Columns, column, columns_of

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

    def results(self, lefts: list[Any], rights: list[Any]) -> Iterator[Columns]:
        """Yield the joined columns, a bounded number of rows at a time.

        A side without any payload has no columns that could be named; "left" and
        "outer" leave its columns out then.
        """
        left = columns_of(concat(lefts)) if lefts else None
        right = columns_of(concat(rights)) if rights else None
        if left is None or right is None:
            yield from self._one_side(left, right)
            return
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
            found = np.where(counts[at] > 0, low[at] + nth, NOTHING)
            to = np.where(found == NOTHING, NOTHING, order[found])
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

    def _one_side(
        self, left: Columns | None, right: Columns | None
    ) -> Iterator[Columns]:
        if left is not None and self._how != "inner":
            yield left
        if right is not None and self._how == "outer":
            key = self._keys[1]
            others = {name: c for name, c in right.items() if name != key}
            yield {self._keys[0]: right[key], **others}

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
        if self._how == "inner" or not missing.any():
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
        taken = values.take(indices, axis=0)
        taken[missing] = fill
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
