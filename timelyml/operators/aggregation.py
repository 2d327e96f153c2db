"""Reducing the records of each time to few, once the time is complete.

A time without records gives nothing. Results do not depend on timing: records are
taken by producer shard, and within one as they came.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from copy import deepcopy
from typing import Any

from timelyml.exchange import num_records, records_of
from timelyml.graph import Exchange, StreamRef
from timelyml.operators.checks import check_callable, check_optional_callable
from timelyml.operators.edges import StreamLike, check_stream, is_in_order
from timelyml.operators.operator_builder import add_operator
from timelyml.operators.ordered import keep, take_kept
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
            yield from absorb(shard.state, delivery.time, delivery.payload)
        else:
            keep(shard.state_of("kept"), delivery)

    def on_notify(shard: Shard, time: Timestamp) -> Iterator[None]:
        if not folds_at_once:
            for payload in take_kept(shard.state_of("kept"), time):
                yield from absorb(shard.state, time, payload)
        folded = [shard.state.pop(time)] if time in shard.state else []
        shard.output().send(time, folded)

    def absorb(cell: dict[Any, Any], time: Timestamp, payload: Any) -> Iterator[None]:
        if not num_records(payload):
            return
        value = cell[time] if time in cell else deepcopy(initial)

        def visit(record: Any) -> None:
            nonlocal value
            value = combine(value, record)

        yield from in_steps(records_of(payload), visit)
        cell[time] = value

    logic = Logic(on_batch=on_batch, on_notify=on_notify)
    return _stateful("fold", up, logic, name, states=("state", "kept"))


def reduce(
    up: StreamLike,
    key: Callable[[Any], Hashable],
    combine: Callable[[Any, Any], Any],
    *,
    value: Callable[[Any], Any] | None = None,
    num_shards: int | None = None,
    name: str | None = None,
) -> StreamRef:
    """Reduce the records of each key and time to one `(key, value)`, once complete.

    It exchanges by key itself. A shard sends its keys in the order in which it first
    met them, by producer shard.

    Args:
        up: Stream to reduce.
        key: From one record to its key.
        combine: From two values to one; associative, for each producer's records are
            combined on their own first.
        value: From one record to its value; default: the record.
        num_shards: Shards that share the keys; default: as many as `up` has.
        name: Shown in traces and errors; the key of its state.

    Raises:
        GraphError: A function cannot be called.
    """
    who = name or "reduce"
    check_callable(who, "key", key)
    check_callable(who, "combine", combine)
    check_optional_callable(who, "value", value)

    def on_batch(shard: Shard, delivery: Delivery) -> Iterator[None]:
        shard.notify_at(delivery.time)
        producers = shard.state.setdefault(delivery.time, {})
        mine = producers.setdefault(delivery.source_shard, {})

        def visit(record: Any) -> None:
            its_key = key(record)
            merge(mine, its_key, record if value is None else value(record))

        yield from in_steps(records_of(delivery.payload), visit)

    def on_notify(shard: Shard, time: Timestamp) -> Iterator[None]:
        producers = shard.state.pop(time)
        total: dict[Hashable, Any] = {}
        for producer in sorted(producers):
            yield from in_steps(
                producers[producer].items(), lambda item: merge(total, *item)
            )
        shard.output().send(time, list(total.items()))

    def merge(into: dict[Hashable, Any], its_key: Hashable, its_value: Any) -> None:
        if its_key in into:
            its_value = combine(into[its_key], its_value)
        into[its_key] = its_value

    (out,) = add_operator(
        "reduce",
        [up],
        Logic(on_batch=on_batch, on_notify=on_notify),
        name=name,
        pacts=[Exchange.by_key(key)],
        states=("state",),
        num_shards=num_shards,
        regular=True,
    )
    return out


def count(up: StreamLike, *, name: str | None = None) -> StreamRef:
    """Send the number of records of each time, once it is complete, on each shard.

    Args:
        up: Stream to count. Each shard counts what it holds.
        name: Shown in traces and errors; the key of its state.
    """

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
