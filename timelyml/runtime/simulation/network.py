"""The simulated network: links that deliver when the scheduler says so, or fail.

A link joins a sender and a receiver on one lane and is first in, first out. Nothing
else is promised: links wait for each other in no way, and a failing link loses a
suffix of what is under way before its receiver hears of the failure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from timelyml.errors import PeerLostError
from timelyml.exchange import (
    Codec,
    Endpoint,
    Incoming,
    Lane,
    LinkFailure,
    TransportMetrics,
    seal_message,
)

MESSAGES_PER_RECEIVE = 16


class LinkKey(NamedTuple):
    """One link: from whom to whom, and on which lane."""

    sender: int
    receiver: int
    lane: Lane


class Frame(NamedTuple):
    """A message under way: encoded, or as it is where no codec is given."""

    body: Any
    buffers: list[Any] | None
    size_bytes: int


OnSend = Callable[[int, int, object, int], None]
"""Told of every message sent: sender, receiver, message, bytes (0 if not encoded)."""


class SimNetwork:
    """All links between the peers of one cluster.

    Args:
        codec: Every message passes through it; None: by reference, which is faster.
        on_send: Hears of every message when it is sent.
    """

    def __init__(self, codec: Codec | None, on_send: OnSend | None = None) -> None:
        self.num_delivered = 0
        self._codec = codec
        self._on_send = on_send
        self._transports: dict[int, SimTransport] = {}
        self._queues: dict[LinkKey, deque[Frame | LinkFailure]] = {}
        # What is under way, in a list for a quick choice, and where it stands there.
        self._busy: list[LinkKey] = []
        self._position: dict[LinkKey, int] = {}
        self._dead: dict[tuple[int, int], bool] = {}  # whether the sender knows

    def transport(self, index: int) -> SimTransport:
        """Return the transport of a peer, made at the first call."""
        if index not in self._transports:
            self._transports[index] = SimTransport(index, self)
        return self._transports[index]

    @property
    def busy_links(self) -> list[LinkKey]:
        """The links with something under way; not to be changed."""
        return self._busy

    def head(self, link: LinkKey) -> object:
        """Return what a busy link would deliver next."""
        frame = self._queues[link][0]
        return frame if isinstance(frame, LinkFailure) else self._decode(frame)

    def send(self, sender: int, receiver: int, message: object, lane: Lane) -> int:
        """Put a message under way; return its bytes.

        Raises:
            PeerLostError: The link is dead, and the sender knows.
        """
        frame = self._encode(message)
        if self._on_send is not None:
            self._on_send(sender, receiver, message, frame.size_bytes)
        is_known = self._dead.get((sender, receiver))
        if is_known:
            raise PeerLostError(
                f"peer {receiver} is gone; got a message after its link was cut; "
                f"expected an open link; end the run",
                peer=receiver,
            )
        if is_known is None:
            self._put(LinkKey(sender, receiver, lane), frame)
        return frame.size_bytes

    def deliver(self, link: LinkKey) -> None:
        """Move the oldest message of a busy link to its receiver."""
        queue = self._queues[link]
        frame = queue.popleft()
        if not queue:
            self._not_busy(link)
        self.num_delivered += 1
        receiver = self._transports[link.receiver]
        if isinstance(frame, LinkFailure):
            for lane in Lane:  # nothing of this peer follows its failure
                self._clear(LinkKey(link.sender, link.receiver, lane))
            receiver.put(Incoming(link.sender, frame), Lane.CONTROL, 0)
        else:
            message = self._decode(frame)
            receiver.put(Incoming(link.sender, message), link.lane, frame.size_bytes)

    def cut(
        self,
        sender: int,
        receiver: int,
        reason: str,
        *,
        keep: Callable[[int], int],
        is_known: bool,
    ) -> None:
        """Let a link fail.

        Args:
            sender: Whose messages are lost from now on.
            receiver: Who hears of the failure, after what is kept.
            reason: As in the `LinkFailure`.
            keep: How many of that many messages under way still arrive, per lane.
            is_known: Whether the sender's later sends raise; else they are lost.
        """
        if (sender, receiver) in self._dead:
            return
        self._dead[sender, receiver] = is_known
        for lane in Lane:
            link = LinkKey(sender, receiver, lane)
            queue = self._queues.get(link)
            if queue:
                for _ in range(len(queue) - keep(len(queue))):
                    queue.pop()
                if not queue:
                    self._not_busy(link)
        self._put(LinkKey(sender, receiver, Lane.CONTROL), LinkFailure(reason))

    def replace(self, index: int) -> SimTransport:
        """Return a fresh transport for a peer that starts anew, without links."""
        fresh = self._transports[index] = SimTransport(index, self)
        for peer in self._transports:
            if peer != index:
                self._dead[index, peer] = self._dead[peer, index] = False
                for lane in Lane:
                    self._clear(LinkKey(peer, index, lane))
        return fresh

    def _encode(self, message: object) -> Frame:
        if self._codec is None:
            seal_message(message)
            return Frame(message, None, 0)
        body, buffers = self._codec.encode(message)
        # What the wire does: buffers leave the sender's memory.
        copied = [bytes(memoryview(buffer)) for buffer in buffers]
        return Frame(body, copied, len(body) + sum(map(len, copied)))

    def _decode(self, frame: Frame) -> object:
        if self._codec is None or frame.buffers is None:
            return frame.body
        message: object = self._codec.decode(frame.body, frame.buffers)
        return message

    def _put(self, link: LinkKey, frame: Frame | LinkFailure) -> None:
        queue = self._queues.get(link)
        if queue is None:
            queue = self._queues[link] = deque()
        if not queue:
            self._position[link] = len(self._busy)
            self._busy.append(link)
        queue.append(frame)

    def _not_busy(self, link: LinkKey) -> None:
        position = self._position.pop(link)
        last = self._busy.pop()
        if last != link:
            self._busy[position] = last
            self._position[last] = position

    def _clear(self, link: LinkKey) -> None:
        queue = self._queues.get(link)
        if queue:
            queue.clear()
            self._not_busy(link)


class SimTransport:
    """One peer's way to all others, as `Transport` demands."""

    def __init__(self, index: int, network: SimNetwork) -> None:
        self.index = index
        self.metrics = TransportMetrics()
        self.is_awake = False  # `wake` was called since the last `receive`
        self.connected: dict[int, Endpoint] = {}
        self._network = network
        self._inbox: deque[Incoming] = deque()

    @property
    def has_mail(self) -> bool:
        """Whether `receive` would return anything."""
        return bool(self._inbox)

    def send(self, peer: int, message: object, lane: Lane = Lane.CONTROL) -> None:
        """Put a message under way.

        Raises:
            PeerLostError: The link is known to be dead.
        """
        size = self._network.send(self.index, peer, message, lane)
        self.metrics.messages_sent[lane] += 1
        self.metrics.bytes_sent[lane] += size

    def shared_memory(self, size_bytes: int) -> None:
        """Return none: simulated peers see all memory of the process."""

    def put(self, incoming: Incoming, lane: Lane, size_bytes: int) -> None:
        """Take what the network delivers."""
        self.metrics.messages_received[lane] += 1
        self.metrics.bytes_received[lane] += size_bytes
        self._inbox.append(incoming)

    def receive(self) -> list[Incoming]:
        """Return what was delivered, a bounded number, in order of delivery."""
        self.is_awake = False
        count = min(len(self._inbox), MESSAGES_PER_RECEIVE)
        return [self._inbox.popleft() for _ in range(count)]

    def poll(self) -> bool:
        """Whether a message was delivered, or `wake` was called."""
        return bool(self._inbox) or self.is_awake

    def wait(self, timeout_s: float) -> None:
        """Return at once: the scheduler does the waiting."""

    def wake(self) -> None:
        """Ask for another step."""
        self.is_awake = True

    def connect(
        self, peer: int, endpoint: Endpoint, *, is_watched: bool = False
    ) -> None:
        """Note where a peer listens; simulated peers need no addresses."""
        del is_watched
        self.connected[peer] = endpoint

    def close(self) -> None:
        """Forget what was not received."""
        self._inbox.clear()
