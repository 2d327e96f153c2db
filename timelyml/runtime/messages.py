"""The messages that workers, the controller and the driver exchange.

Each is a frozen dataclass; the codec turns it into frames. What every step sends is
a named tuple instead, which takes 0.3 us to make, not 1. Data, progress and credit
travel between workers; everything else between the controller and one
worker: first what it says, up to `Shutdown`, then what it is told. `generation`
names the run: a message of an older one is refused.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from timelyml.exchange import Endpoint
from timelyml.progress import ProgressBatch, Timestamp

# What two processes must agree on to work together: ours, and that of pickled code.
HANDSHAKE = f"timelyml wire 1, python {sys.version_info[0]}.{sys.version_info[1]}"


class Part(NamedTuple):
    """Rows from one producer shard for one consumer shard (-1: all local shards).

    `weight` is the number of records that progress counts, at least 1;
    `is_last` marks the end of a logical block on a dense edge; `size_bytes` is the
    credit that it was charged, which the receiver gives back.
    """

    source_shard: int
    target_shard: int
    weight: int
    is_last: bool
    size_bytes: int
    payload: Any


class Block(NamedTuple):
    """All parts that one step sends on one channel, at one time, to one worker."""

    channel: int
    time: Timestamp
    parts: tuple[Part, ...]


class DataMessage(NamedTuple):
    """Blocks of one step for one worker, with its progress batch when it is small."""

    generation: int
    blocks: tuple[Block, ...]
    progress: ProgressBatch | None = None


@dataclass(frozen=True, slots=True)
class CreditMessage:
    """Bytes that left the receiver's queue, by channel."""

    generation: int
    refunds: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Connect:
    """Where each worker listens, by worker index."""

    endpoints: tuple[Endpoint | None, ...]


@dataclass(frozen=True, slots=True)
class GuestCame:
    """A worker joined, and listens there."""

    worker: int
    endpoint: Endpoint


@dataclass(frozen=True, slots=True)
class Deploy:
    """Build this run's dataflow: `shipped` is the pickled graph and its config.

    `members` are the workers that run it, by their number in the run.
    """

    generation: int
    members: tuple[int, ...]
    shipped: bytes


@dataclass(frozen=True, slots=True)
class Start:
    """Every worker has built the same graph: data may flow."""

    generation: int


@dataclass(frozen=True, slots=True)
class OperatorMessage:
    """A message from the driver to one shard of an operator (input handles)."""

    generation: int
    operator: int
    shard: int
    body: Any


@dataclass(frozen=True, slots=True)
class StopSources:
    """Close the sources, so that the run drains.

    Regular sources pause at first (`epoch` None), and close at the epoch that the
    controller then names, the same for all shards.
    """

    generation: int
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the run: it is "complete", "cancelled" or "failed".

    A worker that has not yet heard of the end of a complete run finishes first.
    """

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Inspect:
    """Ask for metrics and held capabilities; answered by `Report`."""

    generation: int
    request: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Leave the cluster and end."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker is there: who it is and where it listens."""

    worker: int
    process_id: int
    endpoint: Endpoint | None
    version: str


@dataclass(frozen=True, slots=True)
class Connected:
    """The worker has opened its links to every peer."""

    worker: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker built the graph; `description` explains a fingerprint mismatch."""

    generation: int
    worker: int
    fingerprint: str
    description: str


@dataclass(frozen=True, slots=True)
class Stopping:
    """Told to stop: the first epoch that no regular source here has begun."""

    generation: int
    worker: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Emitted:
    """Something an operator sends to the driver, e.g. a collected batch."""

    generation: int
    operator: int
    shard: int
    tag: str
    body: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """An operator or the worker failed; `error` is a pickled TimelyError."""

    generation: int
    worker: int
    error: bytes


@dataclass(frozen=True, slots=True)
class Dropped:
    """The worker has forgotten the run; its last metrics ride along."""

    generation: int
    worker: int
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """Answer to `Inspect`: metrics, and who holds which capability and why."""

    generation: int
    worker: int
    request: int
    metrics: dict[str, Any]
    holdings: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The worker's process is alive, and what its loop is doing for how long."""

    worker: int
    activity: str
    busy_s: float


@dataclass(frozen=True, slots=True)
class ServiceMessage:
    """What one half of a service says to another; between any two peers."""

    service: str
    body: Any


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The worker hears no more of a peer: no run of the session can go on."""

    worker: int
    peer: int
    reason: str


MESSAGE_TYPES: tuple[type, ...] = (
    DataMessage,
    ProgressBatch,
    CreditMessage,
    Connect,
    Deploy,
    Start,
    OperatorMessage,
    StopSources,
    Drop,
    Inspect,
    Shutdown,
    Hello,
    Connected,
    Ready,
    Stopping,
    Emitted,
    Failed,
    Dropped,
    Report,
    Heartbeat,
    ServiceMessage,
    LinkLost,
    GuestCame,
)
"""What the codec encodes; in this order on both sides."""


def generation_of(message: object) -> int:
    """Return the run that a message belongs to; -1: to none.

    >>> generation_of(Start(7)), generation_of(Shutdown())
    (7, -1)
    """
    generation: int = getattr(message, "generation", -1)
    return generation
