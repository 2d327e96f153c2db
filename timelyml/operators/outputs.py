"""Watching a stream from the driver: how far it is, and what it holds."""

from __future__ import annotations

from timelyml.operators.edges import Routed, StreamLike, check_stream
from timelyml.operators.operator_builder import add_operator
from timelyml.runtime.operator import Delivery, Logic
from timelyml.runtime.shard import Shard


def probe(up: StreamLike, *, name: str | None = None) -> StreamLike:
    """Let the driver see how far `up` is, by `run.probe(name)`; returns `up`.

    A time has passed the probe when all its records have reached it.

    Args:
        up: Stream to watch, where its producer is: routing is not waited for.
        name: What the driver asks for; default: "probe".
    """
    check_stream(name or "probe", up)
    stream = up.stream if isinstance(up, Routed) else up
    add_operator("probe", [stream], Logic(), name=name, num_outputs=0)
    return up


def collect(up: StreamLike, *, name: str = "out") -> None:
    """Send all records to the driver, where the result holds them under `name`.

    They come in the order of their times, and whole times only.

    Args:
        up: Stream to collect.
        name: Key of the result: `result["out"]`.
    """

    def on_batch(shard: Shard, delivery: Delivery) -> None:
        shard.emit("collect", (delivery.time, delivery.payload))

    add_operator("collect", [up], Logic(on_batch=on_batch), name=name, num_outputs=0)
