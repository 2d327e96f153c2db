"""Failures of records that do not pickle, or do not unpickle where they come to.

Both are the user's, of one operator and one run; links and other runs go on.
"""

from __future__ import annotations

from typing import Any

from timelyml.errors import OperatorError, PayloadError
from timelyml.exchange import CONTROLLER, Codec, Unreadable, holds_failed
from timelyml.graph import Graph
from timelyml.progress import Timestamp
from timelyml.runtime.failure import operator_failure
from timelyml.runtime.messages import (
    Block,
    DataMessage,
    Emitted,
    OperatorMessage,
    Part,
)
from timelyml.runtime.shipping import worker_codec


def unreadable_failure(
    graph: Graph, unreadable: Unreadable, *, peer: int, here: int
) -> OperatorError:
    """Return the failure of a run that a record is lost to.

    Args:
        graph: The run's.
        unreadable: What came.
        peer: Who sent it, a worker or the controller.
        here: Where it does not unpickle, a worker or the controller.
    """
    operator, what = "?", "cannot unpickle what it got"
    shard: int | None = None
    time: Timestamp | None = None
    match unreadable.message:
        case DataMessage(blocks=blocks):
            block, part = next(
                (block, part)
                for block in blocks
                for part in block.parts
                if holds_failed(part.payload)
            )
            source, operator = _ends(graph, block)
            shard, time = _shard_of(part), block.time
            what = (
                f"cannot unpickle what {source!r} sent from worker {peer}, shard "
                f"{part.source_shard},"
            )
        case OperatorMessage() as message:
            operator, shard = graph.operators[message.operator].name, message.shard
            time, what = (
                _time_in(message.body, 1),
                "cannot unpickle what the driver sent",
            )
        case Emitted() as message:
            operator, shard = graph.operators[message.operator].name, message.shard
            time, what = (
                _time_in(message.body, 0),
                "sent what the driver cannot unpickle",
            )
    return operator_failure(
        unreadable.error,
        operator=operator,
        worker=peer if here == CONTROLLER else here,
        shard=shard,
        time=time,
        what=what,
    )


def unsendable_failure(
    graph: Graph, message: object, error: PayloadError, worker: int
) -> OperatorError:
    """Return the failure of a run whose message holds what cannot be sent.

    Args:
        graph: The run's.
        message: What was to be sent.
        error: Why it cannot be.
        worker: Who sends it, or is to get it from the driver.
    """
    operator, what = "?", "cannot send a record"
    shard: int | None = None
    time: Timestamp | None = None
    match message:
        case DataMessage(blocks=blocks):
            codec = worker_codec()
            for block in blocks:
                for part in block.parts:
                    if not _can_encode(codec, part):
                        operator, target = _ends(graph, block)
                        shard, time = part.source_shard, block.time
                        what = f"cannot send a record to {target!r}"
        case OperatorMessage():
            operator, shard = graph.operators[message.operator].name, message.shard
            time, what = _time_in(message.body, 1), "cannot be sent a record"
    return operator_failure(
        error, operator=operator, worker=worker, shard=shard, time=time, what=what
    )


def _can_encode(codec: Codec, part: Part) -> bool:
    try:
        codec.encode(part.payload)
    except PayloadError:
        return False
    return True


def _ends(graph: Graph, block: Block) -> tuple[str, str]:
    channel = graph.channels[block.channel]
    return (
        graph.operators[channel.source.operator].name,
        graph.operators[channel.target.operator].name,
    )


def _shard_of(part: Part) -> int | None:
    return part.target_shard if part.target_shard >= 0 else None


def _time_in(body: Any, position: int) -> Timestamp | None:
    """Return the time that stands in what an input is sent, or a driver."""
    if isinstance(body, tuple) and len(body) > position:
        found = body[position]
        if isinstance(found, (int, tuple)):
            return found
    return None
