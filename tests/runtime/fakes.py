"""A clock that tests move, and workers that only say what the test tells them to."""

from __future__ import annotations

from timelyml.exchange import CONTROLLER, InProcessHub
from timelyml.graph import GraphBuilder, InputSpec, Pipeline
from timelyml.progress import ProgressBatch
from timelyml.runtime.config import RunConfig, ShippedRun
from timelyml.runtime.controller import Controller
from timelyml.runtime.effects import Ended
from timelyml.runtime.messages import (
    HANDSHAKE,
    Connected,
    Deploy,
    Drop,
    Dropped,
    Hello,
    Ready,
)
from timelyml.runtime.operator import Logic
from timelyml.runtime.run_plan import RunPlan
from timelyml.runtime.shipping import ship

# Locations of `chain_graph`; a sink has an output too, so that a run awaits its end.
SOURCE_OUT, MAP_IN, MAP_OUT, END_IN, END_OUT = range(5)
INITIAL = (SOURCE_OUT, MAP_OUT, END_OUT)


class FakeClock:
    """Monotonic seconds that pass only when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds


class FakeWorker:
    """One end of a link to the controller; keeps what it was sent."""

    def __init__(self, hub, index):
        self.index = index
        self.transport = hub.transport(index)
        self.got = []

    def say(self, message):
        self.transport.send(CONTROLLER, message)

    def hello(self, version=HANDSHAKE):
        self.say(Hello(self.index, 1000 + self.index, None, version))

    def listen(self):
        self.got += [incoming.message for incoming in self.transport.receive()]
        return self.got

    def last(self, kind):
        found = [message for message in self.listen() if isinstance(message, kind)]
        assert found, f"worker {self.index} got no {kind.__name__}: {self.got}"
        return found[-1]

    def progress(self, sequence, *changes, generation=1):
        self.say(ProgressBatch(generation, self.index, sequence, tuple(changes)))


class Keeper:
    """Stands in for a launcher."""

    def __init__(self, tail="", place=None):
        self.killed = []
        self.tail = tail
        self.at = place

    def stderr_tail(self, worker):
        return self.tail

    def activity(self, worker):
        return ""

    def place(self, worker):
        return self.at

    def kill(self, worker):
        self.killed.append(worker)


class Scene:
    """A controller, scripted workers and a clock; `effects` is what the driver hears."""

    def __init__(self, num_workers=2, **options):
        hub = InProcessHub()
        self.clock = FakeClock()
        self.controller = Controller(
            hub.transport(CONTROLLER), num_workers, clock=self.clock, **options
        )
        self.workers = [FakeWorker(hub, index) for index in range(num_workers)]
        self.effects = []

    def settle(self):
        while self.controller.step():
            pass

    def pass_(self, seconds):
        self.clock.pass_(seconds)
        self.settle()

    def gather(self):
        """Let every worker come and connect."""
        for worker in self.workers:
            worker.hello()
        self.settle()
        for worker in self.workers:
            worker.say(Connected(worker.index))
        self.settle()

    def submit(self, graph=None, generation=1, **config):
        run_config = RunConfig(**config)
        resolved = (graph or chain_graph()).resolve(len(self.workers))
        shipped = ship(ShippedRun(resolved, run_config))
        plan = RunPlan(generation, resolved, run_config, shipped, len(self.workers))
        self.graph = resolved
        self.controller.submit(plan, self.effects.append)
        self.settle()

    def build(self, generation=1):
        """Let every worker answer that it built the graph."""
        for worker in self.workers:
            worker.last(Deploy)
            self.say_ready(worker, generation)
        self.settle()

    def say_ready(self, worker, generation=1, fingerprint=None, description=None):
        fingerprint = fingerprint or self.graph.fingerprint()
        description = description or self.graph.describe()
        worker.say(Ready(generation, worker.index, fingerprint, description))

    def start(self, graph=None, **config):
        self.gather()
        self.submit(graph, **config)
        self.build()

    def drop(self, generation=1):
        """Let every worker confirm that it forgot the run."""
        for worker in self.workers:
            worker.last(Drop)
            worker.say(Dropped(generation, worker.index, {"operators": {}}))
        self.settle()

    def of(self, kind):
        return [effect for effect in self.effects if isinstance(effect, kind)]

    @property
    def ended(self):
        found = self.of(Ended)
        assert len(found) <= 1
        return found[0] if found else None

    def release_all(self, worker, sequence=0, generation=1):
        """Say that a worker released its initial capabilities of `chain_graph`."""
        changes = [(location, 0, -1) for location in INITIAL]
        worker.progress(sequence, *changes, generation=generation)


def chain_graph(end_kind="collect", name="chain"):
    """source -> map -> end, one shard per worker."""
    builder = GraphBuilder(name)
    (source,) = builder.add_operator(
        "source", "source", inputs=(), num_outputs=1, logic=Logic(), is_source=True
    )
    (mapped,) = builder.add_operator(
        "map",
        "map",
        inputs=[InputSpec(source, Pipeline())],
        num_outputs=1,
        logic=Logic(),
    )
    builder.add_operator(
        "end",
        end_kind,
        inputs=[InputSpec(mapped, Pipeline())],
        num_outputs=0,
        logic=Logic(),
    )
    return builder.build()
