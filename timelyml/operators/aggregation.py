"""Reducing the records of each time to few, once the time is complete.

A time without records gives nothing. Results do not depend on timing: records are
taken by producer shard, and within one as they came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from timelyml.exchange import num_records, records_of
from timelyml.graph import StreamRef
from timelyml.operators.checks import check_callable, check_optional_callable
from timelyml.operators.edges import StreamLike, check_stream, is_in_order
from timelyml.operators.keys import Key
from timelyml.operators.operator_builder import add_operator
from timelyml.operators.ordered import keep, take_kept
from timelyml.operators.reduction import count_by
from timelyml.operators.steps import in_steps
from timelyml.progress import Timestamp
from timelyml.runtime.operator import Delivery, Logic
from timelyml.runtime.shard import Shard


def fold(
    up: StreamLike,
    initial: Any,
    combine: Callable[[Any, Any], Any],
    *,
    name: str | None = None,
) -> StreamRef:
    """Reduce the records of each time to one value, sent once it is complete.

    Args:
        up: Stream to reduce. Each shard folds what it holds: `exchange` first to fold
            by key, `gather` first to fold everything. After those, records wait until
            their time is complete, so that they are folded in the same order always.
        initial: Accumulator before the first record. Each shard and time starts with
            a deep copy of it, which `combine` may change and return.
        combine: From accumulator and record to the next accumulator.
        name: Shown in traces and errors; the key of its state.

    Raises:
        GraphError: `combine` cannot be called.

    Source:
        Naiad (OnRecv, OnNotify), restated with capabilities.
    """
    check_callable(name or "fold", "combine", combine)
    check_stream(name or "fold", up)
    folds_at_once = is_in_order(up)

    def on_batch(shard: Shard, delivery: Delivery) -> Iterator[None]:
        shard.notify_at(delivery.time)
        if folds_at_once:
            yield from absorb(shard, delivery.time, delivery.payload)
        else:
            keep(shard.state_of("kept"), delivery)

    def on_notify(shard: Shard, time: Timestamp) -> Iterator[None]:
        if not folds_at_once:
            for payload in take_kept(shard.state_of("kept"), time):
                yield from absorb(shard, time, payload)
        folded = [shard.state.pop(time)] if time in shard.state else []
        shard.output().send(time, folded)

    def absorb(shard: Shard, time: Timestamp, payload: Any) -> Iterator[None]:
        cell = shard.state
        if not num_records(payload):
            return
        value = cell[time] if time in cell else deepcopy(initial)

        def visit(record: Any) -> None:
            nonlocal value
            value = combine(value, record)

        yield from in_steps(shard, records_of(payload), visit)
        cell[time] = value

    logic = Logic(on_batch=on_batch, on_notify=on_notify)
    return _stateful("fold", up, logic, name, states=("state", "kept"))


def accumulate(
    up: StreamLike,
    initial: Any,
    combine: Callable[[Any, Any], Any],
    *,
    finish: Callable[[Any], Any] | None = None,
    name: str | None = None,
) -> StreamRef:
    """Reduce the payloads of each time to one value, sent once it is complete.

    As `fold`, with whole payloads in place of records.

    Args:
        up: Stream to reduce. Each shard accumulates what it holds.
        initial: Accumulator before the first payload; see `fold`.
        combine: From accumulator and payload to the next accumulator.
        finish: From the accumulator to the payload to send; default: a list with
            the accumulator as its only record.
        name: Shown in traces and errors; the key of its state.

    Raises:
        GraphError: A function cannot be called.

    Source:
        timely dataflow (accumulate).
    """
    check_callable(name or "accumulate", "combine", combine)
    check_optional_callable(name or "accumulate", "finish", finish)
    check_stream(name or "accumulate", up)
    takes_at_once = is_in_order(up)

    def on_batch(shard: Shard, delivery: Delivery) -> None:
        shard.notify_at(delivery.time)
        if takes_at_once:
            absorb(shard, delivery.time, delivery.payload)
        else:
            keep(shard.state_of("kept"), delivery)

    def on_notify(shard: Shard, time: Timestamp) -> Iterator[None]:
        if not takes_at_once:
            for payload in take_kept(shard.state_of("kept"), time):
                absorb(shard, time, payload)
                yield
        result: Any = []
        if time in shard.state:
            value = shard.state.pop(time)
            result = [value] if finish is None else finish(value)
        shard.output().send(time, result)

    def absorb(shard: Shard, time: Timestamp, payload: Any) -> None:
        cell = shard.state
        if num_records(payload):
            value = cell[time] if time in cell else deepcopy(initial)
            cell[time] = combine(value, payload)

    logic = Logic(on_batch=on_batch, on_notify=on_notify)
    return _stateful("accumulate", up, logic, name, states=("state", "kept"))


def count(
    up: StreamLike,
    key: Key | None = None,
    *,
    num_shards: int | None = None,
    name: str | None = None,
) -> StreamRef:
    """Send the number of records of each time, once it is complete.

    Args:
        up: Stream to count.
        key: From one record to its key, or the name of a field: sends `(key, number)`
            for each key, which is a datetime if it is of a column of moments. Default:
            each shard counts all that it holds.
        num_shards: Shards that share the keys; default: as many as `up` has.
        name: Shown in traces and errors; the key of its state.
    """
    if key is not None:
        return count_by(up, key, num_shards=num_shards, name=name)

    def on_batch(shard: Shard, delivery: Delivery) -> None:
        shard.notify_at(delivery.time)
        so_far = shard.state.get(delivery.time, 0)
        shard.state[delivery.time] = so_far + num_records(delivery.payload)

    def on_notify(shard: Shard, time: Timestamp) -> None:
        counted = shard.state.pop(time)
        shard.output().send(time, [counted] if counted else [])

    logic = Logic(on_batch=on_batch, on_notify=on_notify)
    return _stateful("count", up, logic, name)


def _stateful(
    kind: str,
    up: StreamLike,
    logic: Logic,
    name: str | None,
    *,
    states: tuple[str, ...] = ("state",),
) -> StreamRef:
    """Add an operator that sends exactly once for each time that it is told of."""
    (out,) = add_operator(kind, [up], logic, name=name, states=states, regular=True)
    return out
