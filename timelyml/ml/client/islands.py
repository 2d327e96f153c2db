"""Starting islands of worker processes: what can be said of them, and the cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict

from timelyml.errors import ConfigError
from timelyml.exchange import own_address_towards, split_tcp
from timelyml.ml.controller.admission import DEFAULT_MAX_CALLS, DEFAULT_MAX_CLIENTS
from timelyml.ml.controller.core import DEFAULT_MEMORY_BYTES
from timelyml.ml.controller.service import POLICIES
from timelyml.ml.hosts.upkeep import SERVICE
from timelyml.ml.resources.inventory import MAX_MESH_DIMENSIONS
from timelyml.runtime.cluster import Cluster
from timelyml.runtime.service import ServiceSpec

PolicyName: TypeAlias = Literal["fifo", "share", "priority"]


class IslandOptions(TypedDict, total=False):
    """What can be said of islands; all of it may be left out.

    Attributes:
        islands: How many, named "island-0", "island-1" and so on; 1. Of a server
            there may be none, if others are to join.
        devices_per_island: Devices of each; 1.
        hosts_per_island: Worker processes that share the devices of an island; 1.
        mesh: The shape in which the devices of an island count as neighbours, as (2, 4),
            in the order of its hosts; as the platform says, or a line if it does not.
        memory_bytes_per_device: What values and computations may take on a device at
            once; 4 GiB. Calls wait for memory, and idle values leave for the host.
        host_memory_bytes: What each worker process may keep in its memory of values that
            left its devices; without limit.
        policy: Which call goes next: "fifo"; "share", by which clients get device time
            in proportion to their weights; or "priority", by which those of larger
            priority go first, and who waits rises by one with each second of device
            time that others get.
        max_clients: How many may be connected at once; 1024.
        max_calls_per_client: Calls of a client that are not over; 1024. Clients wait
            before they go beyond it.
        max_bytes_per_client: Bytes of the values that a client may hold, each counted
            once, those that its loops hold between two parts too; without limit. More is
            an `AdmissionError` of what would be made.
        environment: Variables of the workers, on top of the usual ones.
        paced_s: For experiments with more hosts than there are cores: devices compute
            nothing, hold for the seconds stated for a function's name, and return zeros.
        delay_s: For experiments with networks: every message to or from a host, but for
            those to and from clients, comes so much later.
        startup_timeout_s: By then every worker has come; 60.
        heartbeat_timeout_s: Silence after which a worker process, or a client over tcp,
            is given up, with what only it had; 10.
    """

    islands: int
    devices_per_island: int
    hosts_per_island: int
    mesh: Sequence[int] | None
    memory_bytes_per_device: int
    host_memory_bytes: int | None
    policy: PolicyName
    max_clients: int
    max_calls_per_client: int
    max_bytes_per_client: int | None
    environment: Mapping[str, str] | None
    paced_s: Mapping[str, float] | None
    delay_s: float
    startup_timeout_s: float
    heartbeat_timeout_s: float


_DEFAULTS: IslandOptions = {
    "islands": 1,
    "devices_per_island": 1,
    "hosts_per_island": 1,
    "mesh": None,
    "memory_bytes_per_device": DEFAULT_MEMORY_BYTES,
    "host_memory_bytes": None,
    "policy": "fifo",
    "max_clients": DEFAULT_MAX_CLIENTS,
    "max_calls_per_client": DEFAULT_MAX_CALLS,
    "max_bytes_per_client": None,
    "environment": None,
    "paced_s": None,
    "delay_s": 0.0,
    "startup_timeout_s": 60.0,
    "heartbeat_timeout_s": 10.0,
}
_COUNTS = (
    "islands",
    "devices_per_island",
    "hosts_per_island",
    "memory_bytes_per_device",
    "max_clients",
    "max_calls_per_client",
)
_ALL_INTERFACES = "*", "0.0.0.0", "[::]"  # noqa: S104 - only compared with
_ELSEWHERE = "192.0.2.1"  # an address for documentation: by way of the default route
_SIZES = "host_memory_bytes", "max_bytes_per_client"


@dataclass(frozen=True, slots=True)
class Network:
    """How the workers of a cluster are reached from other machines.

    Attributes:
        host: The address or interface that they listen at.
        advertise: The address that others reach it under.
    """

    host: str
    advertise: str

    @classmethod
    def of(cls, listen: str, advertise: str | None = None) -> Network:
        """Return the network of `tcp://host:port`.

        Raises:
            ConfigError: It is no such address.
        """
        host, _ = split_tcp(listen)
        if advertise is None:
            is_any = host in _ALL_INTERFACES
            advertise = own_address_towards(_ELSEWHERE) if is_any else host
        return cls(host, advertise)


def start_islands(
    who: str,
    options: IslandOptions,
    network: Network | None = None,
    *,
    may_join: bool = False,
) -> Cluster:
    """Return a cluster of workers that are hosts of islands.

    Args:
        who: Named in errors.
        options: Those that are not the usual ones.
        network: Where other machines reach its workers; private sockets if None.
        may_join: Whether islands can come later, so that there may be none.

    Raises:
        TypeError: There is no option of a name.
        ConfigError: The numbers do not fit together.
    """
    given: IslandOptions = {**_DEFAULTS, **options}
    _check(who, given, may_join)
    per_island = given["hosts_per_island"]
    hosts = {
        f"island-{island}": [island * per_island + rank for rank in range(per_island)]
        for island in range(given["islands"])
    }
    service = ServiceSpec(
        SERVICE,
        "timelyml.ml.hosts.service:HostService",
        "timelyml.ml.controller.service:ControllerService",
        "timelyml.ml.hosts.messages:MESSAGES",
        {
            "islands": hosts,
            "policy": given["policy"],
            "memory_bytes": given["memory_bytes_per_device"],
            "host_memory_bytes": given["host_memory_bytes"],
            "paced_s": given["paced_s"] and dict(given["paced_s"]),
            "delay_s": given["delay_s"],
            "mesh": given["mesh"] and tuple(given["mesh"]),
            "give_up_s": given["heartbeat_timeout_s"],
            "limits": {
                "max_clients": given["max_clients"],
                "max_calls": given["max_calls_per_client"],
                "max_bytes": given["max_bytes_per_client"],
            },
        },
    )
    return Cluster(
        given["islands"] * per_island,
        num_devices=given["devices_per_island"] // per_island,
        environment=given["environment"],
        startup_timeout_s=given["startup_timeout_s"],
        heartbeat_timeout_s=given["heartbeat_timeout_s"],
        services=(service,),
        transport="ipc" if network is None else "tcp",
        host=None if network is None else network.host,
        advertise=None if network is None else network.advertise,
    )


def _check(who: str, given: IslandOptions, may_join: bool) -> None:
    values: Mapping[str, object] = {**given}
    if unknown := sorted(values.keys() - _DEFAULTS.keys()):
        raise TypeError(
            f"{who} has no option {unknown[0]!r}; got it; expected one of "
            f"{sorted(_DEFAULTS)}"
        )
    for option in _COUNTS:
        value, least = values[option], 0 if may_join and option == "islands" else 1
        if not isinstance(value, int) or value < least:
            raise _impossible(who, option, value, f"an integer of at least {least}")
    for option in _SIZES:
        size = values[option]
        if size is not None and (not isinstance(size, int) or size < 0):
            raise _impossible(who, option, size, "0 or more, or None")
    times = given["paced_s"]
    if times is not None and not isinstance(times, Mapping):
        raise _impossible(who, "paced_s", times, "seconds by names of functions")
    stated = {f"paced_s[{name!r}]": each for name, each in (times or {}).items()}
    stated["delay_s"] = given["delay_s"]
    for option, seconds in stated.items():
        if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise _impossible(who, option, seconds, "seconds, 0 or more")
    if given["policy"] not in POLICIES:
        expected = f"one of {sorted(POLICIES)}"
        raise _impossible(who, "policy", given["policy"], expected)
    num_devices, num_hosts = given["devices_per_island"], given["hosts_per_island"]
    mesh = given["mesh"]
    if mesh is not None and not _is_mesh(mesh, num_devices):
        expected = (
            f"the sizes of 1 to {MAX_MESH_DIMENSIONS} axes, of {num_devices} in all"
        )
        raise _impossible(who, "mesh", mesh, expected)
    if num_devices % num_hosts:
        raise ConfigError(
            f"{who}: devices cannot be shared out evenly; got {num_devices} for "
            f"{num_hosts} hosts; expected a multiple of them",
            option="devices_per_island",
        )


def _is_mesh(mesh: object, num_devices: int) -> bool:
    if not isinstance(mesh, Sequence) or not 1 <= len(mesh) <= MAX_MESH_DIMENSIONS:
        return False
    are_sizes = all(type(each) is int and each > 0 for each in mesh)
    return are_sizes and math.prod(mesh) == num_devices


def _impossible(who: str, option: str, value: object, expected: str) -> ConfigError:
    return ConfigError(
        f"{who}: option {option!r} cannot work; got {value!r}; expected {expected}",
        option=option,
    )
