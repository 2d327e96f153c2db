"""Commands about islands that outlive their clients: serve, worker, objects, top, hosts."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from timelyml.cli_output import exit_codes
from timelyml.runtime.environment import worker_environment
from timelyml.runtime.launch_processes import python_path
from timelyml.runtime.service import import_name

STDIN = 0
JOINING = "timelyml.ml.joining"


class PolicyName(StrEnum):
    """Which call goes next."""

    FIFO = "fifo"
    SHARE = "share"
    PRIORITY = "priority"


Address = Annotated[
    str,
    typer.Argument(help="The file that the server wrote, or tcp://HOST:PORT."),
]
Key = Annotated[
    str | None,
    typer.Option(help="The file with the server's key; with tcp:// only."),
]


def serve(
    path: Annotated[
        Path, typer.Argument(help="Where to write the file that clients connect with.")
    ],
    *,
    islands: Annotated[
        int, typer.Option(min=0, help="Number of islands; 0 if all are to join.")
    ] = 1,
    devices_per_island: Annotated[
        int, typer.Option(min=1, help="Virtual CPU devices of each.")
    ] = 1,
    hosts_per_island: Annotated[
        int, typer.Option(min=1, help="Worker processes of each.")
    ] = 1,
    memory_bytes_per_device: Annotated[
        int, typer.Option(min=1, help="What values and computations may take on each.")
    ] = 4 << 30,
    host_memory_bytes: Annotated[
        int | None,
        typer.Option(min=0, help="Of each worker, for idle values. Default: no limit."),
    ] = None,
    policy: Annotated[
        PolicyName,
        typer.Option(
            help="Which call goes next: as they come, by weight, by priority."
        ),
    ] = PolicyName.FIFO,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="tcp://HOST:PORT",
            help="Serve other machines too, there and at the port after it. Who has the "
            "key, which is written to PATH.key, can run code here.",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="The address that other machines reach this one under, if --listen "
            "names all interfaces. Default: the one of the default route.",
        ),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            help="File in which the server keeps its keys for its next start. Default: "
            "new keys at every start."
        ),
    ] = None,
    max_clients: Annotated[
        int, typer.Option(min=1, help="Clients that may be connected at once.")
    ] = 1024,
    max_calls_per_client: Annotated[
        int, typer.Option(min=1, help="Calls of each that may be under way.")
    ] = 1024,
    max_bytes_per_client: Annotated[
        int | None,
        typer.Option(min=0, help="Of the values that each holds. Default: no limit."),
    ] = None,
    heartbeat_timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Seconds of silence after which a worker or client is given up.",
        ),
    ] = 10.0,
) -> None:
    """Serve islands of devices to clients (ml.connect) until a signal ends it."""
    start: Callable[..., Any] = import_name("timelyml.ml:serve")  # loads jax
    is_over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: is_over.set())
    with (
        exit_codes(),
        start(
            path,
            listen=listen,
            advertise=advertise,
            keys=keys,
            islands=islands,
            devices_per_island=devices_per_island,
            hosts_per_island=hosts_per_island,
            memory_bytes_per_device=memory_bytes_per_device,
            host_memory_bytes=host_memory_bytes,
            policy=policy.value,
            max_clients=max_clients,
            max_calls_per_client=max_calls_per_client,
            max_bytes_per_client=max_bytes_per_client,
            heartbeat_timeout_s=heartbeat_timeout,
        ) as server,
    ):
        also = f" and {server.address}" if server.address else ""
        typer.echo(f"serving at {path}{also}", err=True)
        is_over.wait()


def worker(
    *,
    join: Annotated[
        str,
        typer.Option(help="The file that the server wrote, or tcp://HOST:PORT."),
    ],
    key: Key = None,
    island: Annotated[
        str, typer.Option(help="Name of the island. Default: a new one of its own.")
    ] = "",
    hosts_per_island: Annotated[
        int, typer.Option(min=1, help="Workers that name the island and form it.")
    ] = 1,
    devices: Annotated[
        int, typer.Option(min=1, help="Virtual CPU devices of this worker.")
    ] = 1,
    drain: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds to wait at SIGTERM for what is on the island."
        ),
    ] = 30.0,
) -> None:
    """Join a served cluster as a host: of CPU devices, or what JAX_PLATFORMS names.

    Leaves on SIGTERM or SIGINT once nothing on its island is left; at once on a second.
    Exit codes: 0, it left or the server ended; 1, it lost the server; 2, it was refused.
    """
    values = {
        "address": join,
        "key": key,
        "island": island,
        "num_hosts": hosts_per_island,
        "num_devices": devices,
        "drain_s": drain,
    }
    environment = worker_environment(os.environ, num_devices=devices)
    environment["PYTHONPATH"] = python_path(environment)
    # The process itself becomes the worker, so that signals reach it, with what XLA needs
    # in its environment; the key does not show among its arguments.
    reading, writing = os.pipe()
    os.write(writing, json.dumps(values).encode() + b"\n")
    os.close(writing)
    os.dup2(reading, STDIN)
    command = [sys.executable, "-P", "-m", JOINING]
    os.execve(command[0], command, environment)  # noqa: S606 - our own interpreter


def objects(address: Address, *, key: Key = None) -> None:
    """List the values on a served cluster: whose they are, and what they take."""
    _show_of(address, key, "objects")


def top(address: Address, *, key: Key = None) -> None:
    """List the clients of a served cluster: what device time and memory they take."""
    _show_of(address, key, "usage")


def hosts(address: Address, *, key: Key = None) -> None:
    """List the worker processes of a served cluster: what each says that it has."""
    _show_of(address, key, "hosts", of="resources")


def _show_of(address: str, key: str | None, what: str, of: str | None = None) -> None:
    """Print a table of what a client of a server, or a part of it, is told."""
    with exit_codes():
        connect: Callable[..., Any] = import_name("timelyml.ml:connect")  # loads jax
        table_of: Callable[..., Any] = import_name(f"timelyml.observe:{what}_table")
        show: Callable[..., Any] = import_name("timelyml.observe:show")
        with connect(address, key=key) as client:
            asked = client if of is None else getattr(client, of)
            show(table_of(getattr(asked, what)()), sys.stdout)


COMMANDS: tuple[Callable[..., None], ...] = (serve, worker, objects, top, hosts)
