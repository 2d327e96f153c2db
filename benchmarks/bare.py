"""What timelyml is compared with: ZeroMQ by itself, between two processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

import zmq

MESSAGE_BYTES = 64
LOOK_S = 2e-3  # as long as a worker looks before it sleeps
Wait: TypeAlias = Literal["looking", "sleeping"]


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
def round_trips(wait: Wait) -> Iterator[RoundTrips]:
    """Start the echo process and wait until it answers."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
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
    echo_until_told(sys.argv[1], "looking" if sys.argv[2] == "looking" else "sleeping")
