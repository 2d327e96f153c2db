"""`ml.serve`: islands that outlive their clients."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from timelyml.exchange import ServerKeys, write_private
from timelyml.ml.client.islands import (
    IslandOptions,
    Network,
    start_islands,
)
from timelyml.ml.controller.gate import ClientGate
from timelyml.ml.hosts.upkeep import SERVICE
from timelyml.runtime.cluster import Cluster


class Server:
    """Islands of workers, and gates for clients; a context manager.

    Attributes:
        path: The file that clients of this machine connect with; it holds a key.
        key_path: The file with the key for other machines, if it listens to them.
        address: `tcp://host:port` where it does.
        cluster: Its workers, those that joined too: `flow.run(cluster=server.cluster)`
            runs a dataflow on those that are there, beside the islands.
    """

    def __init__(
        self, cluster: Cluster, path: Path, listen: str | None, keys: ServerKeys
    ) -> None:
        self.path = path
        self.key_path = Path(f"{path}.key") if listen is not None else None
        self.address: str | None = None
        self.cluster = cluster
        service = cluster.service(SERVICE)
        self._gates = [ClientGate(service, cluster.invite)]
        try:
            if listen is not None:
                gate = ClientGate(
                    service,
                    cluster.invite,
                    listen=listen,
                    keys=keys,
                    heartbeat_timeout_s=cluster.options.heartbeat_timeout_s,
                )
                self._gates.append(gate)
                self.address = self._gates[-1].address.endpoint.control
        except BaseException:
            self._gates[0].close()
            raise
        if self.key_path is not None:
            write_private(self.key_path, keys.access.to_text() + "\n")
        self._gates[0].address.write(path)

    @property
    def num_clients(self) -> int:
        """Clients that are connected now."""
        return sum(gate.num_clients for gate in self._gates)

    def close(self) -> None:
        """End all workers, and tell all clients."""
        self.path.unlink(missing_ok=True)
        if self.key_path is not None:
            self.key_path.unlink(missing_ok=True)
        self.cluster.close()
        for gate in self._gates:
            gate.close()

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
    listen: str | None = None,
    advertise: str | None = None,
    keys: str | Path | None = None,
    **options: Unpack[IslandOptions],
) -> Server:
    """Start islands for clients of other programs, of this user or with the key.

    They last until the server is closed, or its process ends. Other processes can bring
    islands of their own, with `timelyml worker --join`; there may be none at first.

    Args:
        path: Where to write the file that clients of this machine connect with;
            replaced if it is there.
        listen: Listen to other machines too, at `tcp://host:port` and the port after
            it; `*` for free ports. Whoever has the key, which is written beside `path`
            as `path.key`, can run code here.
        advertise: The address that other machines reach this one under, if `listen`
            names all interfaces; the one of the default route if None.
        keys: File in which the server keeps its keys from one start to the next, made
            if it is not there; new ones at every start if None.
        **options: Those of `IslandOptions`, as of `local`.

    Raises:
        ConfigError: The numbers do not fit together, or the address cannot be used.
        PeerError: A worker did not come.
    """
    network = None if listen is None else Network.of(listen, advertise)
    own = ServerKeys.generate() if keys is None else ServerKeys.kept_in(Path(keys))
    cluster = start_islands("ml.serve", options, network, may_join=True)
    try:
        return Server(cluster, Path(path), listen, own)
    except BaseException:
        cluster.close()
        raise
