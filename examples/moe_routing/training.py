"""Running the dataflow on a cluster, and judging what came out of it."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import optree
from rich.console import Console

from examples.moe_routing import dense, flow
from examples.moe_routing.flow import Job
from examples.moe_routing.report import History, bytes_moved, compiled_sizes, follow
from timelyml import Cluster
from timelyml.runtime.signals import Interrupts

VERIFIED_STEPS = 20
TOLERANCE = 1e-4
"""Relative; float32 sums in another order differ by about 1e-6 after 20 steps."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What one run of the dataflow gave."""

    history: History
    weights: dict[str, Any]
    seconds: float
    metrics: dict[str, Any]
    checkpoint: str | None = None
    """The last one that was saved."""
    was_interrupted: bool = False
    """Whether a signal ended it early, after a whole step."""

    @property
    def digest(self) -> str:
        """A digest of every loss and weight: equal only if all bits are."""
        digest = hashlib.sha256(np.array(self.history.losses).tobytes())
        weights: Any = self.weights
        for leaf in optree.tree_leaves(weights):
            digest.update(np.ascontiguousarray(leaf).tobytes())
        return digest.hexdigest()[:16]

    def traffic(self) -> dict[str, Any]:
        """Bytes that left a worker, and that stayed in one, in all and by edge."""
        between, within = bytes_moved(self.metrics)
        return {
            "bytes_between_workers": sum(between.values()),
            "bytes_within_workers": sum(within.values()),
            "bytes_by_edge": {name: between[name] + within[name] for name in between},
            "compiled_sizes": compiled_sizes(self.metrics),
        }


def train(
    cluster: Cluster, job: Job, *, console: Console, event_log: Path | None = None
) -> Trained:
    """Train on the workers of a cluster; blocks, and shows how far it is.

    SIGINT and SIGTERM end it after a whole step, with the weights learnt so far.
    """
    history = History(job.settings, first=job.todo.start)
    began = time.perf_counter()
    with (
        Interrupts() as interrupts,
        cluster.start(flow.graph_of(job), event_log=event_log) as run,
    ):
        follow(
            run,
            history,
            last=job.todo.stop,
            console=console,
            is_unwanted=lambda: interrupts.was_interrupted,
        )
        result = run.result()
    seconds = time.perf_counter() - began
    saved = result[flow.SAVED] if job.checkpoints is not None else []
    return Trained(
        history,
        flow.weights_of(job.settings, result),
        seconds,
        run.metrics(),
        saved[-1][1] if saved else None,
        interrupts.was_interrupted,
    )


def verify(cluster: Cluster, job: Job, console: Console) -> dict[str, Any]:
    """Train a few steps twice, on the cluster and as one dense program; compare.

    Returns:
        The largest relative difference of losses and of weights, and whether both
        are within the tolerance.
    """
    steps = min(VERIFIED_STEPS, job.settings.steps)
    anew = replace(job, steps=steps, checkpoints=None, resume=None)
    ours = train(cluster, anew, console=console)
    steps = len(ours.history.losses)
    weights, losses = dense.train(job.settings, job.corpus, steps=steps)
    loss_difference = float(
        np.max(np.abs(np.array(ours.history.losses) - losses) / np.abs(losses))
    )
    weight_difference, where = dense.largest_difference(ours.weights, weights)
    return {
        "steps": steps,
        "loss_difference": loss_difference,
        "weight_difference": weight_difference,
        "weight": where,
        "tolerance": TOLERANCE,
        "passed": max(loss_difference, weight_difference) <= TOLERANCE,
    }
