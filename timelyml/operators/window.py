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

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar, get_args

from timelyml.errors import ConfigError, GraphError
from timelyml.exchange import num_records
from timelyml.graph import Broadcast, StreamRef
from timelyml.operators.aggregates import Spec
from timelyml.operators.checks import check_optional_callable
from timelyml.operators.edges import StreamLike, check_stream
from timelyml.operators.keys import Key, check_key, value_function
from timelyml.operators.operator_builder import add_operator
from timelyml.operators.ordered import keep, take_kept
from timelyml.operators.schema import require
from timelyml.operators.window_columns import ColumnWindows
from timelyml.operators.window_records import RecordWindows
from timelyml.operators.windows import (
    Late,
    Moment,
    Session,
    Sliding,
    Span,
    Tumbling,
    Windows,
)
from timelyml.progress import Capability, Timestamp
from timelyml.runtime.operator import Delivery, Logic
from timelyml.runtime.shard import Shard

T = TypeVar("T")


class Windowed(NamedTuple, Generic[T]):
    """What windows give: their results, and the records that came too late for them."""

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
    aggregates: Mapping[str, Spec] | None = None,
    allowed_lateness: Span | None = None,
    late: Late = "all",
    num_shards: int | None = None,
    name: str | None = None,
) -> Windowed[StreamRef]:
    """Send `(key, (start, end), value)` for each key and window of event time.

    A window is over once an event time of `allowed_lateness` beyond its end was seen,
    on any shard and for any key, in an epoch that is complete; its result has that
    epoch. What is open at the end is sent one epoch later, or with the last epoch that
    the input was advanced to. A record whose windows were all over before its epoch
    goes to the stream of late records, as it came; but not one that others of its
    epoch link to a session that is open. One of which only some windows were over is in
    the results of the others; with `late="any"` it is among the late records too.

    With `aggregates`, streams are of columns and nothing is done row by row: results
    have a row for each key and window, with the columns of the key, "start", "end" and
    the aggregates, in the order of keys for each epoch.

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
        aggregates: By name of a column to make, as for `aggregate`. Then `event_time`
            and `key` are names of columns.
        allowed_lateness: How long to wait for records that are out of order.
        late: Which records are late: those of whose windows "all" were over, or "any".
        num_shards: Shards that share the keys; default: as many as `up` has.
        name: Shown in traces and errors; the key of its state.

    Raises:
        GraphError: An argument is none of these, or the stream is in a nested scope.
        ConfigError: Aggregates without the names of columns, or with functions; or
            `late` is neither.
    """
    who = name or "window"
    check_stream(who, up)
    check_key(who, event_time, "event_time")
    if key is not None:
        check_key(who, key)
    check_optional_callable(who, "value", value)
    check_optional_callable(who, "combine", combine)
    _check_windows(who, up, windows, late)
    kind: RecordWindows | ColumnWindows
    if aggregates is None:
        kind = RecordWindows(
            who,
            windows,
            event_time,
            key,
            value or value_function(key),
            combine,
            allowed_lateness,
            late,
        )
    else:
        if value is not None or combine is not None:
            raise _misfit(who, "value or combine")
        if not (isinstance(event_time, str) and isinstance(key, str)):
            raise _misfit(who, f"{event_time!r} and {key!r}")
        kind = ColumnWindows(
            who,
            windows,
            aggregates,
            event_time=event_time,
            key=key,
            allowed_lateness=allowed_lateness,
            late=late,
        )
        require(who, up, kind.columns)
    dated, latest = add_operator(
        "window-event_time",
        [up],
        _dating(kind),
        name=None if name is None else f"{name}-event_time",
        num_outputs=2,
        states=("state",),
    )
    results, too_late = add_operator(
        "window",
        [dated, latest],
        _windowing(kind),
        name=name,
        pacts=[kind.pact, Broadcast()],
        num_outputs=2,
        states=("state", "ends", "kept", "clock"),
        num_shards=num_shards,
    )
    return Windowed(results, too_late)


def _check_windows(who: str, up: StreamLike, windows: Windows, late: Late) -> None:
    if not isinstance(windows, (Tumbling, Sliding, Session)) or up.depth:
        got = windows if not up.depth else f"a stream {up.depth} scopes deep"
        raise GraphError(
            f"operator {who!r} needs windows, outside of scopes; got {got!r}; expected "
            f"Tumbling, Sliding or Session, and a stream of epochs; leave the scope",
            operator=who,
        )
    if late not in get_args(Late):
        raise ConfigError(
            f"operator {who!r} has option 'late' out of range; got {late!r}; expected "
            f"'all' or 'any'; correct the option",
            operator=who,
            option="late",
        )


def _misfit(who: str, got: str) -> ConfigError:
    return ConfigError(
        f"operator {who!r} makes aggregates of columns; got {got}; expected names for "
        f"event_time and key, and no functions; drop aggregates or the others",
        operator=who,
    )


def _dating(kind: RecordWindows | ColumnWindows) -> Logic:
    """Send dated blocks, and for each epoch ever later event times."""

    def on_batch(shard: Shard, delivery: Delivery) -> Iterator[None]:
        time = delivery.time
        shard.notify_at(time, outputs=())  # to forget it; holds nothing back
        if not num_records(delivery.payload):
            return
        blocks, latest = yield from kind.date(shard, delivery.payload)
        if time not in shard.state or shard.state[time] < latest:
            shard.state[time] = latest
            shard.output(1).send(time, [latest])
        for block in blocks:
            shard.output().send(time, block)
            yield

    def on_notify(shard: Shard, time: Timestamp) -> None:
        shard.state.pop(time, None)

    return Logic(on_batch=on_batch, on_notify=on_notify)


def _windowing(kind: RecordWindows | ColumnWindows) -> Logic:
    """Keep windows. "clock" has what is told of epochs, the clock and a capability."""

    def over(clock: Moment | None) -> Moment | None:
        """Return up to which end windows are over."""
        lateness = kind.allowed_lateness
        return clock if clock is None or lateness is None else clock - lateness

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
        windows = kind.open(shard, over(shown))
        for payload in take_kept(shard.state_of("kept"), time):
            yield from windows.add(payload)
        for late in windows.settle():
            shard.output(1).send(time, late)
        told = clock.pop(time, shown)
        if told is not None:
            clock["now"] = shown = told if shown is None else max(shown, told)
        for results in windows.take_closed(over(shown)):
            shard.output().send(time, results)
            yield
        _hold(shard, clock, time)

    return Logic(
        on_batch=on_batch,
        on_notify=on_notify,
        on_frontier=lambda shard: _follow(shard, kind),
    )


def _follow(shard: Shard, kind: RecordWindows | ColumnWindows) -> None:
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
    for results in kind.open(shard, None).take_all():
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
