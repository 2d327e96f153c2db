"""The receiving half of a ZeroMQ transport: bound sockets, checks, decoding.

Messages of a lane come by ZeroMQ and as datagrams. A datagram may be ahead of what
ZeroMQ brings; it waits for that. What ZeroMQ brings is never ahead of datagrams that
were sent before it: they are there by then, and are taken first.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from timelyml.errors import ConfigError, UnreadableError, WireError
from timelyml.exchange.codec import Codec
from timelyml.exchange.datagrams import (
    AFTER_BYTES,
    DATAGRAM_BYTES,
    DatagramInbox,
    DescriptorInbox,
    after_of,
    datagram_inbox,
    descriptor_path,
)
from timelyml.exchange.frames import Kind, Received, read_frames
from timelyml.exchange.garbled import garbled
from timelyml.exchange.security import CurveKeys
from timelyml.exchange.shared_views import SharedViews
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

# As plain ints: enums would take 2 us of each message.
_NUM_LANES = len(Lane)
_NOBLOCK = int(zmq.NOBLOCK)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_LENT = int(Kind.LENT)
_FAREWELL = int(Kind.FAREWELL)


class Inbox:
    """PULL sockets, one per lane, and what is known of everybody who sends.

    `wrong` collects, for the transport, peers whose link cannot go on and why, and
    `notices` what theirs have to tell it. Frames without this cluster's token are
    counted and forgotten: they are nobody's.
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
        self.notices: list[tuple[int, int, Any]] = []  # peer, kind, body
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
        self.datagrams: DatagramInbox | None = None
        self.views: SharedViews | None = None  # of what peers lend

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

    def bind_datagrams(self, control: str) -> int | None:
        """Take datagrams too; return what to poll for them, None where there are none."""
        self.datagrams = datagram_inbox(control)
        if self.datagrams is None:
            return None
        path = descriptor_path(control)
        if path is not None:
            with contextlib.suppress(OSError):  # then nothing is lent to this one
                self.views = SharedViews(DescriptorInbox(path, self._token))
        return self.datagrams.fd

    def take_datagrams(self, arrived: list[Incoming], *, is_calm: bool = False) -> None:
        """Add a bounded number of messages that came as datagrams; see `take`."""
        for _ in range(1 if is_calm else LIMITS[Lane.CONTROL]):
            if not self._take_datagram(arrived):
                break

    def take(
        self, lane: int, arrived: list[Incoming], *, is_calm: bool = False
    ) -> None:
        """Add a bounded number of messages of a lane that has some.

        Only one where `is_calm`, since another is hardly there.
        """
        pull = self.sockets[lane]
        recv: Any = pull.recv
        limit = 1 if is_calm else LIMITS[lane]
        for count in range(limit):
            frame = recv(_NOBLOCK, False)
            frames = [frame.buffer]
            while frame.more:
                frame = recv(_NOBLOCK, False)
                frames.append(frame.buffer)
            self._accept(lane, frames, arrived)
            if count + 1 == limit:
                break
            # Asking takes 2 us, a failed `recv` 5.
            events: Any = pull.get(_EVENTS)
            if not events & _POLLIN:
                break

    def refuse(self, peer: int) -> None:
        """Take nothing from the peer any more."""
        link = self._link(peer)
        link.is_refused = True
        for early in link.early:
            early.clear()
        if self.views is not None:
            self.views.forget(peer)

    def _link(self, peer: int) -> IncomingLink:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = IncomingLink()
        return link

    def _accept(
        self, lane: int, frames: Sequence[Any], arrived: list[Incoming]
    ) -> None:
        """Check the frames of one message that ZeroMQ brought, and decode it."""
        received = self._read(frames)
        if received is None:
            return
        said, _, peer, sequence, _, _ = received
        link = self._links.get(peer) or self._link(peer)
        while (
            sequence > link.expected[lane]
            and said == lane
            and not link.is_refused  # its number stays behind for good
            and self.datagrams is not None
            and self._take_datagram(arrived)
        ):
            pass
        self._deliver(lane, link, received, frames, arrived)

    def _take_datagram(self, arrived: list[Incoming]) -> bool:
        """Take the next datagram; False if there is none."""
        assert self.datagrams is not None  # noqa: S101  for the type checker
        datagram = self.datagrams.receive()
        if datagram is None:
            return False
        if len(datagram) > AFTER_BYTES + min(DATAGRAM_BYTES, self._max_frame_bytes):
            self._refused["size"] += 1
            return True
        frames = [memoryview(datagram)[AFTER_BYTES:]]
        received = self._read(frames)
        if received is None:
            return True
        lane, _, peer, sequence, _, _ = received
        link = self._links.get(peer) or self._link(peer)
        if lane >= _NUM_LANES:
            self.fail(peer, f"a message of lane {lane} came as a datagram")
        elif link.has_to_wait(lane, sequence, after_of(datagram)):
            self.heard.add(peer)
            link.early[lane].append((sequence, datagram))
        else:
            self._deliver(lane, link, received, frames, arrived)
        return True

    def _read(self, frames: Sequence[Any]) -> Received | None:
        try:
            return read_frames(frames, self._token)
        except WireError as error:
            self._refused[error.values["reason"]] += 1
            return None

    def _deliver(
        self,
        lane: int,
        link: IncomingLink,
        received: Received,
        frames: Sequence[Any],
        arrived: list[Incoming],
    ) -> None:
        """Add a message whose turn it is, and datagrams that were waiting for it."""
        self._decode(lane, link, received, frames, arrived)
        early = link.early[lane]
        while early and after_of(early[0][1]) <= link.expected[lane]:
            _, datagram = early.popleft()
            alone = [memoryview(datagram)[AFTER_BYTES:]]
            self._decode(lane, link, read_frames(alone, self._token), alone, arrived)

    def _decode(
        self,
        lane: int,
        link: IncomingLink,
        received: Received,
        frames: Sequence[Any],
        arrived: list[Incoming],
    ) -> None:
        said, kind, peer, sequence, body, buffers = received
        if link.is_refused:
            self._refused["lost"] += 1
            return
        self.heard.add(peer)
        wrong = link.accept(lane, said, sequence)
        if wrong is None and kind and kind != _LENT:
            if kind == _FAREWELL:
                self._farewell(peer, link)
            else:
                self.notices.append((peer, kind, body))
            return
        size = sum(map(len, frames))
        if wrong is None:
            try:
                if kind == _LENT:
                    body, buffers = self._borrow(peer, body)
                    size += sum(map(len, buffers))
                message = self._codec.decode(body, buffers)
            except UnreadableError as error:
                message = Unreadable(error.rest, error.__cause__ or error)
            except WireError as error:
                wrong = str(error)
        if wrong is not None:
            self.fail(peer, wrong)
            return
        self._num_received[lane] += 1
        self._bytes_received[lane] += size
        arrived.append(new_tuple(Incoming, (peer, message)))

    def _borrow(self, peer: int, body: Any) -> tuple[Any, Any]:
        """Return body and buffers of a message whose buffers its sender lends."""
        if self.views is None:
            raise garbled("a message is lent", "one", "none, as nothing was taken")
        return self.views.read(peer, body)

    def fail(self, peer: int, wrong: str) -> None:
        """Refuse what a peer said, and take nothing from it any more."""
        self._refused["link"] += 1
        self._give_up(peer, wrong)

    def _farewell(self, peer: int, link: IncomingLink) -> None:
        link.closed_lanes += 1
        if link.closed_lanes == _NUM_LANES:
            self._give_up(peer, CLOSED)

    def _give_up(self, peer: int, reason: str) -> None:
        self.wrong[peer] = reason
        self.refuse(peer)

    def close(self) -> None:
        """Close the sockets at once; what was not taken is lost."""
        if self.datagrams is not None:
            self.datagrams.close()
        if self.views is not None:
            self.views.close()
        for pull in self.sockets:
            pull.close(0)
        for file in self._files:  # ZeroMQ leaves them
            file.unlink(missing_ok=True)
