"""Trains the model on islands of worker processes, and traces its last steps."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from examples.corpus import Corpus
from examples.pipeline import model
from examples.pipeline.unpipelined import batch_of
from examples.two_islands.config import ISLANDS, Settings
from examples.two_islands.overlap import Bar, bars_of
from examples.two_islands.replicas import AXIS, Replicas
from timelyml import ml

AHEAD = 2
"""Steps that are started before the loss of one is looked at."""
TRACED = 3
"""Last steps, which are traced."""
UNTIMED = 2
"""First steps, which compile."""


@dataclass(slots=True)
class Trained:
    """What training gave.

    Attributes:
        losses: In nats, by step.
        times: Seconds since the start at which each was known.
        bars: What islands did in the last steps.
    """

    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)

    def tokens_per_s(self, settings: Settings) -> float:
        """Give the bytes learnt from per second, without the steps that compile."""
        times = self.times[UNTIMED - 1 :]
        if len(times) < 2:
            return 0.0
        tokens = (len(times) - 1) * settings.batch * settings.length
        return tokens / (times[-1] - times[0])


def train(settings: Settings, corpus: Corpus, *, num_islands: int) -> Trained:
    """Train on so many islands, which have the same number of devices in all."""
    layers, params = model.layers_of(settings.model), model.init(settings.model)
    tokens, _ = batch_of(corpus, settings.model, 0)
    costs = ml.estimated_costs(layers, params, tokens)
    cut = ml.partition(layers, settings.chunks, costs=costs)
    devices = settings.devices * ISLANDS // num_islands
    with ml.local(
        islands=num_islands,
        devices_per_island=devices,
        hosts_per_island=settings.hosts,
    ) as client:
        slices = [
            client.slice({AXIS: devices}, island=f"island-{index}")
            for index in range(num_islands)
        ]
        optimiser = model.optimiser(settings.model)
        weights = cut.params_of(params)
        replicas = Replicas(cut.stages, weights, model.loss_fn, optimiser, slices)
        run = _Run(replicas, settings, corpus, replicas.init())
        num_traced = min(TRACED, settings.steps - 1)
        for step in range(settings.steps - num_traced):
            run.start(step)
            run.take(AHEAD)
        run.take(0)
        with client.resources.trace() as trace:
            for step in range(settings.steps - num_traced, settings.steps):
                run.start(step)
            run.take(0)
        run.trained.bars = bars_of(trace)
    return run.trained


@dataclass(slots=True)
class _Run:
    """Steps under way: some are started before the loss of an earlier one is known."""

    replicas: Replicas
    settings: Settings
    corpus: Corpus
    state: Any
    trained: Trained = field(default_factory=Trained)
    began: float = field(default_factory=time.perf_counter)
    pending: deque[Any] = field(default_factory=deque)

    def start(self, step: int) -> None:
        """Start a step."""
        inputs, target = batch_of(self.corpus, self.settings.model, step)
        count = np.float32(max(1, int((target > 0).sum())))
        batch = self.replicas.put(inputs, target)
        self.state, losses = self.replicas(self.state, batch, count)
        self.pending.append(losses)

    def take(self, num_left: int) -> None:
        """Wait for losses, until no more steps than these are under way."""
        while len(self.pending) > num_left:
            losses = self.pending.popleft()
            self.trained.losses.append(sum(float(each) for each in losses))
            self.trained.times.append(time.perf_counter() - self.began)
