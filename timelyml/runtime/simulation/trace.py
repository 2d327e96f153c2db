"""What the operators of random graphs tell the oracle: a list of events.

The list lies in declared state, so that nothing global and no hook in the runtime
is needed: the oracle finds it in the worker's state and empties it after each step.
Times are tuples, as in the closure.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from timelyml.runtime.simulation.closure import Time
from timelyml.runtime.simulation.routes import Target

TRACE = "trace"
"""Name of the state in which the events lie, under the key "events"."""


class Sent(NamedTuple):
    """An operator sent records on an output.

    Where it names shards itself, `target` is one for all, or one for each record.
    """

    operator: int
    shard: int
    output: int
    time: Time
    records: tuple[int, ...]
    is_last: bool
    target: Target


class Got(NamedTuple):
    """A block was delivered; its callback begins."""

    operator: int
    shard: int
    port: int
    time: Time
    source_shard: int
    records: tuple[int, ...]


class Done(NamedTuple):
    """The callback of a delivery has ended: its records are used up."""

    operator: int
    shard: int
    port: int
    time: Time
    num_records: int


class Held(NamedTuple):
    """A right to send came into being (`change` 1) or was given up (-1)."""

    operator: int
    output: int
    time: Time
    change: int


class Asked(NamedTuple):
    """A notification was asked for."""

    operator: int
    shard: int
    time: Time
    ports: tuple[int, ...]


class Told(NamedTuple):
    """A notification was delivered; its callback begins."""

    operator: int
    shard: int
    time: Time
    ports: tuple[int, ...]


Event: TypeAlias = Sent | Got | Done | Held | Asked | Told
Trace: TypeAlias = list[Event]


def trace_of(shard: Any) -> Trace:
    """Return the list to which a shard's events are appended."""
    trace: Trace = shard.state_of(TRACE).setdefault("events", [])
    return trace
