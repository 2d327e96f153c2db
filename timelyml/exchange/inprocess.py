"""The transport between workers in one process: by reference, through queues."""

from __future__ import annotations

import threading
from collections import deque

from timelyml.errors import PeerLostError
from timelyml.exchange.sealing import seal_message
from timelyml.exchange.transport import Endpoint, Incoming, Lane, TransportMetrics

_MESSAGES_PER_RECEIVE = 256


class InProcessHub:
    """The place where the transports of one process find each other."""

    def __init__(self) -> None:
        self._transports: dict[int, InProcessTransport] = {}
        self._lock = threading.Lock()

    def transport(self, index: int) -> InProcessTransport:
        """Return the transport of `index`, made at the first call."""
        with self._lock:
            found = self._transports.get(index)
            if found is None:
                found = self._transports[index] = InProcessTransport(index, self)
            return found


class InProcessTransport:
    """One peer on a hub; `send` and `wake` may be called from any thread."""

    def __init__(self, index: int, hub: InProcessHub) -> None:
        self.index = index
        self.metrics = TransportMetrics()
        self.is_closed = False
        self._hub = hub
        self._queues: tuple[deque[Incoming], deque[Incoming]] = (deque(), deque())
        self._awake = threading.Event()
        self.stand_in: InProcessTransport | None = None  # that waits in its place

    def connect(
        self, peer: int, endpoint: Endpoint, *, is_watched: bool = False
    ) -> None:
        """Do nothing: the hub knows every peer."""

    def send(self, peer: int, message: object, lane: Lane = Lane.CONTROL) -> None:
        """Append to the peer's queue; the payloads inside become read-only."""
        target = self._hub.transport(peer)
        if target.is_closed:
            raise PeerLostError(
                f"peer {peer} is gone; got a message after it closed; expected an open "
                f"transport; end the run",
                peer=peer,
            )
        seal_message(message)
        self.metrics.messages_sent[lane] += 1
        target.put(Incoming(self.index, message), lane)

    def put(self, incoming: Incoming, lane: Lane) -> None:
        """Queue a message for this peer and wake it."""
        self._queues[lane].append(incoming)  # atomic, so senders need no lock
        self._awake.set()

    def shared_memory(self, size_bytes: int) -> None:
        """Return none: peers see all memory of the process."""

    def receive(self) -> list[Incoming]:
        """Return what has arrived, at most 256 messages, control before bulk."""
        arrived: list[Incoming] = []
        for lane, queue in enumerate(self._queues):
            count = min(len(queue), _MESSAGES_PER_RECEIVE - len(arrived))
            if count:
                arrived += [queue.popleft() for _ in range(count)]
                self.metrics.messages_received[lane] += count
        return arrived

    def poll(self) -> bool:
        """Whether a message is there, or `wake` was called since the last `wait`."""
        return bool(self._queues[0] or self._queues[1]) or self._awake.is_set()

    def wait(self, timeout_s: float) -> None:
        """Sleep until a message or `wake`, at most `timeout_s` seconds."""
        if timeout_s > 0 and not (self._queues[0] or self._queues[1]):
            self._awake.wait(min(timeout_s, threading.TIMEOUT_MAX))
        self._awake.clear()

    def wake(self) -> None:
        """End the present or the next `wait`."""
        self._awake.set()
        if self.stand_in is not None:
            self.stand_in.wake()

    def close(self) -> None:
        """Refuse further messages and forget those not received."""
        self.is_closed = True
        for queue in self._queues:
            queue.clear()
