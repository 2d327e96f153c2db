"""What operators listen to: streams, and streams that change shards on their way.

`exchange`, `broadcast` and `gather` are no operators of their own: they decide how
the edge to the next operator is routed. So a reader still knows which shard
produced each block, which is what makes an order over several producers
deterministic, and no block is handled twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from timelyml.errors import GraphError
from timelyml.graph import (
    GraphBuilder,
    InputSpec,
    Pact,
    Pipeline,
    StreamRef,
)
from timelyml.runtime.operator import Delivery, Logic


@dataclass(frozen=True, slots=True)
class Routed:
    """A stream whose records change shards on the edge to each of its readers.

    Attributes:
        stream: Where the records come from.
        pact: How they find their shard.
        num_shards: Shards of the operator that reads it; None: as many as the
            stream has.
    """

    stream: StreamRef
    pact: Pact
    num_shards: int | None = None

    @property
    def builder(self) -> GraphBuilder:
        """The builder of the stream."""
        return self.stream.builder

    @property
    def scope(self) -> tuple[int, ...]:
        """The scope that the stream is in."""
        return self.stream.scope

    @property
    def depth(self) -> int:
        """Number of scopes around the stream."""
        return self.stream.depth


StreamLike: TypeAlias = StreamRef | Routed
"""What every operator function takes as input."""


def check_stream(operator: str, value: Any) -> None:
    """Refuse `value` unless it is a stream.

    Raises:
        GraphError: It is something else.
    """
    if not isinstance(value, (StreamRef, Routed)):
        raise GraphError(
            f"operator {operator!r} needs a stream to read; got {value!r}; expected "
            f"the result of another operator; pass a stream of the same dataflow",
            operator=operator,
        )


def as_input(up: StreamLike, pact: Pact | None = None) -> InputSpec:
    """Return the edge by which an operator reads `up`.

    Args:
        up: A stream; a routed one brings its own pact.
        pact: Overrides the routing. A routed stream then takes both ways, one after
            the other, through an operator that only passes records on.
    """
    if isinstance(up, StreamRef):
        return InputSpec(up, pact if pact is not None else Pipeline())
    if pact is None:
        return InputSpec(up.stream, up.pact)
    return InputSpec(settle(up), pact)


def settle(up: StreamLike) -> StreamRef:
    """Return `up` as a plain stream: a routed one gets its reader here and now."""
    if isinstance(up, StreamRef):
        return up
    (settled,) = up.builder.add_operator(
        None,
        "exchange",
        inputs=[InputSpec(up.stream, up.pact)],
        num_shards=up.num_shards,
        logic=Logic(on_batch=pass_on),
    )
    return pass_notes(up.stream, settled)


def pass_notes(up: StreamLike, down: StreamRef) -> StreamRef:
    """Let what is known of one stream be known of another with the same columns."""
    stream = up.stream if isinstance(up, Routed) else up
    notes = stream.builder.notes
    note = notes.get((stream.operator, stream.port))
    if note is not None:
        notes[down.operator, down.port] = note
    return down


def is_in_order(up: StreamLike, pact: Pact | None = None) -> bool:
    """Whether a reader of `up` hears a single producer shard, hence in its order."""
    return isinstance(as_pact(up, pact), Pipeline)


def as_pact(up: StreamLike, pact: Pact | None = None) -> Pact:
    """Return the pact of the edge by which an operator reads `up`."""
    if pact is not None:
        return pact
    return up.pact if isinstance(up, Routed) else Pipeline()


def shards_asked_for(ups: list[StreamLike]) -> int | None:
    """Return how many shards the routed ones among the inputs ask for, if any do."""
    for up in ups:
        if isinstance(up, Routed) and up.num_shards is not None:
            return up.num_shards
    return None


def pass_on(shard: Any, delivery: Delivery) -> None:
    """Send a block on as it came."""
    shard.output().send(delivery.time, delivery.payload)
