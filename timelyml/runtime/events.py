"""What a worker notes of a run that logs its events.

Times are of the worker's clock, in nanoseconds; those of one machine can be compared.
Operators and channels are named as in `run.metrics()`.

Source:
    timely dataflow (logging: TimelyEvent), with one event for each turn in place of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Operates:
    """An operator was built; `num_shards` of its shards are here."""

    time_ns: int
    worker: int
    operator: str
    kind: str
    num_shards: int


@dataclass(frozen=True, slots=True)
class Channels:
    """A channel was built, between two operators."""

    time_ns: int
    worker: int
    channel: str
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Schedule:
    """An operator had a turn, from `time_ns` to `stop_ns`."""

    time_ns: int
    worker: int
    operator: str
    stop_ns: int


@dataclass(frozen=True, slots=True)
class Messages:
    """A part of a block left for `peer`, or came from it, which may be the same worker.

    `records` is its weight: an empty one has 1, and one for all shards counts once.
    """

    time_ns: int
    worker: int
    channel: str
    peer: int
    is_sent: bool
    records: int


@dataclass(frozen=True, slots=True)
class Batches:
    """A progress batch left for `peer`, or came from it; -1 is the controller."""

    time_ns: int
    worker: int
    peer: int
    is_sent: bool
    num_changes: int


@dataclass(frozen=True, slots=True)
class Park:
    """The worker has nothing to do for the run, from `time_ns` to `stop_ns`."""

    time_ns: int
    worker: int
    stop_ns: int


@dataclass(frozen=True, slots=True)
class Closes:
    """An operator was closed, with its run."""

    time_ns: int
    worker: int
    operator: str


LoggedEvent: TypeAlias = (
    Operates | Channels | Schedule | Messages | Batches | Park | Closes
)
EVENT_TYPES = (Operates, Channels, Schedule, Messages, Batches, Park, Closes)
