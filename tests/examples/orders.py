"""Runs a graph on simulated links, in the order of arrival that a seed decides."""

from __future__ import annotations

import random
from pathlib import Path

from timelyml import Result
from timelyml.exchange import CONTROLLER
from timelyml.graph import Graph
from timelyml.runtime.config import RunConfig, ShippedRun
from timelyml.runtime.controller import Controller
from timelyml.runtime.messages import HANDSHAKE, Hello
from timelyml.runtime.record import RunRecord
from timelyml.runtime.run_state import RunPlan
from timelyml.runtime.shipping import ship, worker_codec
from timelyml.runtime.simulation.clock import SimClock
from timelyml.runtime.simulation.network import SimNetwork
from timelyml.runtime.worker import Worker

MAX_ACTIONS = 400_000


def run_in_order(
    graph: Graph, seed: int, directory: Path, *, num_workers: int = 2, **config
) -> Result:
    """Run the very worker and controller that processes run, one step at a time."""
    rng = random.Random(seed)
    network = SimNetwork(worker_codec())
    clock = SimClock(tick_s=rng.choice((0.0, 1e-4, 4e-3)))
    controller = Controller(
        network.transport(CONTROLLER), num_workers, clock=clock, startup_timeout_s=1e9
    )
    workers = [
        Worker(
            index,
            network.transport(index),
            codec=worker_codec(),
            clock=clock,
            spill_directory=directory,
        )
        for index in range(num_workers)
    ]
    for worker in workers:
        network.transport(worker.index).send(
            CONTROLLER, Hello(worker.index, 0, None, HANDSHAKE)
        )
    resolved = graph.resolve(num_workers)
    run_config = RunConfig(**config)
    record = RunRecord(resolved)
    shipped = ship(ShippedRun(resolved, run_config))
    controller.submit(
        RunPlan(1, resolved, run_config, shipped, num_workers, 1e9), record.apply
    )
    endpoints = [controller, *workers]
    deliver_share = rng.choice((0.3, 0.6, 0.9))
    for _ in range(MAX_ACTIONS):
        if record.is_ended:
            return record.future.result()
        clock.advance(rng.random() * 1e-3)
        links = network.busy_links
        if links and rng.random() < deliver_share:
            network.deliver(rng.choice(links))
        else:
            rng.choice(endpoints).step()
    raise AssertionError(f"seed {seed} is not over after {MAX_ACTIONS} actions")
