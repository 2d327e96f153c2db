"""`ml.local`: islands of worker processes on this machine, with one client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from timelyml.ml.client.client import Client
from timelyml.ml.client.islands import IslandOptions, start_islands
from timelyml.ml.controller.clients import ClientOptions
from timelyml.ml.controller.service import ControllerService
from timelyml.ml.hosts.upkeep import SERVICE
from timelyml.runtime.cluster import Cluster


class LocalLink:
    """A way to the controller of a cluster of this process.

    Args:
        cluster: Where the service runs.
        owns_cluster: Whether the cluster ends with it.
        options: What the client is to be given of device time.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        owns_cluster: bool,
        options: ClientOptions | None = None,
    ) -> None:
        self._cluster = cluster
        self._options = options or ClientOptions()
        self._owns_cluster = owns_cluster
        self._service: ControllerService = cluster.service(SERVICE)
        self._client = 0

    @property
    def shares_process(self) -> bool:
        """Yes: the service runs in a thread of it."""
        return True

    def connect(self, receive: Callable[[Any], None]) -> tuple[int, int]:
        """Join the service.

        Raises:
            AdmissionError: It has as many clients as it takes.
        """
        options = self._options
        self._client = self._service.connect(receive, options.weight, options.priority)
        return self._client, self._service.max_calls

    def send(self, message: Any) -> None:
        """Hand a message over."""
        self._service.submit(self._client, message)

    def another(self, options: ClientOptions) -> LocalLink:
        """Return a way for another client, which leaves the cluster alone."""
        return LocalLink(self._cluster, owns_cluster=False, options=options)

    def close(self) -> None:
        """Leave the service, and end the cluster if it is its own."""
        self._service.disconnect(self._client)
        if self._owns_cluster:
            self._cluster.close()


def local(**options: Unpack[IslandOptions]) -> Client:
    """Start islands of virtual CPU devices in worker processes, and a client of them.

    Workers set up what XLA needs before it loads, and end with the client, at the
    latest with this process.

    Args:
        **options: Those of `IslandOptions`: how many islands of how many devices, and
            so on.

    Raises:
        ConfigError: The numbers do not fit together.
        PeerError: A worker did not come.
    """
    cluster = start_islands("ml.local", options)
    try:
        return Client(LocalLink(cluster, owns_cluster=True))
    except BaseException:
        cluster.close()
        raise
