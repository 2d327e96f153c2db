"""What a transport is: addressed, ordered, non-blocking delivery of messages.

Peers are worker indices; the controller is `CONTROLLER`. Each ordered pair of
peers has one link per lane, and a link delivers in order or reports a failure.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

CONTROLLER = -1


class Lane(IntEnum):
    """Control overtakes bulk; within a lane a link is first in, first out."""

    CONTROL = 0
    BULK = 1


class Incoming(NamedTuple):
    """A message and who sent it."""

    peer: int
    message: object


@dataclass(frozen=True, slots=True)
class LinkFailure:
    """The link from this peer lost, repeated or garbled something, or is gone.

    Delivered once, in place of a message; nothing from the peer follows it.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A message with a pickled value that does not unpickle; the link goes on.

    Delivered in place of the message.

    Attributes:
        message: The message, with `Unread` in the place of what was pickled.
        error: What the value's class raised.
    """

    message: object
    error: BaseException


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a transport listens, one address per lane, and its CURVE public key."""

    control: str
    bulk: str
    public_key: bytes | None = None


@dataclass(slots=True)
class TransportMetrics:
    """What a transport moved, each list indexed by lane, and what it refused."""

    messages_sent: list[int] = field(default_factory=lambda: [0, 0])
    bytes_sent: list[int] = field(default_factory=lambda: [0, 0])
    messages_received: list[int] = field(default_factory=lambda: [0, 0])
    bytes_received: list[int] = field(default_factory=lambda: [0, 0])
    bytes_lent: int = 0  # of those sent: through shared memory
    frames_refused: Counter[str] = field(default_factory=Counter)

    def as_map(self) -> dict[str, Any]:
        """Return the figures by name; refused frames by the word for why."""
        return {
            "messages_sent": list(self.messages_sent),
            "bytes_sent": list(self.bytes_sent),
            "messages_received": list(self.messages_received),
            "bytes_received": list(self.bytes_received),
            "bytes_lent": self.bytes_lent,
            "frames_refused": dict(self.frames_refused),
        }


class Transport(Protocol):
    """One peer's way to all others; owned by the thread that drives it."""

    index: int
    metrics: TransportMetrics

    def connect(
        self, peer: int, endpoint: Endpoint, *, is_watched: bool = False
    ) -> None:
        """Open the way to a peer; does nothing where peers need no address.

        Args:
            peer: Its index.
            endpoint: Where it listens.
            is_watched: Whether its silence is a failure of the link, wherever it is.
        """

    def send(self, peer: int, message: object, lane: Lane = Lane.CONTROL) -> None:
        """Hand over a message; never blocks. The sender seals payloads before.

        Raises:
            PeerLostError: The link is known to be dead.
        """

    def shared_memory(self, size_bytes: int) -> Any:
        """Return memory, as bytes, that peers get to see without a copy; None if full.

        What is made in it is sent like all else, and freed with its last view.
        """

    def receive(self) -> list[Incoming]:
        """Return what has arrived, a bounded number, control before bulk."""

    def poll(self) -> bool:
        """Whether something may be there, without waiting.

        Where others are needed for it to come, they get the core for a moment.
        """

    def wait(self, timeout_s: float) -> None:
        """Return once something may be there, `wake` was called, or time is over."""

    def wake(self) -> None:
        """End the present or the next `wait`; from any thread."""

    def close(self) -> None:
        """Deliver what was sent, within bounded time, and free everything."""
