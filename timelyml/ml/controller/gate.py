"""The gate: lets clients of other programs in, over ZeroMQ.

Who has the address file has the key in it, so it is readable by its user only. A client
whose link breaks, because it ended or was killed, is forgotten with all that is its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timelyml.errors import PeerLostError
from timelyml.exchange import (
    CONTROLLER,
    Codec,
    Endpoint,
    Lane,
    LinkFailure,
    ZmqTransport,
)
from timelyml.ml.controller.messages import ANSWERS, NEWS, REQUESTS, Fetched
from timelyml.ml.controller.service import ControllerService
from timelyml.runtime.boot import endpoint_from_map, endpoint_to_map
from timelyml.runtime.scratch import ScratchDirectory
from timelyml.runtime.shipping import dumps

TOKEN_BYTES = 16
WAIT_S = 0.5


@dataclass(frozen=True, slots=True)
class Join:
    """A client is there, and listens here."""

    endpoint: Endpoint
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Joined:
    """The client is admitted under this number."""

    client: int


MESSAGES: tuple[type, ...] = (Join, Joined, *REQUESTS, *ANSWERS, *NEWS)
"""What the codec between clients and gate encodes; in this order on both sides."""


@dataclass(frozen=True, slots=True)
class GateAddress:
    """All that a client needs to reach a gate, its key included."""

    endpoint: Endpoint
    token: bytes
    bind: str

    def write(self, path: Path) -> None:
        """Write it to a file that only this user can read."""
        values = {
            "endpoint": endpoint_to_map(self.endpoint),
            "token": self.token.hex(),
            "bind": self.bind,
        }
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(values, file)

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
    """

    def __init__(self, service: ControllerService) -> None:
        self._service = service
        self._scratch = ScratchDirectory()
        bind = f"ipc://{self._scratch.path}"
        token = secrets.token_bytes(TOKEN_BYTES)
        self._transport = ZmqTransport(
            CONTROLLER, codec=client_codec(), token=token, bind=bind
        )
        self.address = GateAddress(self._transport.endpoint, token, bind)
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
        elif isinstance(message, Join):
            self._transport.connect(peer, message.endpoint)
            client = self._service.connect(
                lambda body: self._say(peer, body), message.weight
            )
            self._clients[peer] = client
            self._say(peer, Joined(client))
        elif client is not None:
            self._service.submit(client, message)

    def _say(self, peer: int, message: Any) -> None:
        self._outbox.append((peer, message))
        self._transport.wake()

    def _send_all(self) -> None:
        while self._outbox:
            peer, message = self._outbox.popleft()
            lane = Lane.BULK if isinstance(message, Fetched) else Lane.CONTROL
            with contextlib.suppress(PeerLostError):  # it is told apart, as a failure
                self._transport.send(peer, message, lane)
