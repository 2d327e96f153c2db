"""Runs whose shards leave as bytes, and go on in other runs; sources that wait."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np

from tests.runtime.fakes import FakeClock
from tests.runtime.world import World
from timelyml.runtime.config import RunConfig, ShippedRun
from timelyml.runtime.effects import Ended, Released
from timelyml.runtime.run_plan import RunPlan
from timelyml.runtime.shipping import ship

NUM_SHARDS = 4
NUM_EPOCHS = 6
STEPS_TO_REST = 500
TIMEOUT_S = 30


class Gate:
    """Up to which epoch sources give anything, and whether services answer."""

    open_until = NUM_EPOCHS
    answers = threading.Event()


def records(shard, num_shards):
    """Three payloads of pairs in each epoch of each shard, in two steps."""
    for epoch in range(NUM_EPOCHS):
        for part in range(3):
            while (epoch, part) >= (Gate.open_until, 2):
                yield None
            keys = range(shard, shard + 5)
            yield epoch, [(key % 7, epoch + part + key) for key in keys]


def columns(shard, num_shards):
    for item in records(shard, num_shards):
        if item is None:
            yield None
        else:
            epoch, pairs = item
            keys, values = zip(*pairs, strict=True)
            yield epoch, {"key": np.array(keys), "value": np.array(values, np.float32)}


class Site(World):
    """Starts one run, and lets it go as far as it can; a step takes a millisecond."""

    def __init__(self, num_workers):
        self.clock = FakeClock()
        super().__init__(num_workers, self.clock)

    def start(self, graph, images=None):
        config = RunConfig(max_epochs_ahead=100)
        plan = RunPlan(
            1,
            graph.resolve(self.num_workers),
            config,
            ship(ShippedRun(graph, config)),
            self.num_workers,
        )
        self.controller.start_run(plan, self.effects.append)
        while not all(worker._dataflows for worker in self.workers):
            self._step()  # they start a step later, when the controller knows
        for flow, operator, shard in self._shards():
            if images is not None:
                flow.install_shard(operator, shard, images[operator, shard])

    def take_shards(self):
        """Let the run come to rest; return all its shards."""
        for _ in range(STEPS_TO_REST):
            self._step()
        return {
            (operator, shard): flow.export_shard(operator, shard)
            for flow, operator, shard in self._shards()
        }

    def finish(self):
        deadline = time.monotonic() + TIMEOUT_S  # calls elsewhere take real time
        while time.monotonic() < deadline:
            self._step()
            if self.effects and isinstance(self.effects[-1], Ended):
                if self.effects[-1].error is not None:
                    raise self.effects[-1].error
                return
        raise AssertionError("the run does not end")

    def leave(self):
        """Free what the run holds outside of memory; it was left where it was."""
        for worker in self.workers:
            for flow in worker._dataflows.values():
                flow.close()

    def collected(self):
        """All records, as they can be compared, in order."""
        return [
            (effect.time, shard, comparable(record))
            for effect in self.effects
            if isinstance(effect, Released)
            for shard, payload in effect.items
            for record in payload
        ]

    def _step(self):
        self.clock.pass_(0.001)
        self.controller.step()
        for worker in self.workers:
            worker.step()

    def _shards(self):
        return [
            (flow, instance.index, shard)
            for worker in self.workers
            for flow in worker._dataflows.values()
            for instance in flow.instances
            for shard in instance.shards
        ]


MANY = 10_000  # calls that may be out: none must wait outside of the state


async def asked(record):
    """An answer that is out for as long as the gate is closed."""
    assert await asyncio.to_thread(Gate.answers.wait, TIMEOUT_S)
    return record, "answered"


def comparable(record):
    return repr(record)


def list_all(stream):
    """Collect whole times, sorted, by what is itself state that moves."""
    listed = stream.fold([], lambda so_far, record: [*so_far, record])
    listed.map(lambda found: sorted(found, key=repr)).collect()


def opened_gate():
    """Yield the gate, open; leave it open."""
    Gate.answers.set()
    yield Gate
    Gate.open_until = NUM_EPOCHS
    Gate.answers.set()


def share_the_work(graph, gate, stop_at):
    """What one run gives, and what two give that share its work."""
    gate.open_until = NUM_EPOCHS
    whole = Site(2)
    whole.start(graph)
    whole.finish()
    gate.open_until = stop_at
    gate.answers.clear()
    first, second = Site(2), Site(3)
    first.start(graph)
    images = first.take_shards()
    first.leave()
    gate.open_until = NUM_EPOCHS
    gate.answers.set()
    second.start(graph, images)
    second.finish()
    return sorted(whole.collected()), sorted(first.collected() + second.collected())
