"""What stands beside the stations: the loss, the norm, the end, and the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from timelyml.graph import Gather, GraphBuilder, InputSpec, Pipeline, StreamRef
from timelyml.ml.firing import Firing, Rule, add_firing_operator
from timelyml.ml.sharded.saving import NOT_SAVED, SaveRequest
from timelyml.ml.sharded.updates import Norm
from timelyml.operators.edges import pass_on
from timelyml.progress import epoch_of
from timelyml.runtime.operator import Delivery, Logic
from timelyml.runtime.shard import Shard


@dataclass(frozen=True, slots=True)
class _Loss:
    """Adds up the parts of the loss, by port and shard."""

    num_ports: int

    def __call__(self, firing: Firing) -> None:
        """Send the loss of the time."""
        total: Any = None
        for port in range(self.num_ports):
            for payload in firing.inputs[port].payloads:
                for part in payload[0]:
                    total = part if total is None else total + part
        firing.send(0, np.atleast_1d(total))


@dataclass(frozen=True, slots=True)
class _Ending:
    """Notices that a time had no loss any more, and asks for the weights then.

    Asks for what goes into a checkpoint, too, after `every` times and then; 0 never does.
    """

    every: int
    first: int
    """How many times were learnt from before the first one of this run."""

    def __call__(self, firing: Firing) -> None:
        """Tell the next time of this one; ask if this one was not."""
        is_end = not firing.inputs[0]
        step = self.first + epoch_of(firing.time) + (0 if is_end else 1)
        if not is_end:
            firing.send(0, [1])
        is_due = bool(self.every) and (is_end or step % self.every == 0)
        if is_end or is_due:
            firing.send(1, [SaveRequest(is_end, step if is_due else NOT_SAVED)])


def add_loss(
    builder: GraphBuilder, name: str, parts: Sequence[tuple[StreamRef, bool]]
) -> StreamRef:
    """Add up parts of the loss on one shard: one number per time, `(1,)`.

    Args:
        builder: Of the dataflow.
        name: Of the operator.
        parts: Streams, and whether each shard sends a part at every time.
    """
    ports = tuple(range(len(parts)))
    (loss,) = add_firing_operator(
        builder,
        name,
        [InputSpec(stream, Gather(dense=is_dense)) for stream, is_dense in parts],
        [Rule(ports, _Loss(len(parts)), outputs=(0,))],
        num_outputs=1,
        num_shards=1,
        regular=True,
        in_order=False,
    )
    return loss


def add_norm(
    builder: GraphBuilder,
    name: str,
    squares: Sequence[StreamRef],
    *,
    is_dense: bool,
) -> StreamRef:
    """Make the norm of all gradients out of sums of squares of all shards."""
    ports = tuple(range(len(squares)))
    (norm,) = add_firing_operator(
        builder,
        name,
        [InputSpec(stream, Gather(dense=is_dense)) for stream in squares],
        [Rule(ports, Norm(ports), outputs=(0,))],
        num_outputs=1,
        num_shards=1,
        regular=True,
        in_order=False,
    )
    return norm


def add_ending(
    builder: GraphBuilder,
    name: str,
    loss: StreamRef,
    *,
    is_dense: bool,
    every: int = 0,
    first: int = 0,
) -> StreamRef:
    """Give a stream that asks for weights at the first time without a loss.

    Args:
        builder: Of the dataflow.
        name: Of the operator.
        loss: Has a record at each time that there is.
        is_dense: Whether each time of the clock has one.
        every: Ask for a checkpoint after so many times, and at the end; 0: never.
        first: The step that the first time is.
    """
    loop = builder.feedback(by=1, num_shards=1)
    next_time, asked = add_firing_operator(
        builder,
        name,
        [
            InputSpec(loss, Pipeline(dense=is_dense)),
            InputSpec(loop.stream, Pipeline(dense=False)),
        ],
        [Rule((0, 1), _Ending(every, first), outputs=(0, 1))],
        num_outputs=2,
        num_shards=1,
        in_order=False,
    )
    loop.connect(next_time)
    return asked


def add_weights(
    builder: GraphBuilder, name: str, told: Sequence[StreamRef]
) -> StreamRef:
    """Join the records of all operators that hold parameters on one shard."""
    (weights,) = builder.add_operator(
        name,
        "weights",
        inputs=[InputSpec(stream, Gather()) for stream in told],
        num_shards=1,
        logic=Logic(on_batch=pass_on),
    )
    return weights


def unpacked(
    builder: GraphBuilder, name: str, packed: StreamRef, count: int
) -> tuple[StreamRef, ...]:
    """Give the arrays of records of arrays as streams of columns."""

    def on_batch(shard: Shard, delivery: Delivery) -> Iterator[None] | None:
        for arrays in delivery.payload:
            for output, array in enumerate(arrays):
                shard.output(output).send(delivery.time, np.atleast_1d(array))
        return None

    return builder.add_operator(
        name,
        "unpack",
        inputs=[InputSpec(packed)],
        num_outputs=count,
        logic=Logic(on_batch=on_batch),
    )
