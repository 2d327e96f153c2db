"""What the controller's decisions ask for: messages to send, things to tell.

A `RunState` answers every event with a list of these. The controller sends the
`Send`s; everything else goes to the observer of the run, its handle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from timelyml.errors import TimelyError
from timelyml.exchange import Lane
from timelyml.progress import Timestamp
from timelyml.runtime.stall import StallReport


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to one worker."""

    worker: int
    message: object
    lane: Lane = Lane.CONTROL


@dataclass(frozen=True, slots=True)
class FrontierMoved:
    """The frontier at a probe is now the minimal `elements`."""

    operator: str
    elements: tuple[Timestamp, ...]


@dataclass(frozen=True, slots=True)
class OldestEpochs:
    """By input operator, the oldest epoch unfinished at the ends that it leads to.

    None where none is unfinished, or where it leads nowhere.
    """

    by_input: dict[int, int | None]


@dataclass(frozen=True, slots=True)
class Released:
    """All that an operator collected at `time`, as (shard, payload): it is complete."""

    operator: str
    time: Timestamp
    items: tuple[tuple[int, Any], ...]


@dataclass(frozen=True, slots=True)
class DriverMessage:
    """Something that a shard sent to the driver with a tag of its own."""

    operator: str
    shard: int
    tag: str
    body: Any


@dataclass(frozen=True, slots=True)
class Inspected:
    """Answer to a request for metrics and an explanation.

    `metrics` are by worker; a worker that was too busy to answer in time is absent.
    """

    request: int
    metrics: dict[int, dict[str, Any]]
    explanation: StallReport


@dataclass(frozen=True, slots=True)
class Started:
    """Every worker has built the graph, and data may flow."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The run is over: complete, or with an error. Nothing follows."""

    error: TimelyError | None
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)


Effect = (
    Send
    | FrontierMoved
    | OldestEpochs
    | Released
    | DriverMessage
    | Inspected
    | Started
    | Ended
)
