"""`ml.serve`: islands that outlive their clients."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from timelyml.ml.client.islands import SERVICE, IslandOptions, start_islands
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


def serve(path: str | Path, **options: Unpack[IslandOptions]) -> Server:
    """Start islands for clients of other programs of this user, on this machine.

    They last until the server is closed, or its process ends.

    Args:
        path: Where to write the file that clients connect with; replaced if it is there.
        **options: Those of `IslandOptions`, as of `local`.

    Raises:
        ConfigError: The numbers do not fit together.
        PeerError: A worker did not come.
    """
    cluster = start_islands("ml.serve", options)
    try:
        return Server(cluster, Path(path))
    except BaseException:
        cluster.close()
        raise
