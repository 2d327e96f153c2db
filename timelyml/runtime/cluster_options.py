"""Where the workers of a cluster live, and how long to wait for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from timelyml.runtime.options import (
    check_choice,
    check_count,
    check_environment,
    check_seconds,
    refusal,
)
from timelyml.runtime.service import ServiceSpec

Mode = Literal["inline", "threads", "processes"]
MODES = ("inline", "threads", "processes")
TRANSPORTS = ("ipc", "tcp")


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Where the workers of a cluster live, and how long to wait for them.

    Attributes:
        workers: How many.
        mode: `processes` on this machine; `threads` of this process, for work that
            releases the interpreter's lock; `inline`, one worker in the caller's turn.
        transport: Between processes: `ipc` (sockets private to the user) or `tcp`
            (loopback, encrypted).
        startup_timeout_s: By then every worker has come; and so long it may take to
            build a graph.
        heartbeat_timeout_s: Silence after which a worker process is given up.
        environment: Variables of worker processes, on top of the usual ones.
        num_devices: Virtual devices that JAX shows in each worker process.
        services: What other packages add to the controller and to each worker.
        host: With `tcp`, the address or interface to listen at; loopback if None.
        advertise: With `tcp`, the address that others reach this machine under, if
            `host` names all interfaces.
    """

    workers: int = 4
    mode: Mode = "processes"
    transport: Literal["ipc", "tcp"] = "ipc"
    startup_timeout_s: float = 60.0
    heartbeat_timeout_s: float = 10.0
    environment: Mapping[str, str] | None = None
    num_devices: int = 1
    services: Sequence[ServiceSpec] = ()
    host: str | None = None
    advertise: str | None = None

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, MODES)
        check_choice("transport", self.transport, TRANSPORTS)
        if self.workers or not self.services:  # those may come later, as guests
            check_count("workers", self.workers)
        check_count("num_devices", self.num_devices)
        if self.mode == "inline" and self.workers != 1:
            raise refusal("workers", self.workers, "1 where mode is 'inline'")
        check_seconds("startup_timeout_s", self.startup_timeout_s)
        check_seconds("heartbeat_timeout_s", self.heartbeat_timeout_s)
        if self.environment is not None:
            check_environment(self.environment)
