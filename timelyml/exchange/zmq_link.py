"""One peer as seen over ZeroMQ: sockets to it, sequence numbers both ways, health.

Once it is connected, small messages may go beside it, as datagrams; see
`datagrams.py`. Its health is that of ZeroMQ's connections all the same.

A link is dead for good once it lost, repeated or garbled a message, or once its
connection broke: ZeroMQ reconnects and drops without a word, so what came after
could hide a loss.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq

from timelyml.errors import ConfigError
from timelyml.exchange.datagrams import DatagramLink, datagram_link
from timelyml.exchange.security import CurveKeys
from timelyml.exchange.transport import Endpoint, Lane

_DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
_FATAL_EVENTS = {
    _DISCONNECTED: "the connection broke",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the handshake failed",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "the handshake failed: not a peer",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "the handshake failed: wrong keys",
}
_CONNECTED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_EVENT = struct.Struct("=HI")
_PINGS_PER_SILENCE = 4
_NOBLOCK = int(zmq.NOBLOCK)  # the enum would take 0.5 us of each message
_MORE = _NOBLOCK | int(zmq.SNDMORE)
# What `Socket.send` comes down to: its checks would take 1.4 us of each message.
_send: Any = zmq.backend.Socket.send


class OutgoingLink:
    """The sockets towards one peer, one per lane, each with a monitor.

    Over a network, a machine that is off or cut off breaks no connection by itself, and
    nor does a process that is stopped: ZeroMQ asks who is watched for signs of life, in
    threads that no Python code holds up.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: Endpoint,
        keys: CurveKeys | None,
        *,
        silence_s: float,
        is_watched: bool,
    ) -> None:
        """Open the sockets.

        Args:
            context: Of this process.
            endpoint: Where the peer listens.
            keys: Of this peer, if it has some.
            silence_s: After so long a silence a connection counts as broken.
            is_watched: Whether that is looked at on this machine too, not only over tcp.

        Raises:
            ConfigError: The endpoint is none.
        """
        self.sequences = [0, 0]  # of the next message on each lane
        self._sockets: list[zmq.Socket[bytes]] = []
        self.monitors: list[zmq.Socket[bytes]] = []
        self._broken: str | None = None
        self.control = endpoint.control
        self._after = [0, 0]  # the number after the last by ZeroMQ, by lane
        self._num_connected = 0  # of the lanes, as far as is known
        self._datagrams: DatagramLink | None = None
        self._silence_s: float | None = None
        if is_watched or endpoint.control.startswith("tcp://"):
            self._silence_s = silence_s
        try:
            for address in (endpoint.control, endpoint.bulk):
                self._open(context, address, endpoint.public_key, keys)
        except (zmq.ZMQError, TypeError, ValueError) as error:
            self.close(0)
            raise ConfigError(
                f"a peer cannot be connected to; got {endpoint.control!r:.80}: {error}; "
                f"expected an address of it; correct it",
            ) from error

    def _open(
        self,
        context: zmq.Context[Any],
        address: str,
        public_key: bytes | None,
        keys: CurveKeys | None,
    ) -> None:
        socket = context.socket(zmq.PUSH)
        self._sockets.append(socket)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.TCP_KEEPALIVE, 1)
        if self._silence_s is not None:
            every_ms = math.ceil(self._silence_s * 1000 / _PINGS_PER_SILENCE)
            socket.set(zmq.HEARTBEAT_IVL, every_ms)
            socket.set(zmq.HEARTBEAT_TIMEOUT, every_ms * (_PINGS_PER_SILENCE - 1))
        if public_key is not None:
            own = keys or CurveKeys.generate()
            socket.set(zmq.CURVE_SERVERKEY, public_key)
            socket.set(zmq.CURVE_PUBLICKEY, own.public)
            socket.set(zmq.CURVE_SECRETKEY, own.secret)
        self.monitors.append(socket.get_monitor_socket(sum(_FATAL_EVENTS) | _CONNECTED))
        socket.connect(address)

    def send(self, lane: Lane, frames: Sequence[Any]) -> bool:
        """Queue the frames of one message; never blocks.

        True if it needs nobody else to arrive, as a datagram.
        """
        socket = self._sockets[lane]
        is_direct = False
        if len(frames) == 1:
            datagrams, frame = self._datagrams, frames[0]
            is_direct = datagrams is not None and datagrams.send(
                frame, self._after[lane]
            )
            if not is_direct:
                _send(socket, frame, _NOBLOCK)
        else:
            for frame in frames[:-1]:
                _send(socket, frame, _MORE, False)
            _send(socket, frames[-1], _NOBLOCK, False)
        self.sequences[lane] += 1
        if not is_direct:
            self._after[lane] = self.sequences[lane]
        return is_direct

    @property
    def is_near(self) -> bool:
        """Whether the peer is known to be on this host."""
        return self._datagrams is not None

    def broken(self) -> str | None:
        """Return why a connection is gone, once a monitor has told so."""
        for monitor in self.monitors:
            while self._broken is None and monitor.poll(0):
                event, _ = monitor.recv_multipart(zmq.NOBLOCK)
                number, _ = _EVENT.unpack(event)
                if number == _CONNECTED:
                    self._connected()
                self._broken = _FATAL_EVENTS.get(number)
                if self._broken and self._silence_s and number == _DISCONNECTED:
                    self._broken += f", or it was silent for {self._silence_s:g} s"
        return self._broken

    def _connected(self) -> None:
        """Send datagrams, once it would show on either lane that the peer is gone."""
        self._num_connected += 1
        if self._num_connected == len(Lane):
            self._datagrams = datagram_link(self.control)

    def close(self, linger_ms: int) -> None:
        """Close the sockets; they flush in the background for `linger_ms`."""
        if self._datagrams is not None:
            self._datagrams.close()
        for socket in self._sockets:
            socket.disable_monitor()
            socket.close(linger_ms)
        for monitor in self.monitors:
            monitor.close(0)


class IncomingLink:
    """Sequence numbers of what one peer sends, and which lanes it has closed.

    Attributes:
        expected: The number of the next message, by lane.
        early: Datagrams that came before a message that ZeroMQ is to bring, by lane,
            with their numbers, in their order.
    """

    __slots__ = ("closed_lanes", "early", "expected", "is_refused")

    def __init__(self) -> None:
        self.expected = [0, 0]
        self.early: tuple[deque[tuple[int, bytes]], ...] = (deque(), deque())
        self.closed_lanes = 0
        self.is_refused = False

    def has_to_wait(self, lane: int, sequence: int, after: int) -> bool:
        """Whether a datagram came before a message that ZeroMQ is to bring.

        Datagrams keep their order, and none waits for itself or for what follows it:
        one that seems to is out of turn.
        """
        if self.is_refused or not self.expected[lane] < after <= sequence:
            return False
        early = self.early[lane]
        return not early or early[-1][0] < sequence

    def accept(self, lane: int, said: int, sequence: int) -> str | None:
        """Count a message of a lane; return what is wrong with it, if anything.

        Args:
            lane: That it came on.
            said: The lane that it names itself.
            sequence: Its number there.
        """
        if said != lane:
            return f"a message of lane {said} came on lane {lane}"
        expected = self.expected[lane]
        if sequence == expected:
            self.expected[lane] = expected + 1
            return None
        kind = "a gap" if sequence > expected else "a duplicate or a restart"
        return (
            f"{kind} on the {Lane(lane).name.lower()} lane; got message {sequence}; "
            f"expected {expected}"
        )
