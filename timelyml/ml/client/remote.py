"""`ml.connect`: a client of a cluster that another program serves."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from timelyml.errors import ConfigError, PeerError, PeerLostError, TimelyError
from timelyml.exchange import CONTROLLER, AccessKey, Lane, LinkFailure
from timelyml.ml.client.client import Client
from timelyml.ml.controller.clients import ClientOptions
from timelyml.ml.controller.gate import GateAddress, Join, Joined, JoinRefused
from timelyml.ml.controller.messages import Closed
from timelyml.runtime.failure import pack_error, unpack_error
from timelyml.runtime.options import check_seconds

WAIT_S = 0.5
JOIN_TIMEOUT_S = 10.0


def no_answer(where: str, waited_s: float = JOIN_TIMEOUT_S) -> PeerError:
    """Return the error of who wants in where nobody serves."""
    return PeerError(
        f"nobody answers at {where!r}; got no answer in {waited_s:g} s; expected "
        f"a program that serves there; start one, or correct the address"
    )


def shut_out(where: str, reason: str) -> PeerError:
    """Return the error of who has not the key of a server."""
    return PeerError(
        f"{where!r} lets nobody in with this key; got {reason}; expected the key of the "
        f"server that listens there; ask who started it",
        reason=reason,
    )


class RemoteLink:
    """A way to the gate of another program; a thread of its own drives it.

    Args:
        where: The file or the address, for people.
        address: How to reach it.
        options: The client's share of device time, and its priority.
        heartbeat_timeout_s: Silence after which the server is given up.
    """

    def __init__(
        self,
        where: str,
        address: GateAddress,
        options: ClientOptions,
        heartbeat_timeout_s: float = JOIN_TIMEOUT_S,
    ) -> None:
        self._where = where
        self._address = address
        self._options = options
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._outbox: deque[Any] = deque()
        self._answered = threading.Event()
        self._is_closing = threading.Event()
        self._joined: Joined | None = None
        self._error: TimelyError = no_answer(where, heartbeat_timeout_s)
        self._receive: Callable[[Any], None] = lambda _: None
        self._transport = address.transport(random_peer(), heartbeat_timeout_s)
        self._thread = threading.Thread(
            target=self._serve, name="timelyml-client", daemon=True
        )

    @property
    def shares_process(self) -> bool:
        """No: the controller is elsewhere."""
        return False

    def connect(self, receive: Callable[[Any], None]) -> tuple[int, int]:
        """Join; return the client's number, and how many calls it may have at once.

        Raises:
            AdmissionError: The server has as many clients as it takes.
            PeerError: Nobody serves there, or not to who has this key.
        """
        self._receive = receive
        self._thread.start()
        options = self._options
        self.send(Join(self._transport.endpoint, options.weight, options.priority))
        self._answered.wait(self._heartbeat_timeout_s)
        if self._joined is None:
            self.close()
            raise self._error
        return self._joined.client, self._joined.max_calls

    def send(self, message: Any) -> None:
        """Queue a message."""
        self._outbox.append(message)
        self._transport.wake()

    def another(self, options: ClientOptions) -> RemoteLink:
        """Return a way for another client."""
        return RemoteLink(
            self._where, self._address, options, self._heartbeat_timeout_s
        )

    def close(self) -> None:
        """Leave; whoever waits for something hears of it."""
        self._is_closing.set()
        self._transport.wake()
        self._thread.join()

    def _serve(self) -> None:
        error: TimelyError = PeerError("the client was closed")
        try:
            while not self._is_closing.is_set():
                for _, message in self._transport.receive():
                    if isinstance(message, LinkFailure):
                        error = self._error = self._lost(message.reason)
                        return
                    self._take(message)
                self._send_all()
                self._transport.wait(WAIT_S)
            self._send_all()
        finally:
            self._receive(Closed(pack_error(error)))
            self._answered.set()
            self._transport.close()

    def _take(self, message: Any) -> None:
        if isinstance(message, Joined):
            self._joined = message
            self._answered.set()
        elif isinstance(message, JoinRefused):
            self._error = unpack_error(message.error)
            self._answered.set()
        else:
            self._receive(message)

    def _lost(self, reason: str) -> PeerError:
        if self._joined is None:
            return shut_out(self._where, reason)
        return PeerError(
            f"the server of {self._where!r} is gone; got {reason}; expected it to "
            "outlive its clients; connect to another",
            reason=reason,
        )

    def _send_all(self) -> None:
        while self._outbox:
            message = self._outbox.popleft()
            try:
                # All on one lane: a call must not overtake what it takes.
                self._transport.send(CONTROLLER, message, Lane.CONTROL)
            except PeerLostError:  # the failure of the link is about to be received
                return


def connect(
    address: str | Path,
    *,
    key: str | Path | None = None,
    weight: int = 1,
    priority: int = 0,
    heartbeat_timeout_s: float = JOIN_TIMEOUT_S,
) -> Client:
    """Connect to a cluster that `ml.serve` serves, and return a client of it.

    Args:
        address: The file that the server wrote; or, from other machines too,
            `tcp://host:port`, where it listens. Server and client connect to each other.
        key: With `tcp://`: the key that the server wrote, or the path of its file.
        weight: The client's share of device time, under the policy "share".
        priority: Larger ones go first, under the policy "priority".
        heartbeat_timeout_s: How long to wait for its answer; and the silence after
            which a server over tcp is given up later.

    Raises:
        ConfigError: There is no such file, or it is none of a server; there is no key,
            or it is none; weight or priority are no whole numbers, or the time is none.
        AdmissionError: The server has as many clients as it takes.
        PeerError: Nobody serves there, or not to who has this key.
    """
    check_seconds("heartbeat_timeout_s", heartbeat_timeout_s)
    options, gate = ClientOptions(weight, priority), gate_address(address, key)
    return Client(RemoteLink(str(address), gate, options, heartbeat_timeout_s))


def random_peer() -> int:
    """Return the number of a peer of a gate, unlike that of any other."""
    return 1 + secrets.randbelow((1 << 31) - 2)


def gate_address(address: str | Path, key: str | Path | None) -> GateAddress:
    """Return how to reach a gate.

    Raises:
        ConfigError: As `connect`.
    """
    if str(address).startswith("tcp://"):
        if key is None:
            raise ConfigError(
                f"a server at {str(address)!r} lets nobody in without its key; got none; "
                f"expected key=, of the file that the server wrote; pass it",
                option="key",
            )
        return GateAddress.remote(str(address), AccessKey.of(key))
    if key is not None:
        raise ConfigError(
            f"a file of a server has its key in it; got {str(address)!r} and another "
            f"key; expected a key with tcp://HOST:PORT only; leave it out",
            option="key",
        )
    return _read(Path(address))


def _read(path: Path) -> GateAddress:
    try:
        return GateAddress.read(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"cannot connect; got {str(path)!r} ({type(error).__name__}: {error}); "
            f"expected the file that a server wrote; start one with ml.serve",
            option="address",
        ) from error
