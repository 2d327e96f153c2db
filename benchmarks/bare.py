"""What timelyml is compared with: ZeroMQ by itself, between two processes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

MESSAGE_BYTES = 64


class RoundTrips:
    """A process that echoes small messages over `ipc`, one PUSH and PULL each way."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
        self._there: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        self._back: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self._there.bind(f"ipc://{folder}/there")
        self._back.bind(f"ipc://{folder}/back")

    def measure(self, count: int) -> list[float]:
        """Seconds of each of `count` round trips."""
        message = bytes(MESSAGE_BYTES)
        samples = []
        for _ in range(count):
            start = time.perf_counter()
            self._there.send(message)
            self._back.recv()
            samples.append(time.perf_counter() - start)
        return samples

    def close(self) -> None:
        """Tell the echo to end."""
        self._there.send(b"")
        self._there.close()
        self._back.close()


@contextmanager
def round_trips() -> Iterator[RoundTrips]:
    """Start the echo process and wait until it answers."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        trips = RoundTrips(context, Path(folder))
        command = [sys.executable, "-m", "benchmarks.bare", folder]
        echo = subprocess.Popen(command, cwd=Path(__file__).parent.parent)
        trips.measure(1)
        try:
            yield trips
        finally:
            trips.close()
            echo.wait()


def echo_until_told(folder: str) -> None:
    """Be the other process: send everything back, until an empty message comes."""
    with zmq.Context() as context:
        incoming = context.socket(zmq.PULL)
        outgoing = context.socket(zmq.PUSH)
        incoming.connect(f"ipc://{folder}/there")
        outgoing.connect(f"ipc://{folder}/back")
        while message := incoming.recv():
            outgoing.send(message)
        incoming.close()
        outgoing.close()


if __name__ == "__main__":
    echo_until_told(sys.argv[1])
