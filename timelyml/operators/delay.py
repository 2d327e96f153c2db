"""Sending records on at a later time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from timelyml.errors import TimeError
from timelyml.exchange import num_records, records_of, split_by_destination, take
from timelyml.graph import StreamRef
from timelyml.operators.checks import check_callable
from timelyml.operators.edges import StreamLike, pass_notes
from timelyml.operators.operator_builder import add_operator
from timelyml.operators.ordered import take_kept
from timelyml.operators.steps import in_steps
from timelyml.progress import Timestamp, depth_of, less_equal
from timelyml.runtime.operator import Delivery, Logic, Steps
from timelyml.runtime.shard import Shard

Until = Callable[[Any, Any], Any]


def delay(
    up: StreamLike,
    until: Until,
    *,
    by_batch: bool = False,
    name: str | None = None,
) -> StreamRef:
    """Send each record at the time `until(record, time)`, once that is complete.

    However many records wait, there is one capability for each distinct time. Records
    of a time come by producer shard, and within one as they came.

    Args:
        up: Stream to read; columns stay columns.
        until: From a record (a row, if the payload is columns) and its time to the
            time to send it at, the same or later.
        by_batch: `until` is called once per block instead: from payload and time to
            one time, or to an integer array with one epoch per row.
        name: Shown in traces and errors; the key of its state.

    Raises:
        GraphError: `until` cannot be called.

    Source:
        timely dataflow (delay, delay_batch).
    """
    check_callable(name or "delay", "until", until)

    def hold(shard: Shard, delivery: Delivery, time: Any, payload: Any) -> None:
        later = _checked(shard, delivery.time, time)
        shard.notify_at(later)
        block = (delivery.port, delivery.source_shard, payload)
        shard.state.setdefault(later, []).append(block)

    def on_block(shard: Shard, delivery: Delivery) -> None:
        time = until(delivery.payload, delivery.time)
        if not isinstance(time, np.ndarray):
            hold(shard, delivery, time, delivery.payload)
            return
        _check_epochs(shard, delivery.time, time)
        epochs, codes = np.unique(time, return_inverse=True)
        for code, rows in split_by_destination(delivery.payload, codes, len(epochs)):
            hold(shard, delivery, int(epochs[code]), rows)

    def on_records(shard: Shard, delivery: Delivery) -> Iterator[None]:
        rows: dict[Any, list[int]] = {}
        times: list[Any] = []
        yield from in_steps(
            shard,
            records_of(delivery.payload),
            lambda record: times.append(until(record, delivery.time)),
        )
        for row, time in enumerate(times):
            rows.setdefault(time, []).append(row)
        for time, indices in rows.items():
            is_all = len(indices) == num_records(delivery.payload)
            payload = delivery.payload
            part = payload if is_all else take(payload, np.asarray(indices))
            hold(shard, delivery, time, part)

    def on_batch(shard: Shard, delivery: Delivery) -> Steps:
        if not by_batch:
            return on_records(shard, delivery)
        on_block(shard, delivery)
        return None

    def on_notify(shard: Shard, time: Timestamp) -> Iterator[None]:
        for payload in take_kept(shard.state, time):
            shard.output().send(time, payload)
            yield

    logic = Logic(on_batch=on_batch, on_notify=on_notify)
    (out,) = add_operator("delay", [up], logic, name=name, states=("state",))
    return pass_notes(up, out)


def _checked(shard: Shard, time: Timestamp, later: Any) -> Timestamp:
    """Return the time to send at, a plain timestamp.

    Raises:
        TimeError: It is none, or not at or after the record's own.
    """
    if isinstance(later, np.integer):
        later = int(later)
    is_like = type(later) is type(time) and (
        not isinstance(later, tuple) or len(later) == depth_of(time) + 1
    )
    if not is_like:
        raise _no_time(shard, time, later)
    if not less_equal(time, later):
        raise TimeError(
            f"operator {shard.operator!r} cannot send a record earlier than it came; "
            f"got {later!r} for a record at {time!r}; expected a time at or after it; "
            f"correct what chooses the time",
            operator=shard.operator,
            time=time,
        )
    checked: Timestamp = later
    return checked


def _check_epochs(shard: Shard, time: Timestamp, epochs: np.ndarray[Any, Any]) -> None:
    """Refuse what would become integers only by being rounded."""
    if epochs.dtype.kind not in "iu":
        raise _no_time(shard, time, epochs)


def _no_time(shard: Shard, time: Timestamp, chosen: Any) -> TimeError:
    expected = "an integer" if depth_of(time) == 0 else f"a tuple like {time!r}"
    got = f"dtype {chosen.dtype}" if isinstance(chosen, np.ndarray) else repr(chosen)
    return TimeError(
        f"operator {shard.operator!r} cannot send a record at what is no time; got "
        f"{got} for a record at {time!r}; expected {expected}; correct what chooses "
        "the time",
        operator=shard.operator,
        time=time,
    )
