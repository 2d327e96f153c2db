"""Moving records between shards, and joining and parting streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import index
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from timelyml.errors import GraphError, RoutingError
from timelyml.exchange import (
    num_records,
    records_of,
    slice_rows,
    split_by_destination,
)
from timelyml.graph import Broadcast, Direct, Exchange, Gather, Pact, StreamRef
from timelyml.operators.checks import check_callable, check_count
from timelyml.operators.edges import (
    Routed,
    StreamLike,
    check_stream,
    pass_notes,
    pass_on,
    settle,
)
from timelyml.operators.operator_builder import add_operator
from timelyml.operators.records import mask_of
from timelyml.operators.schema import schema_of
from timelyml.operators.steps import in_steps
from timelyml.runtime.operator import Delivery, Logic
from timelyml.runtime.shard import Shard

T = TypeVar("T")


class Branches(NamedTuple, Generic[T]):
    """The two parts of a stream."""

    matching: T
    rest: T


def exchange(
    up: StreamLike,
    key: Callable[[Any], Any],
    *,
    by_batch: bool = False,
    num_shards: int | None = None,
    dense: bool = False,
) -> Routed:
    """Send each record to the shard that its key names.

    It happens on the edge to whatever reads the result, once for each reader.

    Args:
        up: Stream to route.
        key: From one record to its key: integers go to shard `key % num_shards`,
            others by a hash that is the same in every process. Equal keys meet.
        by_batch: `key` is called once per block instead: from a payload to an
            integer array with one destination shard per row.
        num_shards: Shards of the reader; default: as many as `up` has.
        dense: The reader counts blocks instead of waiting for a frontier; only after
            an operator that sends at every time.

    Raises:
        GraphError: `key` cannot be called.
    """
    check_callable("exchange", "key", key)
    if not by_batch:
        return _routed("exchange", up, Exchange.by_key(key, dense=dense), num_shards)

    def route(payload: Any, _: int) -> Any:
        return key(payload)

    return _routed("exchange", up, Exchange(route, dense=dense), num_shards)


def broadcast(
    up: StreamLike, *, num_shards: int | None = None, dense: bool = False
) -> Routed:
    """Send every record to every shard of whatever reads the result.

    Args:
        up: Stream to route.
        num_shards: Shards of the reader; default: as many as `up` has.
        dense: See `exchange`.
    """
    return _routed("broadcast", up, Broadcast(dense=dense), num_shards)


def gather(
    up: StreamLike,
    *,
    shard: int = 0,
    num_shards: int | None = None,
    dense: bool = False,
) -> Routed:
    """Send every record to one shard of whatever reads the result.

    Args:
        up: Stream to route.
        shard: The one.
        num_shards: Shards of the reader; default: as many as `up` has.
        dense: See `exchange`.
    """
    return _routed("gather", up, Gather(shard, dense=dense), num_shards)


def direct(
    up: StreamLike, *, num_shards: int | None = None, dense: bool = False
) -> Routed:
    """Let the operator that makes a stream name the shard of each block or row.

    It sends with `send_to` or `send_rows`; `Output.num_target_shards` is what it can
    choose from.

    Args:
        up: Stream of such an operator.
        num_shards: Shards of the reader; default: as many as `up` has.
        dense: See `exchange`.
    """
    return _routed("direct", up, Direct(dense=dense), num_shards)


def concat(*ups: StreamLike, name: str | None = None) -> StreamRef:
    """Join streams of one scope into one; blocks pass as they come.

    Args:
        ups: At least one; all with the same number of shards.
        name: Shown in traces and errors.

    Raises:
        GraphError: No stream was given.
    """
    if not ups:
        raise GraphError(
            "operator 'concat' has nothing to join; got no streams; expected at least "
            "one; pass the streams one by one"
        )
    (out,) = add_operator("concat", ups, Logic(on_batch=pass_on), name=name)
    schemas = {schema_of(up) for up in ups}
    return pass_notes(ups[0], out) if len(schemas) == 1 else out


def rebalance(up: StreamLike, *, num_shards: int | None = None) -> Routed:
    """Spread the records of each shard evenly over the shards of whatever reads it.

    Each block is cut into as many runs of rows as there are shards, without a copy;
    small blocks go to the shards in turn.

    Args:
        up: Stream to spread.
        num_shards: Shards of the reader; default: as many as `up` has.
    """

    def on_batch(shard: Shard, delivery: Delivery) -> None:
        targets = shard.output().num_target_shards
        if targets == 1:
            shard.output().send_to(delivery.time, 0, delivery.payload)
            return
        rows = num_records(delivery.payload)
        turn = shard.state.get("turn", shard.index)
        shard.state["turn"] = (turn + rows) % targets
        parts = min(rows, targets)
        if parts == 1:  # as it came, by reference
            shard.output().send_to(delivery.time, turn, delivery.payload)
            return
        for part in range(parts):
            start, stop = part * rows // parts, (part + 1) * rows // parts
            payload = slice_rows(delivery.payload, start, stop)
            shard.output().send_to(delivery.time, (turn + part) % targets, payload)

    logic = Logic(on_batch=on_batch)
    (spread,) = add_operator("rebalance", [up], logic, states=("state",))
    return Routed(pass_notes(up, spread), Direct(), num_shards)


def branch(
    up: StreamLike,
    predicate: Callable[[Any], Any],
    *,
    by_batch: bool = False,
    name: str | None = None,
) -> Branches[StreamRef]:
    """Part a stream in two: records for which `predicate` is true, and the others.

    Args:
        up: Stream to part; columns stay columns.
        predicate: From one record (a row, if the payload is columns) to a boolean.
        by_batch: `predicate` is called once per block instead: from a payload to a
            boolean array, one for each row.
        name: Shown in traces and errors.

    Raises:
        GraphError: `predicate` cannot be called.
    """
    check_callable(name or "branch", "predicate", predicate)
    if by_batch:
        who = name or "branch"

        def choose(payload: Any) -> Any:
            return ~mask_of(who, predicate(payload), num_records(payload)) * 1

        return Branches(*_parted("branch", up, choose, 2, name, by_batch=True))
    return Branches(
        *_parted("branch", up, lambda record: 0 if predicate(record) else 1, 2, name)
    )


def partition(
    up: StreamLike,
    num_parts: int,
    choose: Callable[[Any], Any],
    *,
    by_batch: bool = False,
    name: str | None = None,
) -> tuple[StreamRef, ...]:
    """Part a stream in `num_parts`: each record goes to part `choose(record)`.

    Args:
        up: Stream to part; columns stay columns.
        num_parts: At least 1.
        choose: From one record (a row, if the payload is columns) to the index of its
            part; any other value fails the run.
        by_batch: `choose` is called once per block instead: from a payload to an
            integer array with one part per row.
        name: Shown in traces and errors.
    """
    check_callable(name or "partition", "choose", choose)
    check_count(name or "partition", "num_parts", num_parts)
    return _parted("partition", up, choose, num_parts, name, by_batch=by_batch)


def _routed(
    operator: str, up: StreamLike, pact: Pact, num_shards: int | None
) -> Routed:
    """Route `up`; one that is routed already takes both ways."""
    check_stream(operator, up)
    return Routed(settle(up), pact, num_shards)


def _parted(
    kind: str,
    up: StreamLike,
    choose: Callable[[Any], Any],
    num_parts: int,
    name: str | None,
    *,
    by_batch: bool = False,
) -> tuple[StreamRef, ...]:
    """Add an operator that sends each record to the output that `choose` names."""

    def on_batch(shard: Shard, delivery: Delivery) -> Iterator[None]:
        payload = delivery.payload
        if by_batch:
            chosen = choose(payload)
        else:
            chosen = []
            yield from in_steps(
                shard,
                records_of(payload),
                lambda record: chosen.append(index(choose(record))),
            )
        parts = _checked(shard.operator, chosen, num_records(payload), num_parts)
        for part, rows in split_by_destination(payload, parts, num_parts):
            shard.output(part).send(delivery.time, rows)

    logic = Logic(on_batch=on_batch)
    parts = add_operator(kind, [up], logic, name=name, num_outputs=num_parts)
    return tuple(pass_notes(up, part) for part in parts)


def _checked(operator: str, chosen: Any, rows: int, num_parts: int) -> Any:
    """Return one part for each row, or say which row has none."""
    parts = np.asarray(chosen, np.intp) if isinstance(chosen, list) else chosen
    parts = np.asarray(parts)
    if parts.shape != (rows,) or parts.dtype.kind not in "iu":
        raise RoutingError(
            f"operator {operator!r} needs one part for each row; got shape "
            f"{list(parts.shape)} of {parts.dtype}; expected {rows} integers; correct "
            f"what chooses the part",
            operator=operator,
        )
    wrong = np.flatnonzero((parts < 0) | (parts >= num_parts))
    if len(wrong):
        part = int(parts[wrong[0]])
        raise RoutingError(
            f"operator {operator!r} has no such part; got {part}; expected 0 to "
            f"{num_parts - 1}; correct what chooses the part",
            operator=operator,
            part=part,
        )
    return parts
