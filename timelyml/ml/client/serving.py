"""`ml.serve`: islands that outlive their clients."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from timelyml.ml.client.local import SERVICE, PolicyName, start_islands
from timelyml.ml.controller.gate import ClientGate
from timelyml.runtime.cluster import Cluster


class Server:
    """Islands of workers, and a gate for clients; a context manager.

    Attributes:
        path: The file that clients connect with; it holds the key.
    """

    def __init__(self, cluster: Cluster, path: Path) -> None:
        self.path = path
        self._cluster = cluster
        self._gate = ClientGate(cluster.service(SERVICE))
        self._gate.address.write(path)

    @property
    def num_clients(self) -> int:
        """Clients that are connected now."""
        return self._gate.num_clients

    def close(self) -> None:
        """End all workers, and tell all clients."""
        self.path.unlink(missing_ok=True)
        self._cluster.close()
        self._gate.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def serve(
    path: str | Path,
    *,
    islands: int = 1,
    devices_per_island: int = 1,
    hosts_per_island: int = 1,
    policy: PolicyName = "fifo",
    environment: Mapping[str, str] | None = None,
    startup_timeout_s: float = 60.0,
) -> Server:
    """Start islands for clients of other programs of this user, on this machine.

    They last until the server is closed, or its process ends.

    Args:
        path: Where to write the file that clients connect with; replaced if it is there.
        islands: As of `local`, and so on.
        devices_per_island: Devices of each.
        hosts_per_island: Worker processes that share the devices of an island.
        policy: Which call goes next, as of `local`.
        environment: Variables of the workers, on top of the usual ones.
        startup_timeout_s: By then every worker has come.

    Raises:
        ConfigError: The numbers do not fit together.
    """
    cluster = start_islands(
        "ml.serve",
        islands=islands,
        devices_per_island=devices_per_island,
        hosts_per_island=hosts_per_island,
        policy=policy,
        environment=environment,
        startup_timeout_s=startup_timeout_s,
    )
    try:
        return Server(cluster, Path(path))
    except BaseException:
        cluster.close()
        raise
