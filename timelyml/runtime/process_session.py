"""A session whose workers are processes of this machine, over ZeroMQ."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from timelyml.exchange import CONTROLLER, CurveKeys, ZmqTransport
from timelyml.runtime.boot import Boot, endpoint_to_map
from timelyml.runtime.controller import Controller
from timelyml.runtime.guests import Invitation
from timelyml.runtime.launch_processes import ProcessLauncher, check_room
from timelyml.runtime.scratch import ScratchDirectory
from timelyml.runtime.service import ServiceSpec
from timelyml.runtime.session import Session
from timelyml.runtime.shipping import worker_codec

TOKEN_BYTES = 16
LOOPBACK = "127.0.0.1"
BEATS_PER_TIMEOUT = 8
# A worker that looks answers a message in half the time; measured with `python -m
# benchmarks latency`. One that hardly ever sleeps keeps its core to itself: with 0.3 ms
# epochs took a third longer than with 2. Not where workers would take each other's core.
SPIN_S = 2e-3


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """What the options of a cluster say about its processes, and numbers for runs."""

    workers: int
    transport: Literal["ipc", "tcp"]
    startup_timeout_s: float
    heartbeat_timeout_s: float
    environment: Mapping[str, str] | None
    num_devices: int
    services: Sequence[ServiceSpec] = ()
    host: str | None = None
    advertise: str | None = None
    generations: Iterator[int] | None = None


def process_session(options: ProcessOptions) -> Session:
    """Start worker processes; their sockets are private to the user.

    Raises:
        ConfigError: They are more than this process may have open files for.
    """
    check_room(options.workers)
    scratch = ScratchDirectory()
    token = secrets.token_bytes(TOKEN_BYTES)
    is_tcp = options.transport == "tcp"
    bind = f"tcp://{options.host or LOOPBACK}:*" if is_tcp else f"ipc://{scratch.path}"
    try:
        transport = _transport(options, token, bind)
    except BaseException:
        scratch.remove()
        raise
    endpoint = endpoint_to_map(transport.endpoint)
    sys_path = [path or str(Path.cwd()) for path in sys.path]  # "" means where we are
    services = [spec.to_map() for spec in options.services]
    as_guests = _for_guests(services, options)

    def boot_of(worker: int) -> Callable[[int, int], Boot]:
        return lambda heartbeat_fd, memory_fd: Boot(
            worker=worker,
            parent_id=os.getpid(),
            token=token.hex(),
            bind=bind,
            controller=endpoint,
            sys_path=sys_path,
            spill_directory=str(scratch.path),
            heartbeat_fd=heartbeat_fd,
            memory_fd=memory_fd,
            heartbeat_s=min(1.0, options.heartbeat_timeout_s / BEATS_PER_TIMEOUT),
            heartbeat_timeout_s=options.heartbeat_timeout_s,
            spin_s=spin_seconds(
                options.workers, len(os.sched_getaffinity(0)), options.num_devices
            ),
            services=services if worker < options.workers else as_guests,
            advertise=options.advertise,
        )

    def invite() -> Invitation:
        where = "" if is_tcp else bind
        return Invitation(
            controller.guests.invite(),
            token.hex(),
            where,
            endpoint,
            services,
            options.heartbeat_timeout_s,
        )

    launcher = ProcessLauncher(
        options.workers,
        boot_of,
        environment=options.environment,
        num_devices=options.num_devices,
        heartbeat_timeout_s=options.heartbeat_timeout_s,
        cleanup=scratch.remove,
    )
    controller = Controller(
        transport,
        options.workers,
        clock=time.monotonic,
        startup_timeout_s=options.startup_timeout_s,
        heartbeat_timeout_s=options.heartbeat_timeout_s,
        keeper=launcher,
        services=options.services,
        generations=options.generations,
    )
    return Session(controller, transport, launcher, controller, invite)


def _transport(options: ProcessOptions, token: bytes, bind: str) -> ZmqTransport:
    return ZmqTransport(
        CONTROLLER,
        codec=worker_codec(options.services),
        token=token,
        bind=bind,
        keys=CurveKeys.generate() if options.transport == "tcp" else None,
        advertise=options.advertise,
        silence_s=options.heartbeat_timeout_s,
    )


def _for_guests(
    services: Sequence[Mapping[str, Any]], options: ProcessOptions
) -> list[dict[str, Any]]:
    """Return services as workers have them that take the place of others."""
    guest = {
        "island": "",
        "num_hosts": 1,
        "num_devices": options.num_devices,
        "address": options.advertise or LOOPBACK,
    }
    return [
        {**each, "options": {**each["options"], "guest": guest}} for each in services
    ]


def spin_seconds(num_workers: int, num_cores: int, num_devices: int = 1) -> float:
    """How long workers may look for messages before they sleep; 0: they share cores.

    A worker that has several devices computes in other threads than it looks in.

    >>> spin_seconds(2, num_cores=2) > 0, spin_seconds(3, num_cores=2)
    (True, 0.0)
    >>> spin_seconds(1, num_cores=2, num_devices=2)
    0.0
    """
    num_threads = num_devices + 1 if num_devices > 1 else 1
    return SPIN_S if num_workers * num_threads <= num_cores else 0.0
