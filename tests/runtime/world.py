"""A cluster in one thread: real workers and a real controller, stepped in turn."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from timelyml.exchange import CONTROLLER, Codec, InProcessHub
from timelyml.runtime.config import RunConfig, ShippedRun
from timelyml.runtime.controller import Controller
from timelyml.runtime.effects import Ended, Released
from timelyml.runtime.messages import HANDSHAKE, Hello
from timelyml.runtime.run_plan import RunPlan
from timelyml.runtime.shipping import ship
from timelyml.runtime.worker import Worker

MAX_STEPS = 20_000


class World:
    """Runs one graph; `effects` is what the controller told the driver."""

    def __init__(self, num_workers=1, clock=time.monotonic):
        hub = InProcessHub()
        directory = Path(tempfile.gettempdir())
        self.num_workers = num_workers
        self.workers = [
            Worker(
                index,
                hub.transport(index),
                codec=Codec([], allow_pickle=True),
                clock=clock,
                spill_directory=directory,
            )
            for index in range(num_workers)
        ]
        self.controller = Controller(
            hub.transport(CONTROLLER), num_workers, clock=clock
        )
        for index in range(num_workers):
            hub.transport(index).send(CONTROLLER, Hello(index, 0, None, HANDSHAKE))
        self.effects = []

    def plan(self, graph, **options):
        """What the controller is asked to run."""
        config = RunConfig(**options)
        return RunPlan(
            1,
            graph.resolve(self.num_workers),
            config,
            ship(ShippedRun(graph, config)),
            self.num_workers,
        )

    def run(self, graph, **options):
        """Run to the end; raise what the run ended with, else return collected."""
        self.controller.start_run(self.plan(graph, **options), self.effects.append)
        for _ in range(MAX_STEPS):
            self.controller.step()
            for worker in self.workers:
                worker.step()
            if self.effects and isinstance(self.effects[-1], Ended):
                if self.effects[-1].error is not None:
                    raise self.effects[-1].error
                return self._collected()
        raise AssertionError(f"the run did not end within {MAX_STEPS} steps")

    @property
    def metrics(self):
        """Of each worker, from the end of the run."""
        return self.effects[-1].metrics

    def _collected(self):
        return [
            (effect.time, shard, body)
            for effect in self.effects
            if isinstance(effect, Released)
            for shard, body in effect.items
        ]
