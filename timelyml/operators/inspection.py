"""Looking at a stream from the worker, without changing it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from timelyml.exchange import records_of
from timelyml.graph import StreamRef
from timelyml.operators.checks import check_callable
from timelyml.operators.edges import StreamLike, pass_notes
from timelyml.operators.operator_builder import add_operator
from timelyml.operators.steps import in_steps
from timelyml.progress import Timestamp
from timelyml.runtime.operator import Delivery, Logic
from timelyml.runtime.shard import Shard


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

        yield from in_steps(shard, records_of(delivery.payload), fn or show)
        shard.output().send(delivery.time, delivery.payload)

    (out,) = add_operator("inspect", [up], Logic(on_batch=on_batch), name=name)
    return pass_notes(up, out)


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
    return pass_notes(up, out)
