"""The receiving half of a ZeroMQ transport: bound sockets, checks, decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from timelyml.errors import ConfigError, UnreadableError, WireError
from timelyml.exchange.codec import Codec
from timelyml.exchange.frames import read_frames
from timelyml.exchange.security import CurveKeys
from timelyml.exchange.transport import (
    Incoming,
    Lane,
    TransportMetrics,
    Unreadable,
)
from timelyml.exchange.zmq_link import IncomingLink
from timelyml.progress import new_tuple

LIMITS = (256, 64)
"""Messages per lane that one call takes."""

CLOSED = "it closed its transport"

# As plain ints: the enums of pyzmq would take 2 us of each message.
_NOBLOCK = int(zmq.NOBLOCK)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)


class Inbox:
    """PULL sockets, one per lane, and what is known of everybody who sends.

    `wrong` collects, for the transport, peers whose link cannot go on and why. Frames
    without this cluster's token are counted and forgotten: they are nobody's.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        codec: Codec,
        token: bytes,
        metrics: TransportMetrics,
        max_frame_bytes: int,
    ) -> None:
        self.wrong: dict[int, str] = {}
        self.heard: set[int] = set()  # peers that the latest call took something from
        self._codec = codec
        self._token = token
        self._num_received = metrics.messages_received
        self._bytes_received = metrics.bytes_received
        self._refused: Counter[str] = metrics.frames_refused
        self._max_frame_bytes = max_frame_bytes
        self._context = context
        self._links: dict[int, IncomingLink] = {}
        self._files: list[Path] = []
        self.sockets: list[zmq.Socket[bytes]] = []

    def bind(self, address: str, keys: CurveKeys | None) -> str:
        """Bind the socket of the next lane; return the address that it got.

        Raises:
            ConfigError: The address cannot be bound.
        """
        pull = self._context.socket(zmq.PULL)
        self.sockets.append(pull)
        pull.set(zmq.RCVHWM, 0)
        pull.set(zmq.MAXMSGSIZE, self._max_frame_bytes)
        pull.set(zmq.TCP_KEEPALIVE, 1)
        if keys is not None:
            pull.set(zmq.CURVE_SERVER, 1)
            pull.set(zmq.CURVE_PUBLICKEY, keys.public)
            pull.set(zmq.CURVE_SECRETKEY, keys.secret)
        try:
            pull.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"a transport cannot bind; got {address!r}: {error}; expected a free "
                f"address of this host; choose another",
                address=address,
            ) from error
        bound = str(pull.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())
        if bound.startswith("ipc://"):
            self._files.append(Path(bound.removeprefix("ipc://")))
        return bound

    def take(self, lane: int, *, is_calm: bool = False) -> list[Incoming]:
        """Return a bounded number of messages of a lane that has some.

        Only one where `is_calm`, since another is hardly there.
        """
        pull = self.sockets[lane]
        recv: Any = pull.recv
        arrived: list[Incoming] = []
        limit = 1 if is_calm else LIMITS[lane]
        for count in range(limit):
            frame = recv(_NOBLOCK, False)
            frames = [frame.buffer]
            while frame.more:
                frame = recv(_NOBLOCK, False)
                frames.append(frame.buffer)
            incoming = self._accept(lane, frames)
            if incoming is not None:
                arrived.append(incoming)
            if count + 1 == limit:
                break
            # Asking takes 2 us, a failed `recv` 5.
            events: Any = pull.get(_EVENTS)
            if not events & _POLLIN:
                break
        return arrived

    def refuse(self, peer: int) -> None:
        """Take nothing from the peer any more."""
        self._link(peer).is_refused = True

    def _link(self, peer: int) -> IncomingLink:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = IncomingLink()
        return link

    def _accept(self, lane: int, frames: Sequence[memoryview]) -> Incoming | None:
        """Check the frames of one message and decode it."""
        try:
            said, kind, peer, sequence, body, buffers = read_frames(frames, self._token)
        except WireError as error:
            self._refused[error.values["reason"]] += 1
            return None
        link = self._links.get(peer) or self._link(peer)
        if link.is_refused:
            self._refused["lost"] += 1
            return None
        self.heard.add(peer)
        wrong = link.accept(lane, said, sequence)
        if wrong is None and kind:
            self._farewell(peer, link)
            return None
        if wrong is None:
            try:
                message = self._codec.decode(body, buffers)
            except UnreadableError as error:
                message = Unreadable(error.rest, error.__cause__ or error)
            except WireError as error:
                wrong = str(error)
        if wrong is not None:
            self._refused["link"] += 1
            self._give_up(peer, wrong)
            return None
        self._num_received[lane] += 1
        self._bytes_received[lane] += sum(map(len, frames))
        incoming: Incoming = new_tuple(Incoming, (peer, message))
        return incoming

    def _farewell(self, peer: int, link: IncomingLink) -> None:
        link.closed_lanes += 1
        if link.closed_lanes == len(Lane):
            self._give_up(peer, CLOSED)

    def _give_up(self, peer: int, reason: str) -> None:
        self.wrong[peer] = reason
        self.refuse(peer)

    def close(self) -> None:
        """Close the sockets at once; what was not taken is lost."""
        for pull in self.sockets:
            pull.close(0)
        for file in self._files:  # ZeroMQ leaves them
            file.unlink(missing_ok=True)
