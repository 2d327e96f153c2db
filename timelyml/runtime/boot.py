"""What a driver tells a worker process when it starts it: one line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from timelyml.exchange import Endpoint


@dataclass(frozen=True, slots=True)
class Boot:
    """What a driver tells a worker process, as one line of JSON.

    Attributes:
        worker: Its index.
        parent_id: The driver's process, so that an orphan notices.
        token: Shared secret of the cluster, in hex.
        bind: Where its transport binds.
        advertise: The host that peers connect to, if `bind` names all interfaces.
        controller: The controller's endpoint, as a mapping.
        sys_path: The driver's `sys.path`, so that its modules import here too.
        spill_directory: Private, for blocks that do not fit in memory.
        heartbeat_fd: Pipe to the driver for signs of life.
        memory_fd: Of memory shared with the driver, for where the worker is.
        heartbeat_s: How often.
        heartbeat_timeout_s: Silence after which peers elsewhere are given up.
        spin_s: How long its loop may look for messages before it sleeps.
        services: Those of the cluster, as mappings.
    """

    worker: int
    parent_id: int
    token: str = field(repr=False)
    bind: str
    controller: dict[str, Any]
    sys_path: list[str]
    spill_directory: str
    heartbeat_fd: int
    memory_fd: int
    heartbeat_s: float
    heartbeat_timeout_s: float
    spin_s: float = 0.0
    services: list[dict[str, Any]] = field(default_factory=list)
    advertise: str | None = None

    def to_line(self) -> bytes:
        """Return the line that the child reads."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Boot:
        """Read the line that the driver wrote."""
        return cls(**json.loads(line))


def endpoint_to_map(endpoint: Endpoint) -> dict[str, Any]:
    """Return an endpoint as JSON can hold it."""
    key = endpoint.public_key
    return {
        "control": endpoint.control,
        "bulk": endpoint.bulk,
        "public_key": None if key is None else key.decode("ascii"),
    }


def endpoint_from_map(values: dict[str, Any]) -> Endpoint:
    """Return the endpoint that `endpoint_to_map` made."""
    key = values["public_key"]
    encoded = None if key is None else key.encode("ascii")
    return Endpoint(values["control"], values["bulk"], encoded)
