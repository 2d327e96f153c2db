"""Messages of the shapes that the runtime sends, and a way to connect transports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from timelyml.exchange import Codec, Endpoint, Incoming, Transport, ZmqTransport

Time = int | tuple[int, ...]
TOKEN = b"0123456789abcdef"
DEADLINE_S = 60.0
PATIENCE_S = 60.0  # within it a peer is no failure, and what was sent is flushed


@dataclass(frozen=True, slots=True)
class Changes:
    generation: int
    sender: int
    sequence: int
    changes: tuple[tuple[int, Time, int], ...]


@dataclass(frozen=True, slots=True)
class Progress:
    batch: Changes


@dataclass(frozen=True, slots=True)
class Part:
    shard: int
    is_last: bool
    payload: Any


@dataclass(frozen=True, slots=True)
class Block:
    channel: int
    time: Time
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Data:
    generation: int
    blocks: tuple[Block, ...]
    progress: Changes | None = None


@dataclass(frozen=True, slots=True)
class Credit:
    generation: int
    refunds: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Connect:
    endpoints: tuple[Endpoint | None, ...]


@dataclass(frozen=True, slots=True)
class Report:
    worker: int
    metrics: dict[str, Any] = field(default_factory=dict)
    holdings: tuple[tuple[Any, ...], ...] = ()
    name: str = ""
    blob: bytes = b""
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Shutdown:
    pass


class Arrival(NamedTuple):
    peer: int
    payload: Any


class Piece(NamedTuple):
    shard: int
    is_last: bool
    payload: Any


class Parcel(NamedTuple):
    time: Time
    pieces: tuple[Piece, ...]
    progress: Changes | None = None


@dataclass(frozen=True)
class Checked:
    size: int

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("negative")


TYPES = (
    Progress,
    Data,
    Credit,
    Connect,
    Report,
    Shutdown,
    Arrival,
    Parcel,
    Checked,
)

MESSAGES = (
    Progress(Changes(1, 2, 3, ((4, 5, -1), (4, (5, 0), 2)))),
    Data(7, (Block(0, 5, (Part(-1, True, ["a", ("b", 1)]),)), Block(1, (5, 1), ()))),
    Data(7, (), Changes(1, -1, 0, ())),
    Credit(1, ((0, 100), (3, 7))),
    Connect((Endpoint("a", "b", b"key"), None)),
    Report(1, {"a": {"b": (1, 2.5)}}, ((1, (2, 3), "site"), ()), "idle", b"x", 0.5),
    Shutdown(),
    Arrival(1, [(1, 2), (3, 4)]),
    Parcel(5, (Piece(0, True, ["a", ("b", 1)]), Piece(1, False, None))),
    Parcel((5, 1), (), Changes(1, -1, 0, ((4, 5, -1),))),
    Checked(5),
)


def codec(**options: Any) -> Codec:
    return Codec(TYPES, **options)


def data(payload: Any) -> Data:
    return Data(1, (Block(0, 5, (Part(0, False, payload),)),))


def payload_of(incoming: Incoming) -> Any:
    message: Any = incoming.message
    return message.blocks[0].parts[0].payload


def until(condition: Callable[[], bool], transports: Sequence[Transport]) -> None:
    """Wait on the transports, in turn, until the condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "nothing came"
        for transport in transports:
            transport.wait(0.02)


def receive(transport: Transport, count: int = 1) -> list[Incoming]:
    """Wait for that many messages."""
    arrived: list[Incoming] = []

    def are_there() -> bool:
        arrived.extend(transport.receive())
        return len(arrived) >= count

    until(are_there, [transport])
    assert len(arrived) == count
    return arrived


@contextmanager
def cluster(bind: str, count: int = 2, **options: Any) -> Iterator[list[ZmqTransport]]:
    """Open transports that are all connected with each other, on a machine at work."""
    options = {"silence_s": PATIENCE_S, **options}
    with ExitStack() as stack:
        peers = []
        for index in range(count):
            peer = ZmqTransport(index, codec=codec(), token=TOKEN, bind=bind, **options)
            stack.callback(peer.close)
            peers.append(peer)
        for one in peers:
            for other in peers:
                if one is not other:
                    one.connect(other.index, other.endpoint)
        yield peers


def private(path: Path) -> str:
    path.chmod(0o700)
    return f"ipc://{path}"
