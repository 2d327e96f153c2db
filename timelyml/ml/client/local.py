"""`ml.local`: islands of worker processes on this machine, with one client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from timelyml.errors import ConfigError
from timelyml.ml.client.client import Client
from timelyml.ml.controller.service import POLICIES, ControllerService
from timelyml.runtime.cluster import Cluster
from timelyml.runtime.service import ServiceSpec

SERVICE = "ml"
PolicyName: TypeAlias = Literal["fifo", "share"]


class LocalLink:
    """A way to the controller of a cluster of this process.

    Args:
        cluster: Where the service runs.
        owns_cluster: Whether the cluster ends with it.
        weight: The client's share of device time.
    """

    def __init__(
        self, cluster: Cluster, *, owns_cluster: bool, weight: int = 1
    ) -> None:
        self._cluster = cluster
        self._weight = weight
        self._owns_cluster = owns_cluster
        self._service: ControllerService = cluster.service(SERVICE)
        self._client = 0

    def connect(self, receive: Callable[[Any], None]) -> int:
        """Join the service."""
        self._client = self._service.connect(receive, self._weight)
        return self._client

    def send(self, message: Any) -> None:
        """Hand a message over."""
        self._service.submit(self._client, message)

    def another(self, weight: int) -> LocalLink:
        """Return a way for another client, which leaves the cluster alone."""
        return LocalLink(self._cluster, owns_cluster=False, weight=weight)

    def close(self) -> None:
        """Leave the service, and end the cluster if it is its own."""
        self._service.disconnect(self._client)
        if self._owns_cluster:
            self._cluster.close()


def local(
    *,
    islands: int = 1,
    devices_per_island: int = 1,
    hosts_per_island: int = 1,
    policy: PolicyName = "fifo",
    environment: Mapping[str, str] | None = None,
    startup_timeout_s: float = 60.0,
) -> Client:
    """Start islands of virtual CPU devices in worker processes, and a client of them.

    Workers set up what XLA needs before it loads, and end with the client, at the
    latest with this process.

    Args:
        islands: How many, named "island-0", "island-1" and so on.
        devices_per_island: Devices of each.
        hosts_per_island: Worker processes that share the devices of an island.
        policy: Which call goes next: "fifo", or "share", by which clients get device
            time in proportion to their weights.
        environment: Variables of the workers, on top of the usual ones.
        startup_timeout_s: By then every worker has come.

    Raises:
        ConfigError: The numbers do not fit together.
    """
    cluster = start_islands(
        "ml.local",
        islands=islands,
        devices_per_island=devices_per_island,
        hosts_per_island=hosts_per_island,
        policy=policy,
        environment=environment,
        startup_timeout_s=startup_timeout_s,
    )
    try:
        return Client(LocalLink(cluster, owns_cluster=True))
    except BaseException:
        cluster.close()
        raise


def start_islands(
    who: str,
    *,
    islands: int,
    devices_per_island: int,
    hosts_per_island: int,
    policy: PolicyName,
    environment: Mapping[str, str] | None,
    startup_timeout_s: float,
) -> Cluster:
    """Return a cluster of workers that are hosts of islands.

    Raises:
        ConfigError: The numbers do not fit together.
    """
    for option, value in (
        ("islands", islands),
        ("devices_per_island", devices_per_island),
        ("hosts_per_island", hosts_per_island),
    ):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{who}: option {option!r} cannot work; got {value!r}; expected an "
                f"integer of at least 1",
                option=option,
            )
    if policy not in POLICIES:
        raise ConfigError(
            f"{who}: option 'policy' cannot work; got {policy!r}; expected one of "
            f"{sorted(POLICIES)}",
            option="policy",
        )
    if devices_per_island % hosts_per_island:
        raise ConfigError(
            f"{who}: devices cannot be shared out evenly; got {devices_per_island} "
            f"for {hosts_per_island} hosts; expected a multiple of them",
            option="devices_per_island",
        )
    hosts = {
        f"island-{island}": [
            island * hosts_per_island + rank for rank in range(hosts_per_island)
        ]
        for island in range(islands)
    }
    return Cluster(
        islands * hosts_per_island,
        num_devices=devices_per_island // hosts_per_island,
        environment=environment,
        startup_timeout_s=startup_timeout_s,
        services=(service_spec(hosts, policy),),
    )


def service_spec(
    islands: Mapping[str, list[int]], policy: PolicyName = "fifo"
) -> ServiceSpec:
    """Return the service that makes hosts of workers, by islands."""
    return ServiceSpec(
        SERVICE,
        "timelyml.ml.hosts.service:HostService",
        "timelyml.ml.controller.service:ControllerService",
        "timelyml.ml.hosts.messages:MESSAGES",
        {"islands": dict(islands), "policy": policy},
    )
