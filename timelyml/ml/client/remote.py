"""`ml.connect`: a client of a cluster that another program serves."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from timelyml.errors import ConfigError, PeerError, PeerLostError
from timelyml.exchange import CONTROLLER, Lane, LinkFailure, ZmqTransport
from timelyml.ml.client.client import Client
from timelyml.ml.client.link import checked_weight
from timelyml.ml.controller.gate import GateAddress, Join, Joined, client_codec
from timelyml.ml.controller.messages import Closed
from timelyml.runtime.failure import pack_error

WAIT_S = 0.5
JOIN_TIMEOUT_S = 20.0


class RemoteLink:
    """A way to the gate of another program; a thread of its own drives it."""

    def __init__(self, path: Path, weight: int = 1) -> None:
        self._path = path
        self._weight = weight
        self._address = _read(path)
        self._outbox: deque[Any] = deque()
        self._joined = threading.Event()
        self._is_closing = threading.Event()
        self._client = 0
        self._receive: Callable[[Any], None] = lambda _: None
        self._transport = ZmqTransport(
            1 + secrets.randbelow((1 << 31) - 2),  # unlike that of any other client
            codec=client_codec(),
            token=self._address.token,
            bind=self._address.bind,
        )
        self._transport.connect(CONTROLLER, self._address.endpoint)
        self._thread = threading.Thread(
            target=self._serve, name="timelyml-client", daemon=True
        )

    def connect(self, receive: Callable[[Any], None]) -> int:
        """Join; return the client's number.

        Raises:
            PeerError: Nobody serves there any more.
        """
        self._receive = receive
        self._thread.start()
        self.send(Join(self._transport.endpoint, self._weight))
        if not self._joined.wait(JOIN_TIMEOUT_S) or not self._client:
            self.close()
            raise PeerError(
                f"nobody answers at {str(self._path)!r}; got no answer in "
                f"{JOIN_TIMEOUT_S} s; expected a program that serves there; start one"
            )
        return self._client

    def send(self, message: Any) -> None:
        """Queue a message."""
        self._outbox.append(message)
        self._transport.wake()

    def another(self, weight: int) -> RemoteLink:
        """Return a way for another client."""
        return RemoteLink(self._path, weight)

    def close(self) -> None:
        """Leave; whoever waits for something hears of it."""
        self._is_closing.set()
        self._transport.wake()
        self._thread.join()

    def _serve(self) -> None:
        error = PeerError("the client was closed")
        try:
            while not self._is_closing.is_set():
                for _, message in self._transport.receive():
                    if isinstance(message, LinkFailure):
                        error = PeerError(
                            f"the server of {str(self._path)!r} is gone; got "
                            f"{message.reason}; expected it to outlive its clients; "
                            "connect to another",
                            reason=message.reason,
                        )
                        return
                    self._take(message)
                self._send_all()
                self._transport.wait(WAIT_S)
            self._send_all()
        finally:
            self._receive(Closed(pack_error(error)))
            self._joined.set()
            self._transport.close()

    def _take(self, message: Any) -> None:
        if isinstance(message, Joined):
            self._client = message.client
            self._joined.set()
        else:
            self._receive(message)

    def _send_all(self) -> None:
        while self._outbox:
            message = self._outbox.popleft()
            try:
                # All on one lane: a call must not overtake what it takes.
                self._transport.send(CONTROLLER, message, Lane.CONTROL)
            except PeerLostError:  # the failure of the link is about to be received
                return


def connect(address: str | Path, *, weight: int = 1) -> Client:
    """Connect to a cluster that `ml.serve` serves, and return a client of it.

    Args:
        address: The file that the server wrote.
        weight: The client's share of device time, under the policy "share".

    Raises:
        ConfigError: There is no such file, or it is none of a server; or the weight is
            no positive whole number.
        PeerError: Nobody serves there any more.
    """
    return Client(RemoteLink(Path(address), checked_weight(weight)))


def _read(path: Path) -> GateAddress:
    try:
        return GateAddress.read(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"cannot connect; got {str(path)!r} ({type(error).__name__}: {error}); "
            f"expected the file that a server wrote; start one with ml.serve",
            option="address",
        ) from error
