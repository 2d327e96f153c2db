"""Operators on single records or whole blocks, without memory.

`map`, `flat_map`, `filter` and `inspect` call a function per record, whichever
container the records come in: items of a list, or rows of columns. `map_batch` gets
the whole payload, and is what fast code uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from timelyml.exchange import records_of, take
from timelyml.graph import StreamRef
from timelyml.operators.checks import check_callable
from timelyml.operators.edges import StreamLike
from timelyml.operators.operator_builder import add_operator
from timelyml.operators.steps import in_steps, send_in_steps
from timelyml.progress import Timestamp
from timelyml.runtime.operator import Delivery, Logic, Steps
from timelyml.runtime.shard import Shard


def map(  # noqa: A001  the name that every dataflow library uses
    up: StreamLike, fn: Callable[[Any], Any], *, name: str | None = None
) -> StreamRef:
    """Send `fn(record)` for each record, as a list of results.

    Args:
        up: Stream to read.
        fn: From one record (a row, if the payload is columns) to one.
        name: Shown in traces and errors.

    Raises:
        GraphError: `fn` cannot be called.
    """
    check_callable(name or "map", "fn", fn)

    def work(records: list[Any]) -> list[Any]:
        return [fn(record) for record in records]

    return _per_record("map", up, work, name)


def flat_map(
    up: StreamLike, fn: Callable[[Any], Iterable[Any]], *, name: str | None = None
) -> StreamRef:
    """Send all that `fn(record)` yields, for each record.

    Args:
        up: Stream to read.
        fn: From one record to any number of them; a generator is read step by step,
            and what it has yielded is sent while it goes on.
        name: Shown in traces and errors.

    Raises:
        GraphError: `fn` cannot be called.
    """
    check_callable(name or "flat_map", "fn", fn)

    def work(records: list[Any]) -> Iterator[Any]:
        return chain.from_iterable(fn(record) for record in records)

    return _per_record("flat_map", up, work, name)


def map_batch(
    up: StreamLike, fn: Callable[[Any], Any], *, name: str | None = None
) -> StreamRef:
    """Send `fn(payload)` for each block, whole.

    Args:
        up: Stream to read.
        fn: From a payload (a list, or a pytree of arrays that share their leading
            axis, read-only) to another, of any length; `[]` sends nothing.
        name: Shown in traces and errors.

    Raises:
        GraphError: `fn` cannot be called.
    """
    check_callable(name or "map_batch", "fn", fn)

    def on_batch(shard: Shard, delivery: Delivery) -> None:
        shard.output().send(delivery.time, fn(delivery.payload))

    (out,) = add_operator("map_batch", [up], Logic(on_batch=on_batch), name=name)
    return out


def filter(  # noqa: A001  the name that every dataflow library uses
    up: StreamLike, predicate: Callable[[Any], bool], *, name: str | None = None
) -> StreamRef:
    """Send on the records for which `predicate(record)` is true; columns stay columns.

    Args:
        up: Stream to read.
        predicate: From one record (a row, if the payload is columns) to a boolean.
        name: Shown in traces and errors.

    Raises:
        GraphError: `predicate` cannot be called.
    """
    check_callable(name or "filter", "predicate", predicate)

    def work(records: list[Any]) -> list[Any]:
        return [record for record in records if predicate(record)]

    def on_batch(shard: Shard, delivery: Delivery) -> Steps:
        time, payload = delivery.time, delivery.payload
        if isinstance(payload, list):
            return send_in_steps(shard, time, payload, work)
        return _filter_columns(shard, time, payload, predicate)

    (out,) = add_operator("filter", [up], Logic(on_batch=on_batch), name=name)
    return out


def inspect(
    up: StreamLike,
    fn: Callable[[Any], object] | None = None,
    *,
    name: str | None = None,
) -> StreamRef:
    """Call `fn(record)` for each record, and send it on unchanged.

    Args:
        up: Stream to read.
        fn: Runs where the record is, in the worker; default: print the operator, the
            time and the record.
        name: Shown in traces and errors.

    Raises:
        GraphError: `fn` cannot be called.
    """
    if fn is not None:
        check_callable(name or "inspect", "fn", fn)

    def on_batch(shard: Shard, delivery: Delivery) -> Iterator[None]:
        def show(record: Any) -> None:
            print(f"{shard.operator} {delivery.time}: {record!r}", flush=True)  # noqa: T201  what it is for

        yield from in_steps(records_of(delivery.payload), fn or show)
        shard.output().send(delivery.time, delivery.payload)

    (out,) = add_operator("inspect", [up], Logic(on_batch=on_batch), name=name)
    return out


def inspect_batch(
    up: StreamLike, fn: Callable[[Timestamp, Any], object], *, name: str | None = None
) -> StreamRef:
    """Call `fn(time, payload)` for each block, and send it on unchanged.

    Args:
        up: Stream to read.
        fn: Runs where the block is, in the worker; the payload is read-only.
        name: Shown in traces and errors.

    Raises:
        GraphError: `fn` cannot be called.
    """
    check_callable(name or "inspect_batch", "fn", fn)

    def on_batch(shard: Shard, delivery: Delivery) -> None:
        fn(delivery.time, delivery.payload)
        shard.output().send(delivery.time, delivery.payload)

    (out,) = add_operator("inspect_batch", [up], Logic(on_batch=on_batch), name=name)
    return out


def _per_record(
    kind: str,
    up: StreamLike,
    work: Callable[[list[Any]], Iterable[Any]],
    name: str | None,
) -> StreamRef:
    """Add an operator that applies `work` to a few records at a time."""

    def on_batch(shard: Shard, delivery: Delivery) -> Iterator[None]:
        records = records_of(delivery.payload)
        return send_in_steps(shard, delivery.time, records, work)

    (out,) = add_operator(kind, [up], Logic(on_batch=on_batch), name=name)
    return out


def _filter_columns(
    shard: Shard, time: Timestamp, payload: Any, predicate: Callable[[Any], bool]
) -> Iterator[None]:
    """Send the rows that pass, all at once: they are views until then."""
    is_kept: list[bool] = []
    yield from in_steps(
        records_of(payload), lambda row: is_kept.append(bool(predicate(row)))
    )
    if all(is_kept):
        shard.output().send(time, payload)
    elif any(is_kept):
        shard.output().send(time, take(payload, np.flatnonzero(is_kept)))
