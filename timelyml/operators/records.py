"""Operators on single records or whole blocks, without memory.

`map`, `flat_map` and `filter` call a function per record, whichever container the
records come in: items of a list, or rows of columns. `map_batch`, and `filter` with
`by_batch`, get the whole payload, and are what fast code uses.
"""

# ruff: noqa: A001  the names that every dataflow library uses

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Literal, TypeAlias, overload

import numpy as np

from timelyml.errors import PayloadError
from timelyml.exchange import as_payload, num_records, records_of, take
from timelyml.graph import StreamRef
from timelyml.operators.checks import check_callable
from timelyml.operators.edges import StreamLike, pass_notes
from timelyml.operators.failed import (
    Diverted,
    FailedRecord,
    Note,
    OnError,
    check_on_error,
    noter,
)
from timelyml.operators.operator_builder import add_operator
from timelyml.operators.schema import (
    SCHEMA,
    Guards,
    SchemaLike,
    as_schema,
    declare,
)
from timelyml.operators.steps import Work, in_steps, send_results
from timelyml.runtime.operator import Delivery, Logic, Steps
from timelyml.runtime.shard import Shard

Sure: TypeAlias = Literal["fail", "skip"]
Results: TypeAlias = StreamRef | Diverted[StreamRef]
Try: TypeAlias = Callable[[list[Any], Note], Iterable[Any]]
"""From a few records, and what takes the failed ones, to their results."""


@overload
def map(
    up: StreamLike,
    fn: Callable[[Any], Any],
    *,
    on_error: Sure = ...,
    name: str | None = ...,
) -> StreamRef: ...
@overload
def map(
    up: StreamLike,
    fn: Callable[[Any], Any],
    *,
    on_error: Literal["divert"],
    name: str | None = ...,
) -> Diverted[StreamRef]: ...
def map(
    up: StreamLike,
    fn: Callable[[Any], Any],
    *,
    on_error: OnError = "fail",
    name: str | None = None,
) -> Results:
    """Send `fn(record)` for each record, as a list of results.

    Args:
        up: Stream to read.
        fn: From one record (a row, if the payload is columns) to one.
        on_error: What happens where `fn` raises; with "divert" there are two streams,
            the results and the `FailedRecord`s.
        name: Shown in traces and errors.

    Raises:
        GraphError: `fn` cannot be called.
    """
    check_callable(name or "map", "fn", fn)

    def work(records: list[Any]) -> list[Any]:
        return [fn(record) for record in records]

    def attempt(records: list[Any], note: Note) -> Iterator[Any]:
        for record in records:
            try:
                result = fn(record)
            except Exception as error:  # noqa: BLE001  the user's function may raise any
                note(record, error)
            else:
                yield result

    return _per_record("map", up, (work, attempt), on_error, name)


@overload
def flat_map(
    up: StreamLike,
    fn: Callable[[Any], Iterable[Any]],
    *,
    on_error: Sure = ...,
    name: str | None = ...,
) -> StreamRef: ...
@overload
def flat_map(
    up: StreamLike,
    fn: Callable[[Any], Iterable[Any]],
    *,
    on_error: Literal["divert"],
    name: str | None = ...,
) -> Diverted[StreamRef]: ...
def flat_map(
    up: StreamLike,
    fn: Callable[[Any], Iterable[Any]],
    *,
    on_error: OnError = "fail",
    name: str | None = None,
) -> Results:
    """Send all that `fn(record)` yields, for each record.

    Args:
        up: Stream to read.
        fn: From one record to any number of them; a generator is read step by step,
            and what it has yielded is sent while it goes on.
        on_error: What happens where `fn`, or what it returned, raises; what was
            yielded before is sent in any case. See `map`.
        name: Shown in traces and errors.

    Raises:
        GraphError: `fn` cannot be called.
    """
    check_callable(name or "flat_map", "fn", fn, may_yield=True)

    def work(records: list[Any]) -> Iterator[Any]:
        return chain.from_iterable(fn(record) for record in records)

    def attempt(records: list[Any], note: Note) -> Iterator[Any]:
        for record in records:
            try:
                yield from fn(record)
            except Exception as error:  # noqa: BLE001  the user's function may raise any
                note(record, error)

    return _per_record("flat_map", up, (work, attempt), on_error, name)


@overload
def map_batch(
    up: StreamLike,
    fn: Callable[[Any], Any],
    *,
    schema: SchemaLike | None = ...,
    on_error: Sure = ...,
    name: str | None = ...,
) -> StreamRef: ...
@overload
def map_batch(
    up: StreamLike,
    fn: Callable[[Any], Any],
    *,
    schema: SchemaLike | None = ...,
    on_error: Literal["divert"],
    name: str | None = ...,
) -> Diverted[StreamRef]: ...
def map_batch(
    up: StreamLike,
    fn: Callable[[Any], Any],
    *,
    schema: SchemaLike | None = None,
    on_error: OnError = "fail",
    name: str | None = None,
) -> Results:
    """Send `fn(payload)` for each block, whole.

    Args:
        up: Stream to read.
        fn: From a payload (a list, or a pytree of arrays that share their leading
            axis, read-only) to another, of any length; `[]` sends nothing.
        schema: Columns of what `fn` returns; default: the first block of each shard
            fixes them.
        on_error: What happens where `fn` raises; the whole payload is what failed.
            See `map`.
        name: Shown in traces and errors.

    Raises:
        GraphError: `fn` cannot be called.
    """
    check_callable(name or "map_batch", "fn", fn)
    declared = as_schema(schema)
    guards = Guards("operator", declared)

    def send(shard: Shard, delivery: Delivery, result: Any) -> None:
        payload = as_payload(result)
        guards.of(shard).check(payload)
        shard.output().send(delivery.time, payload)

    def on_batch(shard: Shard, delivery: Delivery) -> None:
        failed: list[FailedRecord] = []
        note = noter(shard, on_error, failed)
        if note is None:
            send(shard, delivery, fn(delivery.payload))
            return
        try:
            result = fn(delivery.payload)
        except Exception as error:  # noqa: BLE001  the user's function may raise any
            note(delivery.payload, error)
        else:
            send(shard, delivery, result)
        if failed:
            shard.output(1).send(delivery.time, failed)

    logic = Logic(on_batch=on_batch)
    made = _add("map_batch", up, logic, on_error, name, states=(SCHEMA,))
    declare(made.results if isinstance(made, Diverted) else made, declared)
    return made


@overload
def filter(
    up: StreamLike,
    predicate: Callable[[Any], Any],
    *,
    by_batch: bool = ...,
    on_error: Sure = ...,
    name: str | None = ...,
) -> StreamRef: ...
@overload
def filter(
    up: StreamLike,
    predicate: Callable[[Any], Any],
    *,
    by_batch: bool = ...,
    on_error: Literal["divert"],
    name: str | None = ...,
) -> Diverted[StreamRef]: ...
def filter(
    up: StreamLike,
    predicate: Callable[[Any], Any],
    *,
    by_batch: bool = False,
    on_error: OnError = "fail",
    name: str | None = None,
) -> Results:
    """Send on the records for which `predicate(record)` is true; columns stay columns.

    Args:
        up: Stream to read.
        predicate: From one record (a row, if the payload is columns) to a boolean.
        by_batch: `predicate` is called once per block instead: from a payload to a
            boolean array, one for each row.
        on_error: What happens where `predicate` raises; see `map`.
        name: Shown in traces and errors.

    Raises:
        GraphError: `predicate` cannot be called.
    """
    check_callable(name or "filter", "predicate", predicate)

    def on_batch(shard: Shard, delivery: Delivery) -> Steps:
        failed: list[FailedRecord] = []
        note = noter(shard, on_error, failed)
        passes = predicate if note is None else _catching(predicate, note)
        if by_batch:
            _filter_block(shard, delivery, passes, failed)
            return None
        if not isinstance(delivery.payload, list):
            return _filter_columns(shard, delivery, passes, failed)

        def work(records: list[Any]) -> list[Any]:
            return [record for record in records if passes(record)]

        return send_results(shard, delivery.time, delivery.payload, work, failed)

    made = _add("filter", up, Logic(on_batch=on_batch), on_error, name)
    kept = made.results if isinstance(made, Diverted) else made
    pass_notes(up, kept)
    return made


def mask_of(
    operator: str, found: Any, rows: int
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return what a function of a payload found, as one boolean for each row.

    Raises:
        PayloadError: It is something else.
    """
    mask = np.asarray(found)
    if mask.shape != (rows,) or mask.dtype != np.bool_:
        raise PayloadError(
            f"operator {operator!r} needs one boolean for each row; got shape "
            f"{list(mask.shape)} of {mask.dtype}; expected {rows} booleans; compare "
            f"columns, as in payload['x'] > 0",
            operator=operator,
            rows=rows,
        )
    return mask


def _per_record(
    kind: str,
    up: StreamLike,
    ways: tuple[Work, Try],
    on_error: OnError,
    name: str | None,
) -> Results:
    """Add an operator that works on a few records at a time, minding failures or not."""
    work, attempt = ways

    def on_batch(shard: Shard, delivery: Delivery) -> Steps:
        records = records_of(delivery.payload)
        failed: list[FailedRecord] = []
        note = noter(shard, on_error, failed)
        if note is None:
            return send_results(shard, delivery.time, records, work)

        def work_on(chunk: list[Any]) -> Iterable[Any]:
            return attempt(chunk, note)

        return send_results(shard, delivery.time, records, work_on, failed)

    return _add(kind, up, Logic(on_batch=on_batch), on_error, name)


def _add(
    kind: str,
    up: StreamLike,
    logic: Logic,
    on_error: OnError,
    name: str | None,
    *,
    states: tuple[str, ...] = (),
) -> Results:
    """Add an operator, with an output for failed records if they are diverted."""
    check_on_error(name or kind, on_error)
    num_outputs = 2 if on_error == "divert" else 1
    outs = add_operator(
        kind, [up], logic, name=name, num_outputs=num_outputs, states=states
    )
    return Diverted(*outs) if num_outputs == 2 else outs[0]


def _catching(predicate: Callable[[Any], Any], note: Note) -> Callable[[Any], Any]:
    """Return the predicate, false where it raises."""

    def passes(record: Any) -> Any:
        try:
            return predicate(record)
        except Exception as error:  # noqa: BLE001  the user's function may raise any
            note(record, error)
            return None

    return passes


def _filter_block(
    shard: Shard,
    delivery: Delivery,
    passes: Callable[[Any], Any],
    failed: list[FailedRecord],
) -> None:
    """Send the rows of a block for which one call gave true."""
    found = passes(delivery.payload)
    if failed:
        shard.output(1).send(delivery.time, failed)
    if found is not None:
        mask = mask_of(shard.operator, found, num_records(delivery.payload))
        _send_rows(shard, delivery, mask)


def _filter_columns(
    shard: Shard,
    delivery: Delivery,
    passes: Callable[[Any], Any],
    failed: list[FailedRecord],
) -> Iterator[None]:
    """Send the rows that pass, all at once: they are views until then."""
    is_kept: list[bool] = []
    yield from in_steps(
        shard,
        records_of(delivery.payload),
        lambda row: is_kept.append(bool(passes(row))),
    )
    if failed:
        shard.output(1).send(delivery.time, failed)
    _send_rows(shard, delivery, np.asarray(is_kept, np.bool_))


def _send_rows(
    shard: Shard, delivery: Delivery, mask: np.ndarray[Any, np.dtype[np.bool_]]
) -> None:
    if mask.all():
        shard.output().send(delivery.time, delivery.payload)
    elif mask.any():
        shard.output().send(delivery.time, take(delivery.payload, np.flatnonzero(mask)))
