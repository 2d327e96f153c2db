"""Open windows of columns: aggregates for each key and window, without a loop over rows.

As in `aggregates.py`, what is kept are partial aggregates, here a row for each key and
window. Their blocks are merged as they become as large as the one before, so that each
row is sorted a few times at most. A session's row may go on, so sessions are one block.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from timelyml.errors import PayloadError, TimeError
from timelyml.exchange import concat, num_records, slice_rows, take
from timelyml.graph import Exchange
from timelyml.operators.aggregates import Aggregate, Plan, Spec, parsed_aggregates
from timelyml.operators.columns import Columns, column, columns_of
from timelyml.operators.grouping import Array
from timelyml.operators.keys import route_by
from timelyml.operators.windows import (
    Late,
    Moment,
    Session,
    Sliding,
    Span,
    Windows,
    no_event_time,
)
from timelyml.runtime.shard import Shard

ROWS_PER_BLOCK = 1 << 16

Mask = np.ndarray[Any, np.dtype[np.bool_]]

START = "start of the window"
END = "end of the window"
_START_KEY, _END_PART = f"key {START}", f"max {END}"


class ColumnWindows:
    """What windows of columns are made of; see `window`.

    Raises:
        ConfigError: An aggregate is none, or two columns have one name.
    """

    def __init__(
        self,
        who: str,
        windows: Windows,
        aggregates: Mapping[str, Spec],
        *,
        event_time: str,
        key: str,
        allowed_lateness: Span | None,
        late: Late,
    ) -> None:
        self.who = who
        self.windows = windows
        self.key = key
        self.allowed_lateness = allowed_lateness
        self.late = late
        self._event_time = event_time
        parsed = parsed_aggregates(who, [key, "start", "end"], aggregates)
        ends = Aggregate("end", "max", END)
        self.plan = Plan(who, [key, START], [ends, *parsed])

    @property
    def columns(self) -> list[str]:
        """The columns that it reads."""
        own = (START, END)
        read = [name for name in self.plan.columns if name not in own]
        return [self._event_time, *read]

    @property
    def pact(self) -> Exchange:
        """How rows find the shard of their key."""
        return Exchange(route_by([self.key]))

    def date(
        self, shard: Shard, payload: Any
    ) -> Generator[None, None, tuple[list[Any], Moment]]:
        """Return the payload, in blocks, and the latest event time."""
        del shard
        latest = self.moments(columns_of(payload)).max()
        yield
        is_number = latest.dtype.kind in "if"
        return [payload], latest.item() if is_number else latest

    def moments(self, columns: Columns) -> Array:
        """Return the event times of rows, in 64 bits."""
        found = column(self.who, columns, self._event_time)
        kind = found.dtype.kind
        if found.ndim != 1 or kind not in "iufM":
            raise PayloadError(
                f"operator {self.who!r} cannot take column {self._event_time!r} as "
                f"event times; got {found.dtype} in rows of shape {list(found.shape[1:])}; expected "
                f"one number or datetime a row; convert it",
                operator=self.who,
                column=self._event_time,
            )
        if kind == "M":
            missing = np.isnat(found)
        else:
            if kind == "u" and (last := found.max(initial=0)) > np.iinfo(np.int64).max:
                raise TimeError(
                    f"operator {self.who!r} got an event time beyond the last one; got "
                    f"{last}; expected less than 2**63; convert it",
                    operator=self.who,
                )
            found = found.astype(np.float64 if kind == "f" else np.int64, copy=False)
            missing = np.isnan(found)
        if missing.any():
            raise no_event_time(self.who, found[missing][0])
        return found

    def open(self, shard: Shard, over: Moment | None) -> OpenColumns:
        """Return the open windows of a shard; see `RecordWindows.open`."""
        return OpenColumns(shard, self, over)

    def named(self, partials: Columns) -> Columns:
        """Return what is sent for closed windows."""
        finished = self.plan.finished(partials)
        key, start = finished.pop(self.key), finished.pop(START)
        return {self.key: key, "start": start, **finished}


class OpenColumns:
    """The open windows of one shard: `state` has blocks of partial aggregates."""

    def __init__(self, shard: Shard, plan: ColumnWindows, over: Moment | None) -> None:
        self._state = shard.state
        self._plan = plan
        self._over = over
        self._added: list[Any] = []

    def add(self, payload: Any) -> Iterator[None]:
        """Add a block, which waits for the others of its epoch."""
        self._added.append(payload)
        yield

    def settle(self) -> list[Any]:
        """Put what was added into its windows; return blocks of what was too late."""
        if not self._added:
            return []
        payload = concat(self._added)
        columns = columns_of(payload)
        moments = self._plan.moments(columns)
        if isinstance(self._plan.windows, Session):
            is_late = self._add_to_sessions(columns, moments, self._plan.windows)
        else:
            is_late = self._add_to_windows(columns, moments, self._plan.windows)
        return [take(payload, np.flatnonzero(is_late))] if is_late.any() else []

    def take_closed(self, over: Moment | None) -> Iterator[Columns]:
        """Remove the windows whose end is not after `over`; yields results, by key."""
        if over is None:
            return
        parts = [(part, part[_END_PART] <= over) for part in self._parts]
        closed = [_rows(part, is_over) for part, is_over in parts if is_over.any()]
        if closed:
            self._keep(
                [
                    _rows(part, ~is_over) if is_over.any() else part
                    for part, is_over in parts
                ]
            )
            yield from self._results(closed)

    def take_all(self) -> Iterator[Columns]:
        """Remove all windows; yields their results, by key."""
        parts = self._parts
        self._keep([])
        if parts:
            yield from self._results(parts)

    def _results(self, partials: list[Columns]) -> Iterator[Columns]:
        results = self._plan.named(self._plan.plan.merged(partials))
        for start in range(0, num_records(results), ROWS_PER_BLOCK):
            yield slice_rows(results, start, start + ROWS_PER_BLOCK)

    @property
    def _parts(self) -> list[Columns]:
        parts: list[Columns] = self._state.get("parts", [])
        return parts

    def _keep(self, parts: list[Columns]) -> None:
        parts = [part for part in parts if num_records(part)]
        if parts:
            self._state["parts"] = parts
        else:
            self._state.pop("parts", None)

    def _add_to_windows(self, columns: Columns, moments: Array, windows: Any) -> Mask:
        fixed = _Fixed.of(windows, moments)
        rows, starts = fixed.windows_of(moments)
        ends = starts + fixed.length
        num_found = np.bincount(rows, minlength=len(moments))
        num_open = num_found
        if self._over is not None:
            is_open = ends > self._over
            rows, starts, ends = rows[is_open], starts[is_open], ends[is_open]
            num_open = np.bincount(rows, minlength=len(moments))
        if len(rows):
            mine: Columns = take(columns, rows)
            part = self._plan.plan.grouped({**mine, START: starts, END: ends})
            self._merge_in(part)
        wanted = num_found if self._plan.late == "any" else np.minimum(num_found, 1)
        is_late: Mask = num_open < wanted
        return is_late

    def _merge_in(self, part: Columns) -> None:
        """Add a block, merged with those before it that are not much larger."""
        parts = list(self._parts)
        while parts and num_records(parts[-1]) <= 2 * num_records(part):
            part = self._plan.plan.merged([parts.pop(), part])
        self._keep([*parts, part])

    def _add_to_sessions(
        self, columns: Columns, moments: Array, windows: Session
    ) -> Mask:
        plan, keys = self._plan.plan, columns[self._plan.key]
        ends = moments + _span(windows.gap)
        rows = plan.as_partials({**columns, START: moments, END: ends})
        table, rest = None, None
        blocks = [rows]
        for part in self._parts:  # there is one at most
            is_near = np.isin(part[f"key {self._plan.key}"], keys)
            table, rest = _rows(part, is_near), _rows(part, ~is_near)
            blocks = [table, rows]
        joined: Columns = concat(blocks)
        run = _runs(
            joined[f"key {self._plan.key}"], joined[_START_KEY], joined[_END_PART]
        )
        num_known = 0 if table is None else num_records(table)
        is_late = np.zeros(len(run.of_row), np.bool_)
        if self._over is not None:
            is_known = np.zeros(len(run.starts), np.bool_)
            is_known[run.of_row[:num_known]] = True
            is_late = (~is_known & (run.ends <= self._over))[run.of_row]
        joined[_START_KEY] = run.starts[run.of_row]
        taken = _rows(joined, ~is_late)
        merged = [plan.merged([taken])] if num_records(taken) else []
        # One block: neither of them has windows of the other.
        both = [part for part in (rest, *merged) if part is not None]
        self._keep([concat(both)] if both else [])
        return is_late[num_known:]


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Windows of one length, in units that fit the event times."""

    length: Any
    step: Any
    origin: Any
    is_tumbling: bool

    @classmethod
    def of(cls, windows: Any, moments: Array) -> _Fixed:
        origin: Any = windows.origin
        if isinstance(origin, dt.datetime):
            if origin.tzinfo is not None:
                origin = origin.astimezone(dt.UTC).replace(tzinfo=None)
            origin = np.datetime64(origin)
        elif origin is None:
            is_date = moments.dtype.kind == "M"
            origin = np.zeros((), moments.dtype)[()] if is_date else 0
        length = _span(windows.length)
        if isinstance(windows, Sliding):
            return cls(length, _span(windows.step), origin, is_tumbling=False)
        return cls(length, length, origin, is_tumbling=True)

    def windows_of(self, moments: Array) -> tuple[Array, Array]:
        """Return rows, and the starts of windows that they are in, one for each."""
        starts = self.origin + (moments - self.origin) // self.step * self.step
        rows = np.arange(len(moments))
        if self.is_tumbling:
            return rows, starts
        all_rows, all_starts = [rows[:0]], [starts[:0]]
        while len(rows):
            is_in = starts + self.length > moments[rows]
            rows, starts = rows[is_in], starts[is_in]
            all_rows.append(rows)
            all_starts.append(starts)
            starts = starts - self.step
        return np.concatenate(all_rows), np.concatenate(all_starts)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of intervals that overlap: of each row its run; of each run its bounds."""

    of_row: Array
    starts: Array
    ends: Array


def _runs(keys: Array, starts: Array, ends: Array) -> _Runs:
    """Return the runs of intervals of equal keys, each from its start to before its end.

    >>> found = _runs(*map(np.array, ([7, 7, 8, 7], [0, 5, 5, 9], [6, 8, 8, 12])))
    >>> found.of_row.tolist(), found.starts.tolist(), found.ends.tolist()
    ([0, 0, 2, 1], [0, 9, 5], [8, 12, 8])
    """
    _, codes = np.unique(keys, return_inverse=True)
    order = np.lexsort((starts, codes))
    codes, starts = codes[order], starts[order]
    distinct, ranks = np.unique(ends[order], return_inverse=True)
    # How far the intervals of a key reach so far: those of later keys count for more.
    reach = np.maximum.accumulate(codes * len(distinct) + ranks)
    reached = distinct[reach - codes * len(distinct)]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (codes[1:] != codes[:-1]) | (starts[1:] >= reached[:-1])
    firsts = np.flatnonzero(is_first)
    of_row = np.empty(len(order), np.intp)
    of_row[order] = np.cumsum(is_first) - 1
    return _Runs(of_row, starts[firsts], reached[np.append(firsts[1:], len(order)) - 1])


def _span(span: Span) -> Any:
    return np.timedelta64(span) if isinstance(span, dt.timedelta) else span


def _rows(columns: Columns, is_chosen: Array) -> Columns:
    return {name: values[is_chosen] for name, values in columns.items()}
