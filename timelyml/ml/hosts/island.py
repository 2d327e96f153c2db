"""Joining several processes to one island, whose collectives then span them.

The first process of an island coordinates; the others hear from it where. JAX connects
the processes itself, on CPU with gloo and on GPU with NCCL. Clients never join.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
from collections.abc import Iterator

import jax

LOOPBACK = "127.0.0.1"
JOIN_TIMEOUT_S = 60
HEARTBEAT_TIMEOUT_S = 100
LEAVE_TIMEOUT_S = 2.0


@contextlib.contextmanager
def reserved_address(host: str) -> Iterator[str]:
    """Keep an address of this machine for who listens there with `SO_REUSEPORT`.

    As JAX's coordinator does. As long as the port is bound here, the system gives it to
    nobody else; connections only go to who listens.
    """
    with socket.socket(_family(host)) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host.strip("[]"), 0))
        yield _address_of(holder)


def join(address: str, rank: int, num_processes: int) -> None:
    """Join the processes of an island; returns when all are there.

    Must come before JAX is used in any other way. A process whose peer dies lives on,
    and its collectives fail; otherwise JAX would end it.
    """
    jax.config.update("jax_enable_recoverability", True)  # type: ignore[no-untyped-call]
    jax.distributed.initialize(
        address,
        num_processes=num_processes,
        process_id=rank,
        coordinator_bind_address=address,  # or it would listen to other machines
        cluster_detection_method="deactivate",
        initialization_timeout=JOIN_TIMEOUT_S,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
    )


class Departure:
    """Lets the coordinator of an island end last.

    JAX aborts a process that finds its coordinator gone, also one that is just ending.
    So the others end without a word to JAX, and the coordinator waits until they have:
    it sees connections of theirs break that stay open as long as they live.

    Args:
        others: In the coordinator, how many.
        address: In the others, where the coordinator listens.
        host: In the coordinator, the address of this machine that others reach.
    """

    def __init__(
        self, *, others: int = 0, address: str = "", host: str = LOOPBACK
    ) -> None:
        self._others = others
        if address:
            host, _, port = address.rpartition(":")
            target = host.strip("[]"), int(port)
            self._socket = socket.create_connection(target, JOIN_TIMEOUT_S)
        else:
            self._socket = socket.create_server(
                (host.strip("[]"), 0), family=_family(host), backlog=others
            )
        # Before JAX's own end, as it was registered later.
        atexit.register(self._leave)

    @property
    def address(self) -> str:
        """Where the coordinator listens."""
        return _address_of(self._socket)

    def _leave(self) -> None:
        with contextlib.suppress(OSError):  # somebody never came, or takes too long
            self._wait_for_others()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if hasattr(sys, "last_type") else 0)  # of what ended the process

    def _wait_for_others(self) -> None:
        for _ in range(self._others):
            self._socket.settimeout(LEAVE_TIMEOUT_S)
            connection, _ = self._socket.accept()
            connection.settimeout(LEAVE_TIMEOUT_S)
            connection.recv(1)


def devices_by_rank() -> list[list[jax.Device]]:
    """Return the devices of each process of the island."""
    found: list[list[jax.Device]] = [[] for _ in range(jax.process_count())]
    for device in jax.devices():
        found[device.process_index].append(device)
    return found


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _address_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
