"""One peer as seen over ZeroMQ: sockets to it, sequence numbers both ways, health.

A link is dead for good once it lost, repeated or garbled a message, or once its
connection broke: ZeroMQ reconnects and drops without a word, so what came after
could hide a loss.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import zmq

from timelyml.exchange.security import CurveKeys
from timelyml.exchange.transport import Endpoint, Lane

_FATAL_EVENTS = {
    zmq.EVENT_DISCONNECTED: "the connection broke",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the handshake failed: another protocol",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the handshake failed: wrong keys",
}
_EVENT = struct.Struct("=HI")


class OutgoingLink:
    """The sockets towards one peer, one per lane; the control lane is watched.

    Both lanes end in the same process, so that one watched connection tells of
    its end.
    """

    def __init__(
        self, context: zmq.Context[Any], endpoint: Endpoint, keys: CurveKeys | None
    ) -> None:
        self._sequences = [0, 0]
        self._sockets: list[zmq.Socket[bytes]] = []
        for _ in Lane:
            socket = context.socket(zmq.PUSH)
            socket.set(zmq.SNDHWM, 0)
            socket.set(zmq.TCP_KEEPALIVE, 1)
            if endpoint.public_key is not None:
                own = keys or CurveKeys.generate()
                socket.set(zmq.CURVE_SERVERKEY, endpoint.public_key)
                socket.set(zmq.CURVE_PUBLICKEY, own.public)
                socket.set(zmq.CURVE_SECRETKEY, own.secret)
            self._sockets.append(socket)
        mask = 0
        for event in _FATAL_EVENTS:
            mask |= event
        self.monitor = self._sockets[Lane.CONTROL].get_monitor_socket(mask)
        self._sockets[Lane.CONTROL].connect(endpoint.control)
        self._sockets[Lane.BULK].connect(endpoint.bulk)

    def next_sequence(self, lane: Lane) -> int:
        """Return the number of the next message on a lane."""
        return self._sequences[lane]

    def send(self, lane: Lane, frames: Sequence[Any]) -> None:
        """Queue the frames of one message; never blocks."""
        socket = self._sockets[lane]
        if len(frames) == 1:
            socket.send(frames[0], zmq.NOBLOCK)
        else:
            socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        self._sequences[lane] += 1

    def failure(self) -> str | None:
        """Return why the connection is gone, if the monitor has told so."""
        while True:
            try:
                event, _ = self.monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            reason = _FATAL_EVENTS.get(_EVENT.unpack(event)[0])
            if reason is not None:
                return reason

    def close(self, linger_ms: int) -> None:
        """Close the sockets; they flush in the background for `linger_ms`."""
        self._sockets[Lane.CONTROL].disable_monitor()
        self.monitor.close(0)
        for socket in self._sockets:
            socket.close(linger_ms)


class IncomingLink:
    """Sequence numbers of what one peer sends, per lane."""

    __slots__ = ("_expected",)

    def __init__(self) -> None:
        self._expected = [0, 0]

    def accept(self, lane: int, sequence: int) -> str | None:
        """Count a message; return what is wrong with its number, if anything."""
        expected = self._expected[lane]
        if sequence == expected:
            self._expected[lane] = expected + 1
            return None
        kind = "a gap" if sequence > expected else "a duplicate or a restart"
        return (
            f"{kind} on the {Lane(lane).name.lower()} lane; got message {sequence}; "
            f"expected {expected}"
        )
