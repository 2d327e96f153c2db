"""The transport between processes: ZeroMQ, one socket per peer and lane.

Each transport binds one PULL socket per lane and opens one PUSH socket per peer and
lane, so that small control messages never queue behind bulk. Nothing blocks and no
high-water mark drops: credit bounds what is under way. On one host, small messages go
past ZeroMQ's threads, as datagrams, and large arrays are lent in shared memory.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket as sockets
import time
from typing import Any

import zmq

from timelyml.errors import ConfigError, PeerLostError, WireError
from timelyml.exchange.access import addresses_of, advertised
from timelyml.exchange.codec import Codec
from timelyml.exchange.frames import TOKEN_BYTES, Kind, pack_frames
from timelyml.exchange.lending import Lending
from timelyml.exchange.security import CurveKeys
from timelyml.exchange.shared_pool import POOL_BYTES
from timelyml.exchange.transport import (
    CONTROLLER,
    Endpoint,
    Incoming,
    Lane,
    LinkFailure,
    TransportMetrics,
)
from timelyml.exchange.zmq_inbox import CLOSED, Inbox
from timelyml.exchange.zmq_link import OutgoingLink

GRACE_S = 0.5
"""How long after a connection broke its peer may still be heard.

The other connection between the two may bring a large message for so long.
"""

SILENCE_S = 10.0
"""After so long a peer that does not answer is given up, unless another is stated."""

_MESSAGE = int(Kind.MESSAGE)
_LENT = int(Kind.LENT)
_DATAGRAMS = len(Lane)  # among the lanes, as what to look at
_CHECK_S = 0.25  # between looks at connections while nothing comes
_SETTLE_S = 0.1  # in which peers that close at the same time hear of each other
_RECEIVES_PER_CHECK = 64  # of connections, while messages keep coming
# Datagrams of workers need nobody else's core to come, unlike messages of ZeroMQ, whose
# threads need one, or of the controller. Where others want the core too, to yield it
# before the next look may take milliseconds.
_LOOKS = 256


class ZmqTransport:
    """One peer of a cluster of processes; owned by the thread that drives it.

    Args:
        index: This peer's index.
        codec: Encodes and decodes messages.
        token: 16 random bytes that every peer of the cluster knows.
        bind: `ipc://<directory>`, private to this user, or `tcp://<address>:<port>`;
            of a port that is no `*`, the next one is taken too, for bulk.
        keys: This peer's CURVE keys; tcp on loopback makes its own if None.
        advertise: The host that peers connect to, if `bind` names all interfaces.
        max_frame_bytes: A longer frame ends the connection that sent it.
        linger_s: How long `close` waits for what was sent.
        pool_bytes: How much of large arrays peers on the same host are lent at most,
            in shared memory; what is beyond goes by ZeroMQ.
        silence_s: Links over tcp, and others that are watched, count as broken once
            their peer showed no sign of life for so long.
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
        silence_s: float = SILENCE_S,
        pool_bytes: int = POOL_BYTES,
    ) -> None:
        if len(token) != TOKEN_BYTES:
            raise ConfigError(
                f"a transport has no valid token; got {len(token)} bytes; expected "
                f"{TOKEN_BYTES}; make it with secrets.token_bytes",
                size_bytes=len(token),
            )
        addresses, keys = addresses_of(index, bind, keys)
        self.index = index
        self.metrics = TransportMetrics()
        self._num_sent = self.metrics.messages_sent
        self._bytes_sent = self.metrics.bytes_sent
        self.is_closed = False
        self._codec = codec
        self._token = token
        self._keys = keys
        self._linger_ms = math.ceil(linger_s * 1000)
        self._silence_s = silence_s
        self._max_frame_bytes = max_frame_bytes
        self._links: dict[int, OutgoingLink] = {}
        self._lost: dict[int, str] = {}
        self._leaving: list[OutgoingLink] = []  # to peers that are to hear of it last
        self._deadlines: dict[int, float] = {}  # of broken links, until reported
        self._receives = 0
        # One for both ways: each has a thread, which takes a core from its worker.
        self._context: zmq.Context[Any] = zmq.Context()
        self._lending = Lending(index, token, self._tell, pool_bytes)
        self._inbox = Inbox(self._context, codec, token, self.metrics, max_frame_bytes)
        self._wake_out, self._wake_in = _signal_pair()
        self._wake_fd = self._wake_in.fileno()
        try:
            control, bulk = (self._inbox.bind(address, keys) for address in addresses)
        except BaseException:
            self.close()
            raise
        self.endpoint = Endpoint(
            control=advertised(control, advertise),
            bulk=advertised(bulk, advertise),
            public_key=None if keys is None else keys.public,
        )
        # Monitors are looked at now and then instead: they would take 0.5 us each.
        self._poller = zmq.Poller()
        self._lanes: dict[Any, int] = {}
        datagrams = self._inbox.bind_datagrams(control)
        self._lending.views = self._inbox.views
        if datagrams is not None:
            self._lanes[datagrams] = _DATAGRAMS
        self._lanes |= {pull: lane for lane, pull in enumerate(self._inbox.sockets)}
        for source in (*self._lanes, self._wake_fd):
            self._poller.register(source, zmq.POLLIN)
        self._ready: list[tuple[Any, int]] = []  # what `poll` or `wait` saw
        self._is_calm = False  # nothing was there at the look before that
        self._num_looks = 0  # before others get the core

    def connect(
        self, peer: int, endpoint: Endpoint, *, is_watched: bool = False
    ) -> None:
        """Open the link to a peer; it may start to listen later."""
        if peer in self._links or peer in self._lost:
            raise ConfigError(
                f"peer {peer} was connected before; got it again; expected one link "
                f"per peer and transport; give every peer its own index",
                peer=peer,
            )
        self._links[peer] = OutgoingLink(
            self._context,
            endpoint,
            self._keys,
            silence_s=self._silence_s,
            is_watched=is_watched,
        )

    def send(self, peer: int, message: object, lane: Lane = Lane.CONTROL) -> None:
        """Encode a message and queue its frames; never blocks.

        Arrays inside must not change any more: they are sent from where they are, or
        lent from a copy in shared memory.

        Raises:
            PeerLostError: There is no link to the peer, or it is dead.
            PayloadError: The message cannot be encoded.
            WireError: Its body or a buffer is larger than a frame may be.
        """
        link = self._links.get(peer)
        if link is None:
            raise self._unreachable(peer)
        body, buffers = self._codec.encode(message)
        kind, size = _MESSAGE, 0
        if buffers:
            sizes = list(map(len, buffers))
            size = sum(sizes)
            self._check_size(max(len(body), *sizes))
            table = None
            if link.is_near:
                table = self._lending.lend(peer, link.control, buffers)
            if table is not None:
                kind, body, buffers = _LENT, table + body, []
                self.metrics.bytes_lent += size
        number = (lane, kind, self.index, link.sequences[lane])
        frames = pack_frames(number, self._token, body, buffers)
        self._check_size(len(frames[0]))
        if not link.send(lane, frames) or peer == CONTROLLER:
            self._num_looks = 0
        self._num_sent[lane] += 1
        self._bytes_sent[lane] += size + len(frames[0])

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._max_frame_bytes:
            raise WireError(
                f"a message is too large; got a frame of {size_bytes} bytes; expected "
                f"at most {self._max_frame_bytes}; send smaller batches",
                size_bytes=size_bytes,
                reason="size",
            )

    def _say(self, link: OutgoingLink, lane: int, kind: Kind, body: bytes) -> None:
        """Tell the peer's transport something."""
        number = (lane, kind, self.index, link.sequences[lane])
        link.send(Lane(lane), pack_frames(number, self._token, body, []))

    def _tell(self, peer: int, kind: Kind, body: bytes) -> None:
        link = self._links.get(peer)
        if link is not None:
            self._say(link, Lane.CONTROL, kind, body)

    def shared_memory(self, size_bytes: int) -> Any:
        """Return memory that peers on this host are lent without a copy, if any is."""
        return self._lending.empty(size_bytes)

    def _unreachable(self, peer: int) -> PeerLostError:
        reason = self._lost.get(peer, "no link to it was opened")
        return PeerLostError(
            f"peer {peer} cannot be reached; got a message for it, but {reason}; "
            f"expected an open link; end the run, or connect first",
            peer=peer,
            reason=reason,
        )

    def receive(self) -> list[Incoming]:
        """Return what has arrived, a bounded number, control before bulk.

        The failure of a link follows the last that was heard from its peer.
        """
        arrived: list[Incoming] = []
        # One poll of both lanes takes 2 us; a failed `recv` alone takes 5.
        ready = self._ready or self._poller.poll(0)
        self._ready = []
        if self._leaving:
            self._part()
        for source, _ in ready:
            lane = self._lanes.get(source)
            if lane == _DATAGRAMS:
                self._inbox.take_datagrams(arrived, is_calm=self._is_calm)
                is_direct = CONTROLLER not in self._inbox.heard
                self._num_looks = _LOOKS if is_direct else 0
            elif lane is not None:
                self._inbox.take(lane, arrived, is_calm=self._is_calm)
                self._num_looks = 0
        self._is_calm = not ready
        self._receives += 1
        for notice in self._inbox.notices:
            self._heed(*notice)
        self._inbox.notices.clear()
        self._lending.return_loans(at_once=False)
        if self._deadlines or self._receives >= _RECEIVES_PER_CHECK:
            self._check_links()
        self._inbox.heard.clear()
        if self._inbox.wrong:
            for peer, reason in self._inbox.wrong.items():
                self._lose(peer, reason)
                arrived.append(Incoming(peer, LinkFailure(reason)))
            self._inbox.wrong.clear()
        return arrived

    def _heed(self, peer: int, kind: int, body: Any) -> None:
        """Act on what the transport of a peer had to tell."""
        try:
            if not self._lending.heed(peer, kind, body):
                self.metrics.frames_refused["memory"] += 1
        except WireError as error:
            self._inbox.fail(peer, str(error))

    def _check_links(self) -> None:
        """Give up links that broke a while ago and have been silent since."""
        self._receives = 0
        self._lending.rest()
        now = time.monotonic()
        for peer, link in self._links.items():
            reason = link.broken()
            if reason is None:
                continue
            if peer not in self._deadlines or peer in self._inbox.heard:
                self._deadlines[peer] = now + GRACE_S
            elif now >= self._deadlines[peer]:
                self._inbox.wrong.setdefault(peer, reason)

    def _lose(self, peer: int, reason: str) -> None:
        self._lost[peer] = reason
        self._deadlines.pop(peer, None)
        self._inbox.refuse(peer)
        self._lending.lose(peer)
        link = self._links.pop(peer, None)
        if link is None:
            return
        if reason == CLOSED or link.broken() is not None:
            link.close(0)
        else:  # it lives, and must not wait for this one in vain
            self._leaving.append(link)

    def _part(self) -> None:
        """Tell peers whose links were given up, after the owner could tell why."""
        for link in self._leaving:
            self._bid_farewell(link)
            link.close(self._linger_ms)
        self._leaving.clear()

    def _bid_farewell(self, link: OutgoingLink) -> None:
        for lane in Lane:
            self._say(link, lane, Kind.FAREWELL, b"")

    def poll(self) -> bool:
        """Whether a message is there, or somebody called `wake` since the last look."""
        if self._ready or self._look(0):
            return True
        if self._num_looks:
            self._num_looks -= 1
        else:
            os.sched_yield()
        return False

    def wait(self, timeout_s: float) -> None:
        """Sleep until a message or `wake`, at most `timeout_s` and a quarter second."""
        limit_s = min(self._deadlines.values(), default=math.inf) - time.monotonic()
        sleep_s = min(timeout_s, limit_s, _CHECK_S)
        if sleep_s <= 0 or self._ready:
            return
        if not self._look(math.ceil(sleep_s * 1000)):
            self._receives = _RECEIVES_PER_CHECK  # idle: time to look at connections

    def _look(self, timeout_ms: int) -> bool:
        """Note which lanes have something, for `receive`; True for a wake as well."""
        self._ready = ready = self._poller.poll(timeout_ms)
        if not ready:
            self._is_calm = True
            return False
        if ready[-1][0] == self._wake_fd:
            ready.pop()
            with contextlib.suppress(BlockingIOError):
                self._wake_in.recv(4096)
        return True

    def wake(self) -> None:
        """End the present or the next `wait`; from any thread, also after `close`."""
        with contextlib.suppress(OSError):  # full: a wake is pending; or closed
            self._wake_out.send(b"\0")

    def close(self) -> None:
        """Flush what was sent, at most `linger_s` long, and close every socket.

        Links to peers that close too, as they do at the end of a cluster, are given
        up at once: ZeroMQ would wait for them to come back.
        """
        if self.is_closed:
            return
        self.is_closed = True
        self._part()
        for link in self._links.values():
            self._bid_farewell(link)
        deadline = time.monotonic() + min(_SETTLE_S, self._linger_ms / 1000)
        while self._links and (remaining := deadline - time.monotonic()) > 0:
            self.wait(remaining)
            self.receive()
            for peer, link in list(self._links.items()):
                if reason := link.broken():
                    self._lose(peer, reason)
        for link in self._links.values():
            link.close(self._linger_ms)
        self._inbox.close()
        self._lending.close()
        self._context.term()  # waits for what is being flushed
        self._wake_in.close()
        self._wake_out.close()


def _signal_pair() -> tuple[sockets.socket, sockets.socket]:
    out, back = sockets.socketpair()
    out.setblocking(False)
    back.setblocking(False)
    return out, back
