"""Trains the model in stages: each on its slice, all in the order of a schedule."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from examples.corpus import Corpus
from examples.pipeline import model
from examples.pipeline.config import Settings
from examples.pipeline.unpipelined import batch_of
from timelyml import ml
from timelyml.ml.pipeline import Schedule, Timeline

AHEAD = 2
"""Steps that are started before the loss of one is looked at."""
RECORDED = 3
"""Last steps of which the times are taken."""


@dataclass(slots=True)
class Trained:
    """What training gave.

    Attributes:
        losses: In nats, by step.
        times: Seconds since the start at which each was known.
        timelines: What ran when in the last steps.
        peak_live: The most microbatches that each stage held residuals of at once.
        num_recorded: How many steps at the end were timed, and so did not overlap.
        early: The weights of each layer after the steps that are compared.
        params: The weights of each layer at the end.
    """

    schedule: Schedule
    sizes: tuple[int, ...]
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    peak_live: dict[int, int] = field(default_factory=dict)
    num_recorded: int = 0
    early: list[Any] = field(default_factory=list)
    params: list[Any] = field(default_factory=list)


def train(
    settings: Settings,
    corpus: Corpus,
    *,
    compared: int = 0,
    on_step: Callable[[Trained], None] = lambda _: None,
) -> Trained:
    """Train on islands of worker processes of this machine.

    Args:
        settings: Sizes, schedule, steps, seed.
        corpus: What to learn.
        compared: After so many steps weights are kept, to be compared.
        on_step: Called when the loss of one more step is known.
    """
    layers, params = model.layers_of(settings), model.init(settings)
    tokens, _ = batch_of(corpus, settings, 0)
    costs = ml.estimated_costs(layers, params, tokens[: settings.microbatches])
    cut = ml.partition(layers, settings.stages, costs=costs)
    with ml.local(
        islands=settings.islands, devices_per_island=settings.devices_per_island
    ) as client:
        pipe = ml.pipeline(
            cut.stages,
            slices=[
                client.slice({"data": 1}, island=settings.island_of(rank))
                for rank in range(settings.ranks)
            ],
            schedule=settings.schedule,
            num_microbatches=settings.microbatches,
            tied=_ties(settings, cut.sizes),
        )
        step = pipe.train_step(model.loss_fn, model.optimiser(settings))
        trained = Trained(pipe.schedule, cut.sizes)
        run = _Run(step, settings, corpus, trained, compared, on_step)
        trained.params = run.all_steps(step.init(cut.params_of(params)))
    return trained


@dataclass(slots=True)
class _Run:
    """Steps under way: some are started before the loss of an earlier one is known."""

    step: ml.TrainStep
    settings: Settings
    corpus: Corpus
    trained: Trained
    compared: int
    on_step: Callable[[Trained], None]
    began: float = field(default_factory=time.perf_counter)
    pending: deque[Any] = field(default_factory=deque)

    def all_steps(self, state: ml.TrainState) -> list[Any]:
        """Run all of them; return the weights of each layer."""
        records: list[ml.PipelineRecord] = []
        for index in range(self.settings.steps):
            record = None
            if index >= max(self.settings.steps - RECORDED, 1):  # the first compiles
                record = ml.PipelineRecord()
                records.append(record)
                self._take(0)  # or a step would wait in line behind the one before
            inputs, targets = batch_of(self.corpus, self.settings, index)
            state, loss = self.step(state, inputs, targets, record=record)
            self.pending.append(loss)
            self._take(AHEAD)
            if index + 1 == self.compared:
                self.trained.early = _by_layer(state)
        self._take(0)
        self.trained.timelines = [record.timeline() for record in records]
        self.trained.num_recorded = len(records)
        for record in records:
            self.trained.peak_live |= record.peak_live
        return _by_layer(state)

    def _take(self, num_left: int) -> None:
        """Wait for losses, until no more steps than these are under way."""
        while len(self.pending) > num_left:
            self.trained.losses.append(float(self.pending.popleft()))
            self.trained.times.append(time.perf_counter() - self.began)
            self.on_step(self.trained)


def _by_layer(state: ml.TrainState) -> list[Any]:
    stages = jax.tree.map(np.asarray, state.params)
    return [layer for stage in stages for layer in stage]


def _ties(settings: Settings, sizes: tuple[int, ...]) -> list[list[tuple[int, Any]]]:
    """Name the table of embedding and head, if they share it."""
    if not settings.is_tied:
        return []
    return [[(0, (0, "table")), (-1, (sizes[-1] - 1, "table"))]]
