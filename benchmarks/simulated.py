"""Progress traffic of clusters larger than any machine here: simulated, by counting.

The very worker and controller that processes run, on a simulated network and clock.
Every endpoint works until it is idle, then everything under way arrives: each round
is one hop of the network. Bytes are those of the real codec and frame header.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from timelyml.exchange import CONTROLLER, Codec, Incoming
from timelyml.exchange.frames import HEADER_BYTES
from timelyml.graph import Graph
from timelyml.progress import ProgressBatch
from timelyml.runtime.config import ProgressMode, RunConfig, ShippedRun
from timelyml.runtime.controller import Controller
from timelyml.runtime.effects import Effect, Ended
from timelyml.runtime.loop import Endpoint
from timelyml.runtime.messages import HANDSHAKE, DataMessage, Hello
from timelyml.runtime.run_plan import RunPlan
from timelyml.runtime.shipping import ship, worker_codec
from timelyml.runtime.simulation.clock import SimClock
from timelyml.runtime.simulation.network import SimNetwork, SimTransport
from timelyml.runtime.worker import Worker

HOP_S = 1e-4  # one way over ipc, in a process that waits for it
MESSAGES_PER_RECEIVE = 256  # as over ZeroMQ
MAX_HOPS = 100_000


@dataclass(slots=True)
class Traffic:
    """What progress cost: messages of its own, riders on data, bytes of both."""

    messages: float = 0.0
    riders: float = 0.0
    size_bytes: float = 0.0

    def per_epoch(self, fewer: Traffic, num_epochs: int) -> Traffic:
        """What each of `num_epochs` more epochs cost than the run with `fewer`."""
        return Traffic(
            (self.messages - fewer.messages) / num_epochs,
            (self.riders - fewer.riders) / num_epochs,
            (self.size_bytes - fewer.size_bytes) / num_epochs,
        )


class Meter:
    """Counts what the network is told of; the same batch is encoded only once."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._codec: Codec = worker_codec()
        self._last: ProgressBatch | None = None
        self._size_bytes = 0

    def on_send(self, _sender: int, _receiver: int, message: object, _: int) -> None:
        """Take note of a message."""
        match message:
            case ProgressBatch() as batch:
                self.traffic.messages += 1
                self.traffic.size_bytes += self._bytes_of(batch) + HEADER_BYTES
            case DataMessage(progress=ProgressBatch() as batch):
                self.traffic.riders += 1
                self.traffic.size_bytes += self._bytes_of(batch)

    def _bytes_of(self, batch: ProgressBatch) -> int:
        if batch is not self._last:
            body, _ = self._codec.encode(batch)
            self._last, self._size_bytes = batch, len(body)
        return self._size_bytes


class _Transport(SimTransport):
    """A peer that takes as much at once as one on ZeroMQ does."""

    def receive(self) -> list[Incoming]:
        """Return what has arrived."""
        count = min(len(self._inbox), MESSAGES_PER_RECEIVE)
        return [self._inbox.popleft() for _ in range(count)]


class _Network(SimNetwork):
    """A network of such peers."""

    def transport(self, index: int) -> SimTransport:
        """Return the transport of a peer."""
        return self._transports.setdefault(index, _Transport(index, self))


def simulate(graph: Graph, num_workers: int, mode: ProgressMode) -> Traffic:
    """Run `graph` to its end and return what its progress cost in all."""
    meter, clock = Meter(), SimClock()
    network = _Network(None, meter.on_send)
    controller = Controller(network.transport(CONTROLLER), num_workers, clock=clock)
    ended: list[Ended] = []
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            Worker(
                index,
                network.transport(index),
                codec=worker_codec(),
                clock=clock,
                spill_directory=Path(folder),
            )
            for index in range(num_workers)
        ]
        for index in range(num_workers):
            hello = Hello(index, 0, None, HANDSHAKE)
            network.transport(index).send(CONTROLLER, hello)
        resolved, config = graph.resolve(num_workers), RunConfig(progress_mode=mode)
        shipped = ship(ShippedRun(resolved, config))
        plan = RunPlan(1, resolved, config, shipped, num_workers)

        def observe(effect: Effect) -> None:
            if isinstance(effect, Ended):
                ended.append(effect)

        endpoints: list[Endpoint] = [controller, *workers]
        controller.submit(plan, observe)
        for _ in range(MAX_HOPS):
            if ended:
                break
            for endpoint in endpoints:
                while endpoint.step():
                    pass
            while links := network.busy_links:
                network.deliver(links[-1])
            clock.advance(HOP_S)
    if not ended or ended[0].error is not None:
        raise RuntimeError(f"the simulated run did not complete: {ended}")
    return meter.traffic
