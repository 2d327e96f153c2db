"""The transport between processes: ZeroMQ, one socket per peer and lane.

Each transport binds one PULL socket per lane and opens one PUSH socket per peer and
lane, so that small control messages never queue behind bulk. Nothing blocks and no
high-water mark drops: credit bounds what is under way.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import socket as sockets
from pathlib import Path
from typing import Any

import zmq

from timelyml.errors import ConfigError, PeerLostError, WireError
from timelyml.exchange.codec import Codec
from timelyml.exchange.frames import TOKEN_BYTES, pack_frames, read_frames
from timelyml.exchange.security import (
    CurveKeys,
    check_tcp_bind,
    checked_ipc_directory,
    ipc_address,
)
from timelyml.exchange.transport import (
    Endpoint,
    Incoming,
    Lane,
    LinkFailure,
    TransportMetrics,
)
from timelyml.exchange.zmq_link import IncomingLink, OutgoingLink

_CONTROL_PER_RECEIVE = 256
_BULK_PER_RECEIVE = 64
_RECEIVES_PER_CHECK = 64  # of connections, while messages keep coming


class ZmqTransport:
    """One peer of a cluster of processes; owned by the thread that drives it.

    Args:
        index: This peer's index.
        codec: Encodes and decodes messages.
        token: 16 random bytes that every peer of the cluster knows.
        bind: `ipc://<directory>`, private to this user, or `tcp://<address>:*`.
        keys: This peer's CURVE keys; tcp on loopback makes its own if None.
        advertise: The host that peers connect to, if `bind` names all interfaces.
        max_frame_bytes: A longer frame ends the connection that sent it.
        linger_s: How long `close` waits for what was sent.
    """

    def __init__(
        self,
        index: int,
        *,
        codec: Codec,
        token: bytes,
        bind: str,
        keys: CurveKeys | None = None,
        advertise: str | None = None,
        max_frame_bytes: int = 4 << 30,
        linger_s: float = 5.0,
    ) -> None:
        if len(token) != TOKEN_BYTES:
            raise ConfigError(
                f"a transport has no valid token; got {len(token)} bytes; expected "
                f"{TOKEN_BYTES}; make it with secrets.token_bytes",
                size_bytes=len(token),
            )
        addresses, keys = _addresses(index, bind, keys)
        self.index = index
        self.metrics = TransportMetrics()
        self._codec = codec
        self._token = token
        self._keys = keys
        self._linger_ms = math.ceil(linger_s * 1000)
        self._max_frame_bytes = max_frame_bytes
        self._outgoing: dict[int, OutgoingLink] = {}
        self._incoming: dict[int, IncomingLink] = {}
        self._lost: dict[int, str] = {}
        self._failures: list[Incoming] = []
        self._receives = 0
        self._context: zmq.Context[Any] = zmq.Context()
        self._wake_out, self._wake_in = _signal_pair()
        self._poller = zmq.Poller()
        self._poller.register(self._wake_in.fileno(), zmq.POLLIN)
        self._pulls: list[zmq.Socket[bytes]] = []
        try:
            bound = [self._bind(address) for address in addresses]
        except BaseException:
            self.close()
            raise
        self.endpoint = Endpoint(
            control=_advertised(bound[Lane.CONTROL], advertise),
            bulk=_advertised(bound[Lane.BULK], advertise),
            public_key=None if keys is None else keys.public,
        )

    def _bind(self, address: str) -> str:
        pull = self._context.socket(zmq.PULL)
        self._pulls.append(pull)
        pull.set(zmq.RCVHWM, 0)
        pull.set(zmq.MAXMSGSIZE, self._max_frame_bytes)
        pull.set(zmq.TCP_KEEPALIVE, 1)
        if self._keys is not None:
            pull.set(zmq.CURVE_SERVER, 1)
            pull.set(zmq.CURVE_PUBLICKEY, self._keys.public)
            pull.set(zmq.CURVE_SECRETKEY, self._keys.secret)
        try:
            pull.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"a transport cannot bind; got {address!r}: {error}; expected a free "
                f"address of this host; choose another",
                address=address,
            ) from error
        self._poller.register(pull, zmq.POLLIN)
        bound: bytes = pull.get(zmq.LAST_ENDPOINT)
        return bound.rstrip(b"\0").decode()

    def connect(self, peer: int, endpoint: Endpoint) -> None:
        """Open the link to a peer; it may start to listen later."""
        if peer in self._outgoing:
            raise ConfigError(
                f"peer {peer} is connected already; got it again; expected one link "
                f"per peer; give every peer its own index",
                peer=peer,
            )
        link = OutgoingLink(self._context, endpoint, self._keys)
        self._outgoing[peer] = link
        self._poller.register(link.monitor, zmq.POLLIN)

    def send(self, peer: int, message: object, lane: Lane = Lane.CONTROL) -> None:
        """Encode a message and queue its frames; never blocks.

        Arrays inside must not change any more: they are sent from where they are.

        Raises:
            PeerLostError: There is no link to the peer, or it is dead.
            PayloadError: The message cannot be encoded.
        """
        link = self._outgoing.get(peer)
        if link is None:
            reason = self._lost.get(peer, "no link to it was opened")
            raise PeerLostError(
                f"peer {peer} cannot be reached; got {reason}; expected an open link; "
                f"end the run or connect first",
                peer=peer,
                reason=reason,
            )
        body, buffers = self._codec.encode(message)
        number = (lane, self.index, link.next_sequence(lane))
        frames = pack_frames(number, self._token, body, buffers)
        size = sum(map(len, frames))
        if len(frames[0]) > self._max_frame_bytes:
            raise WireError(
                f"a message is too large; got a body of {len(body)} bytes; expected at "
                f"most {self._max_frame_bytes}; send smaller batches",
                size_bytes=len(body),
            )
        link.send(lane, frames)
        self.metrics.messages_sent[lane] += 1
        self.metrics.bytes_sent[lane] += size

    def receive(self) -> list[Incoming]:
        """Return what has arrived, at most 320 messages, control before bulk."""
        arrived: list[Incoming] = []
        self._drain(Lane.CONTROL, _CONTROL_PER_RECEIVE, arrived)
        self._drain(Lane.BULK, _BULK_PER_RECEIVE, arrived)
        self._receives += 1
        if not arrived or self._receives >= _RECEIVES_PER_CHECK:
            self._receives = 0
            self._check_connections()
        if self._failures:
            arrived += self._failures
            self._failures.clear()
        return arrived

    def _drain(self, lane: Lane, limit: int, arrived: list[Incoming]) -> None:
        pull = self._pulls[lane]
        for _ in range(limit):
            try:
                frames: list[Any] = pull.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._accept(lane, [frame.buffer for frame in frames], arrived)

    def _accept(
        self, lane: Lane, frames: list[memoryview], arrived: list[Incoming]
    ) -> None:
        """Check the frames of one message, decode it, and add it to `arrived`."""
        metrics = self.metrics
        try:
            received = read_frames(frames, self._token)
        except WireError as error:
            metrics.frames_refused[error.values["reason"]] += 1
            return
        peer = received.sender
        if peer in self._lost:
            metrics.frames_refused["lost"] += 1
            return
        link = self._incoming.get(peer)
        if link is None:
            link = self._incoming[peer] = IncomingLink()
        wrong = link.accept(lane, received.sequence)
        if wrong is None and received.lane != lane:
            wrong = f"a message of lane {received.lane} on lane {int(lane)}"
        if wrong is None:
            try:
                message = self._codec.decode(received.body, received.buffers)
            except WireError as error:
                wrong = str(error)
        if wrong is not None:
            metrics.frames_refused["link"] += 1
            self._lose(peer, wrong)
            return
        metrics.messages_received[lane] += 1
        metrics.bytes_received[lane] += sum(map(len, frames))
        arrived.append(Incoming(peer, message))

    def _check_connections(self) -> None:
        for peer, link in list(self._outgoing.items()):
            reason = link.failure()
            if reason is not None:
                self._lose(peer, reason)

    def _lose(self, peer: int, reason: str) -> None:
        """Report a link as failed, once, and close it."""
        if peer in self._lost:
            return
        self._lost[peer] = reason
        self._failures.append(Incoming(peer, LinkFailure(reason)))
        link = self._outgoing.pop(peer, None)
        if link is not None:
            self._poller.unregister(link.monitor)
            link.close(0)

    def wait(self, timeout_s: float) -> None:
        """Sleep until a message, a lost connection or `wake`, at most `timeout_s`."""
        if timeout_s <= 0:
            return
        ready = dict(self._poller.poll(min(math.ceil(timeout_s * 1000), 2**31 - 1)))
        if self._wake_in.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake_in.recv(4096)

    def wake(self) -> None:
        """End the present or the next `wait`; from any thread, also after `close`."""
        with contextlib.suppress(OSError):  # full: a wake is pending; or closed
            self._wake_out.send(b"\0")

    def close(self) -> None:
        """Flush what was sent, at most `linger_s` long, and close every socket."""
        for link in self._outgoing.values():
            link.close(self._linger_ms)
        self._outgoing.clear()
        for pull in self._pulls:
            pull.close(0)
        self._pulls.clear()
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()


def _signal_pair() -> tuple[sockets.socket, sockets.socket]:
    out, back = sockets.socketpair()
    out.setblocking(False)
    back.setblocking(False)
    return out, back


def _addresses(
    index: int, bind: str, keys: CurveKeys | None
) -> tuple[list[str], CurveKeys | None]:
    """Return the address of each lane and the keys that they need."""
    if bind.startswith("ipc://"):
        directory: Path = checked_ipc_directory(bind)
        nonce = secrets.token_hex(4)  # so that a restarted peer never inherits a link
        names = [f"{index}-{nonce}-{lane.name.lower()}" for lane in Lane]
        return [ipc_address(directory, name) for name in names], keys
    if bind.startswith("tcp://"):
        check_tcp_bind(bind, keys)
        return [bind, bind], keys or CurveKeys.generate()
    raise ConfigError(
        f"a transport cannot bind; got {bind!r}; expected ipc://<directory> or "
        f"tcp://<address>:*",
        bind=bind,
    )


def _advertised(bound: str, host: str | None) -> str:
    if host is None or not bound.startswith("tcp://"):
        return bound
    return f"tcp://{host}:{bound.rpartition(':')[2]}"
