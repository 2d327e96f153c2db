"""Windows by event time, closed by what has been seen of it.

Two operators do it. The first notes the event times of its records, and tells every
shard the latest of each epoch. The second has a clock, the latest event time of all
complete epochs: it takes the records of an epoch once it is complete, by the clock as
it was before, then sets the clock on and closes the windows that are over. So results
depend neither on timing nor on the number of shards, and the window of a key that is
never seen again closes too.

Source:
    The Dataflow Model (Akidau et al., 2015): windows, sessions that merge, allowed
    lateness. The clock is that of whole epochs, where theirs is a heuristic.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from timelyml.errors import GraphError, TimeError
from timelyml.exchange import records_of
from timelyml.graph import Broadcast, Exchange, StreamRef
from timelyml.operators.checks import check_optional_callable
from timelyml.operators.edges import StreamLike, check_stream
from timelyml.operators.keys import (
    Key,
    check_key,
    field_getter,
    first,
    key_function,
    value_function,
)
from timelyml.operators.operator_builder import add_operator
from timelyml.operators.ordered import keep, take_kept
from timelyml.operators.steps import RECORDS_PER_BLOCK, in_chunks, in_steps
from timelyml.operators.windows import (
    Moment,
    Session,
    Sliding,
    Span,
    Tumbling,
    Window,
    Windows,
)
from timelyml.progress import Capability, Timestamp
from timelyml.runtime.operator import Delivery, Logic
from timelyml.runtime.shard import Shard

T = TypeVar("T")


class Windowed(NamedTuple, Generic[T]):
    """What windows give: their results, and the records that came too late."""

    results: T
    late: T


def window(
    up: StreamLike,
    windows: Windows,
    event_time: Key,
    *,
    key: Key | None = None,
    value: Callable[[Any], Any] | None = None,
    combine: Callable[[Any, Any], Any] | None = None,
    allowed_lateness: Span | None = None,
    num_shards: int | None = None,
    name: str | None = None,
) -> Windowed[StreamRef]:
    """Send `(key, (start, end), value)` for each key and window of event time.

    A window is over once an event time of `allowed_lateness` beyond its end was seen,
    on any shard and for any key, in an epoch that is complete; its result has that
    epoch. What is open at the end is sent one epoch later, or with the last epoch that
    the input was advanced to. A record whose windows were all over before its epoch
    goes to the stream of late records, as it came.

    Args:
        up: Stream to read; not in a nested scope.
        windows: `Tumbling`, `Sliding` or `Session`.
        event_time: From one record to its moment, or the name of a field: numbers, or
            datetimes.
        key: From one record to its key, or the name of a field. Default: records are
            pairs `(key, value)`.
        value: From one record to its value. Default: the record, or the pair's value.
        combine: From two values to one; associative. Values are combined in order of
            epoch and producer shard. Default: a window's value is the list of values.
        allowed_lateness: How long to wait for records that are out of order.
        num_shards: Shards that share the keys; default: as many as `up` has.
        name: Shown in traces and errors; the key of its state.

    Raises:
        GraphError: An argument is none of these, or the stream is in a nested scope.
    """
    who = name or "window"
    check_stream(who, up)
    check_key(who, event_time, "event_time")
    if key is not None:
        check_key(who, key)
    check_optional_callable(who, "value", value)
    check_optional_callable(who, "combine", combine)
    if not isinstance(windows, (Tumbling, Sliding, Session)) or up.depth:
        got = windows if not up.depth else f"a stream {up.depth} scopes deep"
        raise GraphError(
            f"operator {who!r} needs windows, outside of scopes; got {got!r}; expected "
            f"Tumbling, Sliding or Session, and a stream of epochs; leave the scope",
            operator=who,
        )
    dated, latest = add_operator(
        "event_time",
        [up],
        _dating(who, key_function(key), event_time),
        name=None if name is None else f"{name}-event_time",
        num_outputs=2,
        states=("state",),
    )
    plan = _Plan(windows, value or value_function(key), combine, allowed_lateness)
    results, late = add_operator(
        "window",
        [dated, latest],
        _windowing(plan),
        name=name,
        pacts=[Exchange.by_key(first), Broadcast()],
        num_outputs=2,
        states=("state", "ends", "kept", "clock"),
        num_shards=num_shards,
    )
    return Windowed(results, late)


class _Plan(NamedTuple):
    """What to do with the values of a window."""

    windows: Windows
    value: Callable[[Any], Any] | None
    combine: Callable[[Any, Any], Any] | None
    allowed_lateness: Span | None

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


def _dating(who: str, key_of: Callable[[Any], Any], event_time: Key) -> Logic:
    """Send (key, event time, record), and for each epoch ever later event times."""
    moment_of = field_getter(event_time) if isinstance(event_time, str) else event_time

    def on_batch(shard: Shard, delivery: Delivery) -> Iterator[None]:
        time = delivery.time
        shard.notify_at(time, outputs=())  # to forget it; holds nothing back
        dated: list[Any] = []

        def date(records: list[Any]) -> None:
            for record in records:
                moment: Any = moment_of(record)
                if moment is None or moment != moment:  # noqa: PLR0124  NaN
                    raise TimeError(
                        f"operator {who!r} got a record without an event time; got "
                        f"{moment!r}; expected a number or datetime; filter it before",
                        operator=who,
                    )
                dated.append((key_of(record), moment, record))

        yield from in_chunks(shard, records_of(delivery.payload), date)
        if not dated:
            return
        latest = max(moment for _, moment, _ in dated)
        if time not in shard.state or shard.state[time] < latest:
            shard.state[time] = latest
            shard.output(1).send(time, [latest])
        for start in range(0, len(dated), RECORDS_PER_BLOCK):
            shard.output().send(time, dated[start : start + RECORDS_PER_BLOCK])
            yield

    def on_notify(shard: Shard, time: Timestamp) -> None:
        shard.state.pop(time, None)

    return Logic(on_batch=on_batch, on_notify=on_notify)


def _windowing(plan: _Plan) -> Logic:
    """Keep windows. "clock" has what is told of epochs, the clock and a capability."""

    def on_batch(shard: Shard, delivery: Delivery) -> None:
        shard.notify_at(delivery.time)
        if delivery.port == 0:
            keep(shard.state_of("kept"), delivery)
            return
        clock = shard.state_of("clock")
        for latest in delivery.payload:
            known = clock.get(delivery.time)
            clock[delivery.time] = latest if known is None else max(known, latest)

    def on_notify(shard: Shard, time: Timestamp) -> Iterator[None]:
        clock = shard.state_of("clock")
        shown = clock.get("now")
        open_windows = _OpenWindows(shard, plan, shown)
        late: list[Any] = []

        def add(dated: tuple[Any, Moment, Any]) -> None:
            if not open_windows.add(*dated):
                late.append(dated[2])

        for payload in take_kept(shard.state_of("kept"), time):
            yield from in_steps(shard, payload, add)
        if late:
            shard.output(1).send(time, late)
        told = clock.pop(time, shown)
        if told is not None:
            clock["now"] = shown = told if shown is None else max(shown, told)
        for results in open_windows.take_closed(shown):
            shard.output().send(time, results)
            yield
        _hold(shard, clock, time)

    return Logic(
        on_batch=on_batch,
        on_notify=on_notify,
        on_frontier=lambda shard: _follow(shard, plan),
    )


def _follow(shard: Shard, plan: _Plan) -> None:
    """Let the right to send follow the frontier; at the end, send what is open."""
    clock = shard.state_of("clock")
    capability: Capability | None = clock.get("capability")
    coming = [*shard.frontier(0).elements, *shard.frontier(1).elements]
    if not coming:
        clock.clear()
    if capability is None:
        return
    if coming:
        capability.downgrade(max(capability.time, min(coming)))
        return
    for results in _OpenWindows(shard, plan, None).take_all():
        shard.output().send(capability.time, results)
    capability.release()


def _hold(shard: Shard, clock: dict[Any, Any], time: Timestamp) -> None:
    """Keep the right to send the open windows after `time`, if there are any."""
    assert isinstance(time, int)  # noqa: S101  outside of scopes
    capability: Capability | None = clock.get("capability")
    if not shard.state:
        if capability is not None:
            del clock["capability"]
            capability.release()
    elif capability is None:
        clock["capability"] = shard.retain(time + 1)
    else:
        capability.downgrade(max(capability.time, time + 1))


class _OpenWindows:
    """The open windows of one shard: `state` maps a key to its windows by start.

    "ends" has a heap with one entry for each; those of sessions that went on or became
    part of others are corrected when they come up.
    """

    def __init__(self, shard: Shard, plan: _Plan, clock: Moment | None) -> None:
        self._open = shard.state
        self._ends = shard.state_of("ends")
        self._plan = plan
        self._over = self._before(clock)

    def add(self, key: Any, moment: Moment, record: Any) -> bool:
        """Add a record to its windows; False if it is too late for all of them."""
        value = self._plan.value_of
        if isinstance(self._plan.windows, Session):
            return self._add_to_session(key, moment, value(record))
        found = self._plan.windows.windows_of(moment)
        is_taken = not found  # nothing was to take it: it is not late
        for start, end in found:
            if self._over is None or end > self._over:
                self._add_to_window(key, (start, end), value(record))
                is_taken = True
        return is_taken

    def take_closed(self, clock: Moment | None) -> Iterator[list[Any]]:
        """Remove the windows that are over; yields their results, by end."""
        over = self._before(clock)
        if over is not None:
            yield from self._take(lambda end: bool(end <= over))

    def take_all(self) -> Iterator[list[Any]]:
        """Remove all windows; yields their results, by end."""
        return self._take(lambda _: True)

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

    def _before(self, clock: Moment | None) -> Moment | None:
        """Return up to which end windows are over."""
        lateness = self._plan.allowed_lateness
        return clock if clock is None or lateness is None else clock - lateness

    def _add_to_window(self, key: Any, window: Window, value: Any) -> None:
        found = self._open.get(key, {}).get(window[0])
        if found is not None:
            value = self._plan.both(found[1], value)
        self._put(key, window, value, has_entry=found is not None)

    def _add_to_session(self, key: Any, moment: Moment, value: Any) -> bool:
        assert isinstance(self._plan.windows, Session)  # noqa: S101  the caller saw
        gap = self._plan.windows.gap
        start, end = moment, moment + gap
        mine = self._open.get(key, {})
        met = sorted(s for s, (e, _) in mine.items() if moment < e and s < end)
        if not met and self._over is not None and end <= self._over:
            return False
        merged = None
        for its_start in met:
            its_end, its_value = self._remove(key, its_start)
            start, end = min(start, its_start), max(end, its_end)
            merged = its_value if merged is None else self._plan.both(merged, its_value)
        if met:
            value = self._plan.both(merged, value)
        self._put(key, (start, end), value, has_entry=start in met)
        return True

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
