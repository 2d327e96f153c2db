"""What timelyml is compared with: ZeroMQ and datagrams, between two processes."""

from __future__ import annotations

import contextlib
import os
import select
import socket as sockets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, get_args

import zmq

MESSAGE_BYTES = 64
LOOK_S = 2e-3  # as long as a worker looks before it sleeps
Wait: TypeAlias = Literal["looking", "sleeping", "datagrams"]


class Trips(Protocol):
    """What takes round trips to another process."""

    def measure(self, count: int) -> list[float]:
        """Seconds of each of `count` round trips."""

    def close(self) -> None:
        """Tell the other process to end."""


class DatagramTrips:
    """A process that echoes datagrams of Unix sockets; both sides look for them."""

    def __init__(self, folder: Path) -> None:
        self._socket = _datagram_socket(folder / "here")
        self._is_connected = False
        self._folder = folder

    def measure(self, count: int) -> list[float]:
        """Seconds of each of `count` round trips; the first waits for the process."""
        while not self._is_connected:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                self._socket.connect(str(self._folder / "there"))
                self._is_connected = True
        message = bytes(MESSAGE_BYTES)
        samples = []
        for _ in range(count):
            start = time.perf_counter()
            self._socket.send(message)
            _look_for_datagram(self._socket)
            samples.append(time.perf_counter() - start)
        return samples

    def close(self) -> None:
        """Tell the echo to end."""
        self._socket.send(b"")
        self._socket.close()


def _datagram_socket(path: Path) -> sockets.socket:
    new = sockets.socket(sockets.AF_UNIX, sockets.SOCK_DGRAM)
    new.setblocking(False)
    new.bind(str(path))
    return new


def _look_for_datagram(socket: sockets.socket) -> bytes:
    until = time.perf_counter() + LOOK_S
    while time.perf_counter() < until:
        with contextlib.suppress(BlockingIOError):
            return socket.recv(MESSAGE_BYTES)
    select.select([socket], [], [])
    return socket.recv(MESSAGE_BYTES)


class RoundTrips:
    """A process that echoes small messages over `ipc`, one PUSH and PULL each way.

    Args:
        context: Of the sockets.
        folder: Where they are.
        wait: How both sides wait for a message: `looking` for it, as workers do that
            have a core each, or `sleeping` until it is there.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], folder: Path, wait: Wait
    ) -> None:
        self._there: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        self._back: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self._receive = _receiver(self._back, wait)
        self._there.bind(f"ipc://{folder}/there")
        self._back.bind(f"ipc://{folder}/back")

    def measure(self, count: int) -> list[float]:
        """Seconds of each of `count` round trips."""
        message = bytes(MESSAGE_BYTES)
        samples = []
        for _ in range(count):
            start = time.perf_counter()
            self._there.send(message)
            self._receive()
            samples.append(time.perf_counter() - start)
        return samples

    def close(self) -> None:
        """Tell the echo to end."""
        self._there.send(b"")
        self._there.close()
        self._back.close()


@contextmanager
def round_trips(wait: Wait) -> Iterator[Trips]:
    """Start the echo process and wait until it answers."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        trips: Trips
        if wait == "datagrams":
            trips = DatagramTrips(Path(folder))
        else:
            trips = RoundTrips(context, Path(folder), wait)
        command = [sys.executable, "-m", "benchmarks.bare", folder, wait]
        echo = subprocess.Popen(command, cwd=Path(__file__).parent.parent)
        trips.measure(1)
        try:
            yield trips
        finally:
            trips.close()
            echo.wait()


def _receiver(socket: zmq.Socket[bytes], wait: Wait) -> Callable[[], bytes]:
    """Return what waits for a message in that way."""
    if wait == "sleeping":
        return socket.recv
    poller = zmq.Poller()  # one for all messages, as workers have
    poller.register(socket, zmq.POLLIN)

    def look_and_receive() -> bytes:
        until = time.perf_counter() + LOOK_S
        while not poller.poll(0) and time.perf_counter() < until:
            os.sched_yield()
        return socket.recv()

    return look_and_receive


def echo_until_told(folder: str, wait: Wait) -> None:
    """Be the other process: send everything back, until an empty message comes."""
    if wait == "datagrams":
        socket = _datagram_socket(Path(folder, "there"))
        socket.connect(str(Path(folder, "here")))
        while message := _look_for_datagram(socket):
            socket.send(message)
        socket.close()
        return
    with zmq.Context() as context:
        incoming = context.socket(zmq.PULL)
        outgoing = context.socket(zmq.PUSH)
        incoming.connect(f"ipc://{folder}/there")
        outgoing.connect(f"ipc://{folder}/back")
        receive = _receiver(incoming, wait)
        while message := receive():
            outgoing.send(message)
        incoming.close()
        outgoing.close()


if __name__ == "__main__":
    ways: dict[str, Wait] = {way: way for way in get_args(Wait)}
    echo_until_told(sys.argv[1], ways[sys.argv[2]])
