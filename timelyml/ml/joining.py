"""The main of a process that joins a served cluster: `python -m timelyml.ml.joining`.

A fresh interpreter, whose environment has all that XLA needs before it loads. The first
line of its stdin says where to join and as what, the key included. It leaves on SIGTERM
once nothing on its island is left; a second one ends it at once.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from timelyml.errors import ConfigError, TimelyError
from timelyml.exchange import (
    CONTROLLER,
    CurveKeys,
    LinkFailure,
    ZmqTransport,
    own_address_towards,
    split_tcp,
)
from timelyml.ml.client.remote import (
    JOIN_TIMEOUT_S,
    gate_address,
    no_answer,
    random_peer,
    shut_out,
)
from timelyml.ml.controller.gate import AskInvitation, GateAddress, Invited
from timelyml.ml.hosts.service import HostService
from timelyml.ml.hosts.upkeep import SERVICE
from timelyml.runtime.boot import endpoint_from_map
from timelyml.runtime.guests import Invitation
from timelyml.runtime.launch import make_worker
from timelyml.runtime.loop import drive
from timelyml.runtime.scratch import ScratchDirectory
from timelyml.runtime.service import ServiceSpec
from timelyml.runtime.shipping import worker_codec
from timelyml.runtime.worker import Worker

EXIT_FAILED, EXIT_REFUSED = 1, 2
WAIT_S = 0.2


@dataclass(frozen=True, slots=True)
class Joining:
    """Where a process joins, and as what.

    Attributes:
        address: The file of the server, or `tcp://host:port`.
        key: With `tcp://`: the key, or the path of its file.
        island: Name of the island that it is to be a host of; empty: one of its own.
        num_hosts: Processes that form that island.
        num_devices: Virtual devices that it shows, on CPU.
        drain_s: How long it waits, when it is to leave, until nothing is left on it.
    """

    address: str
    key: str | None = field(repr=False, default=None)
    island: str = ""
    num_hosts: int = 1
    num_devices: int = 1
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        if self.num_hosts > 1 and not self.island:
            raise ConfigError(
                f"processes of one island have to name it alike; got {self.num_hosts} "
                f"hosts and no name; expected an island's name; pass --island",
                option="island",
            )


def invitation(address: GateAddress, where: str) -> Invitation:
    """Ask a server to let this process be a host.

    Raises:
        PeerError: Nobody serves there, or not to who has this key.
    """
    transport = address.transport(random_peer())
    try:
        transport.send(CONTROLLER, AskInvitation(transport.endpoint))
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while time.monotonic() < deadline:
            for _, message in transport.receive():
                if isinstance(message, Invited):
                    return message.invitation
                if isinstance(message, LinkFailure):
                    raise shut_out(where, message.reason)
            transport.wait(WAIT_S)
    finally:
        transport.close()
    raise no_answer(where)


def serve(joining: Joining) -> int:
    """Be a host until told to leave; return the exit code.

    Raises:
        TimelyError: It cannot join.
    """
    address = gate_address(joining.address, joining.key)
    invited = invitation(address, joining.address)
    scratch = ScratchDirectory()
    own = _own_address(joining.address)
    guest = {
        "island": joining.island,
        "num_hosts": joining.num_hosts,
        "num_devices": joining.num_devices,
        "address": own,
    }
    services = [_as_guest(each, guest) for each in invited.services]
    bind = invited.bind or f"tcp://{own}:*"
    transport = ZmqTransport(
        invited.worker,
        codec=worker_codec(services),
        token=bytes.fromhex(invited.token),
        bind=bind,
        keys=CurveKeys.generate() if bind.startswith("tcp://") else None,
        silence_s=invited.heartbeat_timeout_s,
    )
    controller = endpoint_from_map(invited.controller)
    transport.connect(CONTROLLER, controller, is_watched=True)
    worker = make_worker(invited.worker, transport, scratch.path, services)
    host: HostService = worker.service(SERVICE)
    leaving = _Leaving(worker, host, joining.drain_s, transport.wake)
    leaving.listen()
    print(f"joined {joining.address} as worker {invited.worker}", file=sys.stderr)  # noqa: T201
    try:
        drive(leaving, transport, leaving.is_over, time.monotonic)
    finally:
        worker.leave()
        transport.close()
        scratch.remove()
    return leaving.outcome()


class _Leaving:
    """A worker that asks to leave once a signal has come, in its own turn."""

    def __init__(
        self, worker: Worker, host: HostService, drain_s: float, wake: Any
    ) -> None:
        self._worker = worker
        self._host = host
        self._drain_s = drain_s
        self._wake = wake
        self._is_asked = threading.Event()
        self._has_told = False
        self._has_listened = False  # since its island was formed

    def listen(self) -> None:
        """Take signals; in the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.on_signal)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Leave in peace; the second time, at once."""
        del frame
        if self._is_asked.is_set():
            os._exit(128 + number)
        self._is_asked.set()
        self._wake()

    def step(self) -> bool:
        """Step the worker."""
        if self._host.is_present and not self._has_listened:
            self._has_listened = True
            self.listen()  # JAX takes SIGTERM for itself where it joins processes
        if self._is_asked.is_set() and not self._has_told:
            self._has_told = True
            self._host.leave(self._drain_s)
        return self._worker.step()

    def has_work(self) -> bool:
        """Whether it has work of its own."""
        return self._worker.has_work()

    def next_deadline(self) -> float | None:
        """Return the worker's own."""
        return self._worker.next_deadline()

    def is_over(self) -> bool:
        """Whether it has left, or is not wanted."""
        return self._worker.is_stopped or bool(self._host.refusal)

    def outcome(self) -> int:
        """Return the exit code, and say why it is not 0."""
        if self._host.refusal:
            return _complain(self._host.refusal, EXIT_REFUSED)
        if self._worker.is_orphaned:
            return _complain("the server is gone; the worker leaves", EXIT_FAILED)
        return 0


def main() -> None:
    """Join, serve, and leave with an exit code: 1, it failed; 2, it was refused."""
    faulthandler.enable()
    values = json.loads(sys.stdin.buffer.readline())
    try:
        code = serve(Joining(**values))
    except ConfigError as error:
        code = _complain(error, EXIT_REFUSED)
    except TimelyError as error:
        code = _complain(error, EXIT_FAILED)
    sys.stdout.flush()
    sys.exit(code)


def _own_address(address: str) -> str:
    if not address.startswith("tcp://"):
        return "127.0.0.1"
    return own_address_towards(split_tcp(address)[0])


def _as_guest(values: dict[str, Any], guest: dict[str, Any]) -> ServiceSpec:
    spec = ServiceSpec(**values)
    if spec.name != SERVICE:
        return spec
    options = {**spec.options, "guest": guest}
    return ServiceSpec(spec.name, spec.worker, spec.controller, spec.messages, options)


def _complain(error: object, code: int) -> int:
    print(f"timelyml: {error}", file=sys.stderr)  # noqa: T201
    return code


if __name__ == "__main__":
    main()
