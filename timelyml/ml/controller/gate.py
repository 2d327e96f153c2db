"""The gate: lets clients of other programs in, over ZeroMQ.

On this machine by private sockets: who has the address file has the key in it, so it is
readable by its user only. From others over tcp, encrypted, to who has the server's key.
A client whose link breaks, because it ended or was killed, is forgotten with all that
is its own.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from timelyml.errors import ConfigError, InvariantError, PeerLostError, TimelyError
from timelyml.exchange import (
    CONTROLLER,
    SILENCE_S,
    AccessKey,
    Codec,
    CurveKeys,
    Endpoint,
    Lane,
    LinkFailure,
    ServerKeys,
    ZmqTransport,
    own_address_towards,
    split_tcp,
    tcp_endpoint,
    write_private,
)
from timelyml.ml.controller.messages import ANSWERS, NEWS, REQUESTS, Fetched
from timelyml.ml.controller.service import ControllerService
from timelyml.ml.controller.traced import Traced
from timelyml.runtime.boot import endpoint_from_map, endpoint_to_map
from timelyml.runtime.failure import pack_error
from timelyml.runtime.guests import Invitation
from timelyml.runtime.scratch import ScratchDirectory
from timelyml.runtime.shipping import dumps

TOKEN_BYTES = 16
WAIT_S = 0.5
PORT_TRIES = 50
FIRST_PORT, NUM_PORTS = 20000, 12000  # below those that Linux gives out itself


@dataclass(frozen=True, slots=True)
class Join:
    """A client is there, and listens here."""

    endpoint: Endpoint
    weight: int = 1
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Joined:
    """The client is admitted under this number, with so many calls at once."""

    client: int
    max_calls: int


@dataclass(frozen=True, slots=True)
class JoinRefused:
    """The client is not admitted; `error` is pickled."""

    error: bytes


@dataclass(frozen=True, slots=True)
class AskInvitation:
    """A process would be a host, and listens here for the answer."""

    endpoint: Endpoint


@dataclass(frozen=True, slots=True)
class Invited:
    """What it needs for that."""

    invitation: Invitation


MESSAGES: tuple[type, ...] = (
    Join, Joined, JoinRefused, AskInvitation, Invited, *REQUESTS, *ANSWERS, *NEWS,
)  # fmt: skip
"""What the codec between clients and gate encodes; in this order on both sides."""


@dataclass(frozen=True, slots=True)
class GateAddress:
    """All that a client needs to reach a gate, its key included.

    `bind` says where the client itself listens.
    """

    endpoint: Endpoint
    token: bytes = field(repr=False)
    bind: str

    @classmethod
    def remote(cls, address: str, key: AccessKey) -> GateAddress:
        """Return what a client needs to reach `tcp://host:port`.

        Raises:
            ConfigError: It is no such address, or its host is not known.
        """
        host, _ = split_tcp(address)
        endpoint = tcp_endpoint(address, key.public)
        return cls(endpoint, key.token, f"tcp://{own_address_towards(host)}:*")

    def transport(self, index: int, silence_s: float = SILENCE_S) -> ZmqTransport:
        """Return a transport with a way to the gate, given up if it is silent so long."""
        is_remote = self.bind.startswith("tcp://")
        transport = ZmqTransport(
            index,
            codec=client_codec(),
            token=self.token,
            bind=self.bind,
            keys=CurveKeys.generate() if is_remote else None,
            silence_s=silence_s,
        )
        transport.connect(CONTROLLER, self.endpoint)
        return transport

    def write(self, path: Path) -> None:
        """Write it to a file that only this user can read."""
        values = {
            "endpoint": endpoint_to_map(self.endpoint),
            "token": self.token.hex(),
            "bind": self.bind,
        }
        write_private(path, json.dumps(values))

    @classmethod
    def read(cls, path: Path) -> GateAddress:
        """Read what `write` wrote."""
        values = json.loads(path.read_text())
        return cls(
            endpoint_from_map(values["endpoint"]),
            bytes.fromhex(values["token"]),
            values["bind"],
        )


def client_codec() -> Codec:
    """Return a codec for messages between a gate and clients that know its key."""
    return Codec(MESSAGES, allow_pickle=True, dumps=dumps)


class ClientGate:
    """Serves clients of other programs, in a thread of its own.

    Args:
        service: Whom they are clients of.
        invite: Returns what a process needs to be a host; from any thread.
        listen: `tcp://host:port` for clients of other machines; `*` for a free port;
            private sockets of this machine if None.
        keys: What they have to know, over tcp.
        heartbeat_timeout_s: Silence after which one over tcp is given up.

    Raises:
        ConfigError: The address cannot be listened at.
    """

    def __init__(
        self,
        service: ControllerService,
        invite: Callable[[], Invitation],
        *,
        listen: str | None = None,
        keys: ServerKeys | None = None,
        heartbeat_timeout_s: float = SILENCE_S,
    ) -> None:
        self._service = service
        self._invite = invite
        self._scratch = ScratchDirectory()
        keys = keys or ServerKeys.generate()
        if listen is None:
            bind = f"ipc://{self._scratch.path}"
            self._transport = ZmqTransport(
                CONTROLLER, codec=client_codec(), token=keys.token, bind=bind
            )
        else:
            bind = ""
            self._transport = _listening(listen, keys, heartbeat_timeout_s)
        self.address = GateAddress(self._transport.endpoint, keys.token, bind)
        self._clients: dict[int, int] = {}  # numbers, by peer
        self._outbox: deque[tuple[int, Any]] = deque()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, name="timelyml-gate", daemon=True
        )
        self._thread.start()

    @property
    def num_clients(self) -> int:
        """Clients that are connected now."""
        return len(self._clients)

    def close(self) -> None:
        """Send what is to be sent, and let nobody in any more."""
        self._is_closing.set()
        self._transport.wake()
        self._thread.join()
        self._scratch.remove()

    def _serve(self) -> None:
        try:
            while not self._is_closing.is_set():
                for peer, message in self._transport.receive():
                    self._handle(peer, message)
                self._send_all()
                self._transport.wait(WAIT_S)
            self._send_all()
        finally:
            self._transport.close()

    def _handle(self, peer: int, message: object) -> None:
        client = self._clients.get(peer)
        if isinstance(message, LinkFailure):
            if client is not None:
                del self._clients[peer]
                self._service.disconnect(client)
        elif isinstance(message, AskInvitation | Join) and client is None:
            # Who says where it listens, but does not, or says so twice, gets no answer.
            with contextlib.suppress(ConfigError):
                self._transport.connect(peer, message.endpoint)
                if isinstance(message, Join):
                    self._admit(peer, message)
                else:
                    self._say(peer, Invited(self._invite()))
        elif client is not None:
            self._service.submit(client, message)

    def _admit(self, peer: int, message: Join) -> None:
        try:
            client = self._service.connect(
                lambda body: self._say(peer, body), message.weight, message.priority
            )
        except TimelyError as error:
            self._say(peer, JoinRefused(pack_error(error)))
            return
        self._clients[peer] = client
        self._say(peer, Joined(client, self._service.max_calls))

    def _say(self, peer: int, message: Any) -> None:
        self._outbox.append((peer, message))
        self._transport.wake()

    def _send_all(self) -> None:
        while self._outbox:
            peer, message = self._outbox.popleft()
            lane = Lane.BULK if isinstance(message, Fetched | Traced) else Lane.CONTROL
            with contextlib.suppress(PeerLostError):  # it is told apart, as a failure
                self._transport.send(peer, message, lane)


def _listening(listen: str, keys: ServerKeys, silence_s: float) -> ZmqTransport:
    """Return a transport that listens at an address, or at a free port of a host."""

    def at(address: str) -> ZmqTransport:
        return ZmqTransport(
            CONTROLLER,
            codec=client_codec(),
            token=keys.token,
            bind=address,
            keys=keys.curve,
            silence_s=silence_s,
        )

    host, port = split_tcp(listen)
    if port != "*":
        return at(listen)
    for tries_left in reversed(range(PORT_TRIES)):
        number = FIRST_PORT + 2 * secrets.randbelow(NUM_PORTS // 2)
        with contextlib.suppress(*([ConfigError] if tries_left else [])):
            return at(f"tcp://{host}:{number}")
    raise InvariantError("no try was the last one")
