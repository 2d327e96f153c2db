"""Training as a dataflow: clock, batches, one differentiated function, and its report.

    clock =dense=> batches =dense=> attend, route --sparse--> experts --sparse--> attend
                                       (and so on, layer by layer) ... --sparse--> head

One epoch is one training step. `losses` is all that is written of the model here: a
dataflow function of parameters and a batch. Data shards hold the same copy of attention,
routers and head; each expert is a shard of its own. The way back, the sums of gradients
and the updates are its transpose, made by `train_step`. Where batches come from, if not
from a clock, is in `inputs.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from examples.corpus import Corpus
from examples.moe_routing import model
from examples.moe_routing.config import Settings
from examples.moe_routing.inputs import TextFeed, add_batches
from timelyml.graph import Gather, Graph, GraphBuilder, InputSpec, StreamRef
from timelyml.ml import Checkpoint, Checkpoints, MoE, rows, sharded, train_step
from timelyml.ml.firing import Firing, Rule, add_firing_operator
from timelyml.ml.sharded import Trained
from timelyml.operators.outputs import collect
from timelyml.progress import epoch_of

REPORT = "reports"
WEIGHTS = "weights"
SAVED = "saved"


def layer_of(settings: Settings) -> MoE:
    """Give the mixture-of-experts layer of the model."""
    # The mean load: below it, compiling costs more than padding.
    mean = settings.tokens * settings.top_k // settings.num_experts
    return MoE(
        num_experts=settings.num_experts,
        top_k=settings.top_k,
        smallest=max(16, mean),
        num_shards=settings.expert_shards,
        replicas=dict.fromkeys(settings.replicate, 2),
        keeps=True,
    )


def losses(settings: Settings, params: Mapping[str, Any], batch: Any) -> Any:
    """Give each shard's part of the loss, and what is reported of a step.

    Args:
        settings: Sizes of the model.
        params: Of the shape of `model.init_all`'s.
        batch: `context` and `target` columns of one data shard.
    """
    moe = layer_of(settings)
    begin, go_on, head = (
        functools.partial(function, settings)
        for function in (model.begin, model.go_on, model.head_loss)
    )
    residual, mixed = None, None
    balances, counts = [], []
    for layer in params["layers"]:
        if mixed is None:
            seen = params["table"], layer["attention"], batch["context"]
            residual, normal = sharded.call(begin, *seen, name="attend", keeps=True)
        else:
            seen = layer["attention"], residual, mixed
            residual, normal = sharded.call(go_on, *seen, name="attend", keeps=True)
        mixed, routing = moe(layer["moe"], normal)
        # Balanced, a layer's own loss is `top_k`; here it is 1, times its factor.
        factor = settings.balance / settings.top_k / settings.layers
        balances.append(moe.losses(routing, balance=factor))
        counts.append(routing.sums.counts)
    entropy = sharded.call(
        head, params["head"], residual, mixed, batch["target"], name="head"
    )
    return (entropy, balances), (entropy, balances, counts)


@dataclass(frozen=True, slots=True)
class Report:
    """Sums what the data shards measured into one record per step."""

    layers: int
    num_experts: int
    first: int

    def __call__(self, firing: Firing) -> None:
        """Send the record of the step."""
        entropy, *rest = (firing.inputs[port].rows for port in sorted(firing.inputs))
        balances, counts = rest[: self.layers], rest[self.layers :]
        by_layer = [each.reshape(-1, self.num_experts).sum(axis=0) for each in counts]
        firing.send(
            0,
            {
                "step": np.array([self.first + epoch_of(firing.time)]),
                "loss": entropy.sum(axis=0, keepdims=True),
                "balance": np.sum([each.sum() for each in balances], keepdims=True),
                "counts": np.stack(by_layer)[None],  # (1, layers, experts)
            },
        )


@dataclass(frozen=True, slots=True)
class Job:
    """What a run does: from which step on, up to which, and what it saves.

    Attributes:
        settings: Sizes of the model.
        corpus: Text to train on; travels with the graph, unless there is a feed.
        steps: Stop after so many; by default after those of the settings.
        feed: Gives the batches in its place.
        checkpoints: Where it saves what it has learnt.
        resume: Go on from there.
    """

    settings: Settings
    corpus: Corpus
    steps: int | None = None
    feed: TextFeed | None = None
    checkpoints: Checkpoints | None = None
    resume: Checkpoint | None = None

    @property
    def todo(self) -> range:
        """The steps to be learnt from."""
        first = 0 if self.resume is None else self.resume.step
        last = self.settings.steps if self.steps is None else self.steps
        return range(first, last)


def build(settings: Settings, corpus: Corpus, **options: Any) -> Graph:
    """Build the dataflow that trains for some steps and collects what it learnt.

    Args:
        settings: Sizes of the model.
        corpus: Text to train on.
        options: See `Job`.

    Returns:
        A graph that collects `REPORT`, one record per step, and, once it has
        trained, `WEIGHTS`; `weights_of` reads them. With checkpoints also `SAVED`.
    """
    return graph_of(Job(settings, corpus, **options))


def graph_of(job: Job) -> Graph:
    """Build the dataflow of a job."""
    builder = GraphBuilder("moe_routing")
    batches = add_batches(
        builder, job.settings, job.corpus, steps=job.todo, feed=job.feed
    )
    reports, trained = add_training(builder, job, batches)
    collect(reports, name=REPORT)
    collect(trained.weights, name=WEIGHTS)
    if trained.saved is not None:
        collect(trained.saved, name=SAVED)
    return builder.build()


def weights_of(settings: Settings, result: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Give the weights that a run collected, in the form of `model.init_all`."""
    weights: dict[str, Any] = sharded.assemble(
        model.init_all(settings), result[WEIGHTS]
    )
    return weights


def add_training(
    builder: GraphBuilder, job: Job, batches: StreamRef
) -> tuple[StreamRef, Trained]:
    """Add the whole training step; give the reports and the streams of the step.

    Args:
        builder: Of the dataflow.
        job: What to do.
        batches: Each data shard's part of the batch of each step.
    """
    settings = job.settings
    rows_like = np.zeros((settings.shard_batch, settings.window), np.uint8)
    like = {"context": rows_like, "target": rows_like}
    step = train_step(
        functools.partial(losses, settings),
        functools.partial(model.optimiser, settings),
        has_aux=True,
        checkpoints=job.checkpoints,
        resume=job.resume,
    )
    trained = step(model.init_all(settings), rows(batches, like))
    entropy, balances, counts = trained.aux
    measured = [entropy, *balances, *counts]
    ports = tuple(range(len(measured)))
    report = Report(settings.layers, settings.num_experts, job.todo.start)
    (reports,) = add_firing_operator(
        builder,
        "report",
        [InputSpec(stream, Gather(dense=True)) for stream in measured],
        [Rule(ports, report, outputs=(0,))],
        num_outputs=1,
        num_shards=1,
        regular=True,
    )
    return reports, trained
