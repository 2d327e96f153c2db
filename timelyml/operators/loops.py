"""Nested scopes and loops.

Entering, leaving and feeding back are no operators: they change times on the edge to
the next reader. Inside a scope a time is a tuple whose last coordinate counts the
rounds; a record that leaves gets back the time at which it entered, so results of
all rounds share it.

Source:
    Naiad, section 2.1 (ingress, egress, feedback); timely dataflow (iterate).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from timelyml.errors import GraphError, LoopLimitError
from timelyml.exchange import num_records, records_of
from timelyml.graph import PER_WORKER, LoopRef, ScopeRef, StreamRef
from timelyml.operators.checks import check_callable, check_optional_count
from timelyml.operators.edges import Routed, StreamLike, check_stream, settle
from timelyml.operators.operator_builder import add_operator
from timelyml.operators.routing import concat
from timelyml.runtime.operator import Delivery, Logic
from timelyml.runtime.shard import Shard

Body = Callable[[StreamRef], Any]


def enter(up: StreamLike, scope: ScopeRef) -> StreamLike:
    """Return the stream inside `scope`, in its round 0."""
    check_stream("enter", up)
    if isinstance(up, Routed):
        return replace(up, stream=up.builder.enter(up.stream, scope))
    return up.builder.enter(up, scope)


def leave(up: StreamLike) -> StreamLike:
    """Return the stream one scope further out; the records of all rounds of a time."""
    check_stream("leave", up)
    if isinstance(up, Routed):
        return replace(up, stream=up.builder.leave(up.stream))
    return up.builder.leave(up)


def connect(loop: LoopRef, end: StreamLike) -> None:
    """Feed `end` back into the stream of `loop`, once."""
    check_stream("feedback", end)
    loop.connect(settle(end))


def iterate(
    up: StreamLike,
    body: Body,
    *,
    max_iterations: int | None = None,
    limit: int | None = None,
    name: str | None = None,
) -> StreamLike:
    """Run `body` over and over: on `up` first, then on what it sends back.

    `body` is called once, with the stream inside the loop, and builds the loop's
    graph. It returns either

    - `(again, out)`: `again` goes into the next round and `out` leaves the loop, in
      whichever round; the loop ends when nothing goes round any more, or at
      `max_iterations`, where `again` is dropped; or
    - one stream, with `max_iterations`: it goes into the next round that many times
      in all, then leaves. What leaves is the result of the last round alone.

    Args:
        up: Stream to iterate on.
        body: See above.
        max_iterations: Most rounds that a record can take part in.
        limit: Most rounds that a record may need: one that would go round once more
            fails the run, with a `LoopLimitError` that names the loop.
        name: Of the scope and the loop, for traces and errors.

    Raises:
        GraphError: `body` returns something else, or one stream without
            `max_iterations`; or a stream of another scope.
    """
    who = name or "iterate"
    check_stream(who, up)
    check_callable(who, "body", body)
    check_optional_count(who, "max_iterations", max_iterations)
    check_optional_count(who, "limit", limit)
    builder, entering = up.builder, settle(up)
    scope = builder.scope(name, parent=_scope_around(entering))
    shards = PER_WORKER if entering.num_shards is None else entering.num_shards
    loop = builder.feedback(scope, name=name, num_shards=shards)
    head = concat(builder.enter(entering, scope), loop.stream)
    match body(head):
        case (StreamRef() | Routed()) as again, (StreamRef() | Routed()) as out:
            if max_iterations is not None:
                again, _ = _limited(again, max_iterations)
        case StreamRef() | Routed() as again if max_iterations is not None:
            again, out = _limited(again, max_iterations)
        case other:
            end = other.stream if isinstance(other, Routed) else other
            got = f"only {end.label}" if isinstance(end, StreamRef) else repr(other)
            raise GraphError(
                f"loop {scope.name!r} has a body that ends nowhere; got {got}; "
                f"expected (again, out), or one stream with max_iterations; return "
                f"what goes round and what leaves",
                loop=scope.name,
            )
    if limit is not None:
        again = _at_most(again, limit, scope.name)
    connect(loop, again)
    return leave(out)


def _limited(again: StreamLike, max_iterations: int) -> tuple[StreamRef, StreamRef]:
    """Part what may go round once more from what has had all its rounds."""

    def on_batch(shard: Shard, delivery: Delivery) -> None:
        assert isinstance(delivery.time, tuple)  # noqa: S101  inside a scope
        rounds = delivery.time[-1]
        has_more = rounds + 1 < max_iterations
        shard.output(0 if has_more else 1).send(delivery.time, delivery.payload)

    logic = Logic(on_batch=on_batch)
    more, over = add_operator("limit", [again], logic, num_outputs=2)
    return more, over


def _at_most(again: StreamLike, limit: int, loop: str) -> StreamRef:
    """Fail the run for what would go round once more than the limit."""

    def on_batch(shard: Shard, delivery: Delivery) -> None:
        assert isinstance(delivery.time, tuple)  # noqa: S101  inside a scope
        if delivery.time[-1] + 1 >= limit and num_records(delivery.payload):
            record = next(iter(records_of(delivery.payload)))
            raise LoopLimitError(
                f"loop {loop!r} does not end; got {record!r:.200} for one round more, at "
                f"time {delivery.time}; expected at most {limit} rounds; correct its "
                f"body, or raise limit",
                loop=loop,
                limit=limit,
            )
        shard.output().send(delivery.time, delivery.payload)

    (more,) = add_operator("limit", [again], Logic(on_batch=on_batch))
    return more


def _scope_around(stream: StreamRef) -> ScopeRef | None:
    path = stream.scope
    if not path:
        return None
    return ScopeRef(stream.builder, path[-1], path, stream.builder.place(path))
