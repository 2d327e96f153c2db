"""Open windows of records: a value for each key and window, by functions of the user.

Which records of a session are late is decided for all of an epoch together, so that it
depends neither on their order nor on how many shards sent them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import numpy as np

from timelyml.exchange import records_of
from timelyml.graph import Exchange
from timelyml.operators.keys import Key, field_getter, first, key_function
from timelyml.operators.steps import RECORDS_PER_BLOCK, in_chunks, in_steps
from timelyml.operators.windows import (
    Late,
    Moment,
    Session,
    Span,
    Window,
    Windows,
    no_event_time,
)
from timelyml.runtime.shard import Shard

Dated = tuple[Any, Moment, Any]
"""Key, event time, record."""


class RecordWindows(NamedTuple):
    """What windows of records are made of."""

    who: str
    windows: Windows
    event_time: Key
    key: Key | None
    value: Callable[[Any], Any] | None
    combine: Callable[[Any, Any], Any] | None
    allowed_lateness: Span | None
    late: Late

    @property
    def pact(self) -> Exchange:
        """How dated records find the shard of their key."""
        return Exchange.by_key(first)

    def date(
        self, shard: Shard, payload: Any
    ) -> Generator[None, None, tuple[list[Any], Moment]]:
        """Return blocks of (key, event time, record), and the latest event time."""
        key_of, time_of = key_function(self.key), self.event_time
        moment_of = field_getter(time_of) if isinstance(time_of, str) else time_of
        dated: list[Dated] = []

        def visit(records: list[Any]) -> None:
            for record in records:
                moment: Any = moment_of(record)
                if moment is None or moment != moment:  # noqa: PLR0124  NaN
                    raise no_event_time(self.who, moment)
                if isinstance(moment, np.number):
                    moment = moment.item()  # of no width that may overflow
                dated.append((key_of(record), moment, record))

        yield from in_chunks(shard, records_of(payload), visit)
        blocks = [
            dated[start : start + RECORDS_PER_BLOCK]
            for start in range(0, len(dated), RECORDS_PER_BLOCK)
        ]
        return blocks, max(moment for _, moment, _ in dated)

    def open(self, shard: Shard, over: Moment | None) -> OpenRecords:
        """Return the open windows of a shard.

        Args:
            shard: Whose state has them.
            over: Up to which end windows are over; None if none are.
        """
        return OpenRecords(shard, self, over)

    def value_of(self, record: Any) -> Any:
        """Return the value of a record, as a list of one if there is no `combine`."""
        value = record if self.value is None else self.value(record)
        return [value] if self.combine is None else value

    def both(self, earlier: Any, later: Any) -> Any:
        """Return two values as one."""
        if self.combine is not None:
            return self.combine(earlier, later)
        earlier.extend(later)  # lists of the state's own
        return earlier


class OpenRecords:
    """The open windows of one shard: `state` maps a key to its windows by start.

    "ends" has a heap with one entry for each; those of sessions that went on or became
    part of others are corrected when they come up.
    """

    def __init__(self, shard: Shard, plan: RecordWindows, over: Moment | None) -> None:
        self._shard = shard
        self._open = shard.state
        self._ends = shard.state_of("ends")
        self._plan = plan
        self._over = over
        self._num_seen = 0
        self._late: list[tuple[int, Any]] = []  # in the order in which they came
        self._unmet: dict[Any, list[tuple[Moment, int, Any]]] = {}

    def add(self, payload: list[Dated]) -> Iterator[None]:
        """Add records to their windows; yields now and then."""
        is_session = isinstance(self._plan.windows, Session)
        return in_steps(
            self._shard, payload, self._add_to_session if is_session else self._add
        )

    def settle(self) -> list[list[Any]]:
        """Return blocks of what was too late, once all of an epoch was added."""
        for key, unmet in self._unmet.items():
            self._settle_sessions(key, sorted(unmet, key=first))
        records = [record for _, record in sorted(self._late, key=first)]
        return [records] if records else []

    def take_closed(self, over: Moment | None) -> Iterator[list[Any]]:
        """Remove the windows whose end is not after `over`; yields results, by end."""
        if over is not None:
            yield from self._take(lambda end: bool(end <= over))

    def take_all(self) -> Iterator[list[Any]]:
        """Remove all windows; yields their results, by end."""
        return self._take(lambda _: True)

    def _add(self, dated: Dated) -> None:
        key, moment, record = dated
        self._num_seen += 1
        assert not isinstance(self._plan.windows, Session)  # noqa: S101  see `add`
        found = self._plan.windows.windows_of(moment)
        num_open = 0
        for start, end in found:
            if self._over is None or end > self._over:
                self._add_to_window(key, (start, end), self._plan.value_of(record))
                num_open += 1
        # None are wanted where a record falls between windows: it is not late.
        wanted = len(found) if self._plan.late == "any" else min(len(found), 1)
        if num_open < wanted:
            self._late.append((self._num_seen, record))

    def _add_to_session(self, dated: Dated) -> None:
        key, moment, record = dated
        self._num_seen += 1
        if not self._is_late(key, moment):
            self._extend_session(key, moment, self._plan.value_of(record))
        else:  # others of this epoch may lead from it to a session
            self._unmet.setdefault(key, []).append((moment, self._num_seen, record))

    def _settle_sessions(self, key: Any, unmet: list[tuple[Moment, int, Any]]) -> None:
        """Take runs of which any meets a session that is open by now."""
        gap = self._gap
        stop = 0
        while stop < len(unmet):
            start, stop = stop, stop + 1
            while stop < len(unmet) and unmet[stop][0] < unmet[stop - 1][0] + gap:
                stop += 1
            run = sorted(unmet[start:stop], key=lambda each: each[1])
            if all(self._is_late(key, moment) for moment, _, _ in run):
                self._late += [(number, record) for _, number, record in run]
                continue
            for moment, _, record in run:
                self._extend_session(key, moment, self._plan.value_of(record))

    def _take(self, is_over: Callable[[Moment], bool]) -> Iterator[list[Any]]:
        heap = self._ends.get("heap", [])
        results: list[Any] = []
        while heap and is_over(heap[0][0]):
            end, number, key, start = heapq.heappop(heap)
            found = self._open.get(key, {}).get(start)
            if found is None:
                continue  # it became part of another session
            if found[0] != end:  # the session went on
                heapq.heappush(heap, (found[0], number, key, start))
                continue
            self._remove(key, start)
            results.append((key, (start, end), found[1]))
            if len(results) >= RECORDS_PER_BLOCK:
                yield results
                results = []
        if results:
            yield results
        if not heap:
            self._ends.clear()

    @property
    def _gap(self) -> Span:
        assert isinstance(self._plan.windows, Session)  # noqa: S101  see `add`
        return self._plan.windows.gap

    def _is_late(self, key: Any, moment: Moment) -> bool:
        """Whether a session of its own would be over, and there is none to meet."""
        end = moment + self._gap
        return (
            self._over is not None and end <= self._over and not self._met(key, moment)
        )

    def _met(self, key: Any, moment: Moment) -> list[Moment]:
        """Return the starts of the sessions that a record meets, ascending."""
        end = moment + self._gap
        mine = self._open.get(key, {})
        return sorted(s for s, (e, _) in mine.items() if moment < e and s < end)

    def _extend_session(self, key: Any, moment: Moment, value: Any) -> None:
        start, end = moment, moment + self._gap
        met = self._met(key, moment)
        merged = None
        for its_start in met:
            its_end, its_value = self._remove(key, its_start)
            start, end = min(start, its_start), max(end, its_end)
            merged = its_value if merged is None else self._plan.both(merged, its_value)
        if met:
            value = self._plan.both(merged, value)
        self._put(key, (start, end), value, has_entry=start in met)

    def _add_to_window(self, key: Any, window: Window, value: Any) -> None:
        found = self._open.get(key, {}).get(window[0])
        if found is not None:
            value = self._plan.both(found[1], value)
        self._put(key, window, value, has_entry=found is not None)

    def _put(self, key: Any, window: Window, value: Any, *, has_entry: bool) -> None:
        start, end = window
        self._open.setdefault(key, {})[start] = end, value
        if not has_entry:
            number = self._ends["count"] = self._ends.get("count", 0) + 1
            # The number decides between equal ends: keys need not have an order.
            entry = end, number, key, start
            heapq.heappush(self._ends.setdefault("heap", []), entry)

    def _remove(self, key: Any, start: Moment) -> tuple[Moment, Any]:
        mine = self._open[key]
        found: tuple[Moment, Any] = mine.pop(start)
        if not mine:
            del self._open[key]
        return found
