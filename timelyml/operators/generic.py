"""Operators whose callbacks the user writes: one or two inputs, one output or none.

Callbacks get the shard that they run for, and keep what they remember in its state,
which is called "state" unless `states=` says otherwise. For other numbers of ports
there is `OperatorBuilder`.

Source:
    timely dataflow (unary, unary_frontier, unary_notify, binary..., sink), with
    callbacks in place of one closure over handles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from timelyml.graph import Pact, StreamRef
from timelyml.operators.checks import check_callable, check_optional_callable
from timelyml.operators.edges import StreamLike
from timelyml.operators.operator_builder import OperatorOptions, add_operator
from timelyml.progress import Timestamp
from timelyml.runtime.operator import Delivery, Logic, Steps
from timelyml.runtime.shard import Shard

OnBatch = Callable[[Shard, Delivery], Steps]
OnNotify = Callable[[Shard, Timestamp], Steps]
OnFrontier = Callable[[Shard], None]


def unary(
    up: StreamLike,
    on_batch: OnBatch,
    *,
    pact: Pact | None = None,
    name: str | None = None,
    **options: Unpack[OperatorOptions],
) -> StreamRef:
    """Call `on_batch(shard, delivery)` for each block, as it arrives.

    Args:
        up: Stream to read.
        on_batch: Sends with `shard.output().send(delivery.time, payload)`; may be a
            generator, whose yields let other operators run.
        pact: How records find their shard; default: as `up` is routed.
        name: Shown in traces and errors; the key of its state.
        options: See `OperatorOptions`.

    Raises:
        GraphError: `on_batch` cannot be called, or the graph does not fit.
    """
    return _one("unary", [up], Logic(on_batch=on_batch), name, pacts=[pact], **options)


def unary_frontier(
    up: StreamLike,
    on_batch: OnBatch,
    on_frontier: OnFrontier,
    *,
    pact: Pact | None = None,
    name: str | None = None,
    **options: Unpack[OperatorOptions],
) -> StreamRef:
    """Like `unary`, and call `on_frontier(shard)` whenever the input's frontier moved.

    What is sent from there needs a capability: `shard.retain(time)` in `on_batch`,
    kept in the state, and released once it is not needed.

    Args:
        up: Stream to read.
        on_batch: See `unary`.
        on_frontier: Reads `shard.frontier()`.
        pact: How records find their shard; default: as `up` is routed.
        name: Shown in traces and errors; the key of its state.
        options: See `OperatorOptions`.
    """
    logic = Logic(on_batch=on_batch, on_frontier=on_frontier)
    return _one("unary_frontier", [up], logic, name, pacts=[pact], **options)


def unary_notify(
    up: StreamLike,
    on_batch: OnBatch,
    on_notify: OnNotify,
    *,
    in_order: bool = False,
    pact: Pact | None = None,
    name: str | None = None,
    **options: Unpack[OperatorOptions],
) -> StreamRef:
    """Like `unary`, and call `on_notify(shard, time)` for times that are complete.

    Args:
        up: Stream to read.
        on_batch: Asks with `shard.notify_at(delivery.time)`.
        on_notify: Called once for each time asked for, when the shard has everything
            of it; may send at that time.
        in_order: Hold a complete time back while an earlier one, by Python's order of
            times, may still come or has not been told. Makes a difference inside
            scopes, where one epoch is then told after the other, and on dense edges.
        pact: How records find their shard; default: as `up` is routed.
        name: Shown in traces and errors; the key of its state.
        options: See `OperatorOptions`.
    """
    logic = Logic(on_batch=on_batch, on_notify=on_notify, in_order=in_order)
    return _one("unary_notify", [up], logic, name, pacts=[pact], **options)


def binary(
    left: StreamLike,
    right: StreamLike,
    on_batch: OnBatch,
    *,
    pacts: tuple[Pact | None, Pact | None] = (None, None),
    name: str | None = None,
    **options: Unpack[OperatorOptions],
) -> StreamRef:
    """Call `on_batch(shard, delivery)` for each block of either stream.

    Args:
        left: Read on port 0.
        right: Read on port 1; in the same scope.
        on_batch: See `unary`; `delivery.port` tells the streams apart.
        pacts: How records of each find their shard; default: as they are routed.
        name: Shown in traces and errors; the key of its state.
        options: See `OperatorOptions`.
    """
    logic = Logic(on_batch=on_batch)
    return _one("binary", [left, right], logic, name, pacts=pacts, **options)


def binary_frontier(
    left: StreamLike,
    right: StreamLike,
    on_batch: OnBatch,
    on_frontier: OnFrontier,
    *,
    pacts: tuple[Pact | None, Pact | None] = (None, None),
    name: str | None = None,
    **options: Unpack[OperatorOptions],
) -> StreamRef:
    """Like `binary`, and call `on_frontier(shard)` whenever a frontier moved.

    Args:
        left: Read on port 0.
        right: Read on port 1; in the same scope.
        on_batch: See `binary`.
        on_frontier: Reads `shard.frontier(port)`; see `unary_frontier`.
        pacts: How records of each find their shard; default: as they are routed.
        name: Shown in traces and errors; the key of its state.
        options: See `OperatorOptions`.
    """
    logic = Logic(on_batch=on_batch, on_frontier=on_frontier)
    return _one("binary_frontier", [left, right], logic, name, pacts=pacts, **options)


def binary_notify(
    left: StreamLike,
    right: StreamLike,
    on_batch: OnBatch,
    on_notify: OnNotify,
    *,
    in_order: bool = False,
    pacts: tuple[Pact | None, Pact | None] = (None, None),
    name: str | None = None,
    **options: Unpack[OperatorOptions],
) -> StreamRef:
    """Like `binary`, and call `on_notify(shard, time)` for times that are complete.

    Args:
        left: Read on port 0.
        right: Read on port 1; in the same scope.
        on_batch: Asks with `shard.notify_at(delivery.time)`, for both streams, or for
            some with `ports=`.
        on_notify: See `unary_notify`.
        in_order: See `unary_notify`.
        pacts: How records of each find their shard; default: as they are routed.
        name: Shown in traces and errors; the key of its state.
        options: See `OperatorOptions`.
    """
    logic = Logic(on_batch=on_batch, on_notify=on_notify, in_order=in_order)
    return _one("binary_notify", [left, right], logic, name, pacts=pacts, **options)


def sink(
    up: StreamLike,
    on_batch: OnBatch,
    *,
    on_notify: OnNotify | None = None,
    in_order: bool = True,
    pact: Pact | None = None,
    name: str | None = None,
    **options: Unpack[OperatorOptions],
) -> None:
    """Call `on_batch(shard, delivery)` for each block, and send nothing on.

    Args:
        up: Stream to read.
        on_batch: Where records go, in the worker that holds the shard.
        on_notify: Called for complete times; asked for with `shard.notify_at`.
        in_order: See `unary_notify`.
        pact: How records find their shard; default: as `up` is routed.
        name: Shown in traces and errors; the key of its state.
        options: See `OperatorOptions`.
    """
    check_callable(name or "sink", "on_batch", on_batch, may_yield=True)
    check_optional_callable(name or "sink", "on_notify", on_notify, may_yield=True)
    logic = Logic(on_batch=on_batch, on_notify=on_notify, in_order=in_order)
    options.setdefault("states", ("state",))
    add_operator("sink", [up], logic, name=name, pacts=[pact], num_outputs=0, **options)


def _one(
    kind: str,
    ups: list[StreamLike],
    logic: Logic,
    name: str | None,
    *,
    pacts: tuple[Pact | None, Pact | None] | list[Pact | None],
    **options: Unpack[OperatorOptions],
) -> StreamRef:
    """Add an operator of one output, with a state unless told otherwise."""
    check_callable(name or kind, "on_batch", logic.on_batch, may_yield=True)
    if kind.endswith("_notify"):
        check_callable(name or kind, "on_notify", logic.on_notify, may_yield=True)
    if kind.endswith("_frontier"):
        check_callable(name or kind, "on_frontier", logic.on_frontier)
    options.setdefault("states", ("state",))
    (out,) = add_operator(kind, ups, logic, name=name, pacts=pacts, **options)
    return out
