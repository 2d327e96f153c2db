"""Moving records between shards, and joining and parting streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from operator import index
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from timelyml.errors import GraphError, RoutingError
from timelyml.exchange import records_of, take
from timelyml.graph import Broadcast, Exchange, Gather, Pact, StreamRef
from timelyml.operators.checks import check_callable, check_count
from timelyml.operators.edges import Routed, StreamLike, check_stream, pass_on, settle
from timelyml.operators.operator_builder import add_operator
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
    return out


def branch(
    up: StreamLike, predicate: Callable[[Any], bool], *, name: str | None = None
) -> Branches[StreamRef]:
    """Part a stream in two: records for which `predicate` is true, and the others.

    Args:
        up: Stream to part; columns stay columns.
        predicate: From one record (a row, if the payload is columns) to a boolean.
        name: Shown in traces and errors.

    Raises:
        GraphError: `predicate` cannot be called.
    """
    check_callable(name or "branch", "predicate", predicate)
    return Branches(
        *_parted("branch", up, lambda record: 0 if predicate(record) else 1, 2, name)
    )


def partition(
    up: StreamLike,
    num_parts: int,
    choose: Callable[[Any], int],
    *,
    name: str | None = None,
) -> tuple[StreamRef, ...]:
    """Part a stream in `num_parts`: each record goes to part `choose(record)`.

    Args:
        up: Stream to part; columns stay columns.
        num_parts: At least 1.
        choose: From one record (a row, if the payload is columns) to the index of its
            part; any other value fails the run.
        name: Shown in traces and errors.
    """
    check_callable(name or "partition", "choose", choose)
    check_count(name or "partition", "num_parts", num_parts)
    return _parted("partition", up, choose, num_parts, name)


def _routed(
    operator: str, up: StreamLike, pact: Pact, num_shards: int | None
) -> Routed:
    """Route `up`; one that is routed already takes both ways."""
    check_stream(operator, up)
    return Routed(settle(up), pact, num_shards)


def _parted(
    kind: str,
    up: StreamLike,
    choose: Callable[[Any], int],
    num_parts: int,
    name: str | None,
) -> tuple[StreamRef, ...]:
    """Add an operator that sends each record to the output that `choose` names."""

    def on_batch(shard: Shard, delivery: Delivery) -> Iterator[None]:
        rows: dict[int, list[int]] = {}
        numbers = count()

        def visit(record: Any) -> None:
            part = index(choose(record))
            if not 0 <= part < num_parts:
                raise RoutingError(
                    f"operator {shard.operator!r} has no such part; got {part}; "
                    f"expected 0 to {num_parts - 1}; correct what chooses the part",
                    operator=shard.operator,
                    part=part,
                )
            rows.setdefault(part, []).append(next(numbers))

        yield from in_steps(records_of(delivery.payload), visit)
        for part in sorted(rows):
            payload = take(delivery.payload, np.asarray(rows[part]))
            shard.output(part).send(delivery.time, payload)

    logic = Logic(on_batch=on_batch)
    return add_operator(kind, [up], logic, name=name, num_outputs=num_parts)
