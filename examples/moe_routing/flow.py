"""Training as a dataflow: clock, batches, one differentiated function, and its report.

    clock =dense=> batches =dense=> embed, route --sparse--> experts --sparse--> head

One epoch is one training step. `losses` is all that is written of the model here: a
dataflow function of parameters and a batch. Data shards hold the same copy of embedding,
router and head; each expert is a shard of its own. The way back, the sums of gradients
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
from timelyml.ml import MoE, rows, sharded, train_step
from timelyml.ml.firing import Firing, Rule, add_firing_operator
from timelyml.operators.outputs import collect

REPORT = "reports"
WEIGHTS = "weights"


def layer_of(settings: Settings) -> MoE:
    """Give the mixture-of-experts layer of the model."""
    # Half of the mean load: below it, compiling costs more than padding.
    mean = settings.batch * settings.top_k // settings.num_experts
    return MoE(
        num_experts=settings.num_experts,
        top_k=settings.top_k,
        smallest=max(16, mean // 2),
    )


def losses(settings: Settings, params: Mapping[str, Any], batch: Any) -> Any:
    """Give each shard's part of the loss, and what is reported of a step.

    Args:
        settings: Sizes of the model.
        params: Of the shape of `model.init_all`'s.
        batch: `context` and `target` columns of one data shard.
    """
    layer, embed = layer_of(settings), params["embed"]
    hidden = {key: embed[key] for key in ("table", "mix")}
    residual, normal = sharded.call(
        model.hidden_of, hidden, batch["context"], name="embed"
    )
    experts = {"router": embed["router"], "experts": params["experts"]}
    mixed, routing = layer(experts, normal)
    head = functools.partial(model.head_loss, settings)
    entropy = sharded.call(
        head, params["head"], residual, mixed, batch["target"], name="head"
    )
    # Balanced, the layer's own loss is `top_k`; here it is 1, times its factor.
    balance = layer.losses(routing, balance=settings.balance / settings.top_k)
    return (entropy, balance), (entropy, balance, routing.sums.counts)


@dataclass(frozen=True, slots=True)
class Report:
    """Sums what the data shards measured into one record per step."""

    num_experts: int

    def __call__(self, firing: Firing) -> None:
        """Send the record of the step."""
        entropy, balance, counts = (firing.inputs[port].rows for port in range(3))
        firing.send(
            0,
            {
                "step": np.array([firing.time]),
                "loss": entropy.sum(axis=0, keepdims=True),
                "balance": balance.sum(axis=0, keepdims=True),
                "counts": counts.reshape(1, -1, self.num_experts).sum(axis=1),
            },
        )


def build(
    settings: Settings,
    corpus: Corpus,
    *,
    steps: int | None = None,
    feed: TextFeed | None = None,
) -> Graph:
    """Build the dataflow that trains for some steps and collects what it learnt.

    Args:
        settings: Sizes of the model.
        corpus: Text to train on; travels with the graph, unless there is a feed.
        steps: Stop after so many; by default after those of the settings.
        feed: Gives the batches in its place.

    Returns:
        A graph that collects `REPORT`, one record per step, and, once it has
        trained, `WEIGHTS`; `weights_of` reads them.
    """
    builder = GraphBuilder("moe_routing")
    batches = add_batches(
        builder,
        settings,
        corpus,
        steps=settings.steps if steps is None else steps,
        feed=feed,
    )
    reports, weights = add_training(builder, settings, batches)
    collect(reports, name=REPORT)
    collect(weights, name=WEIGHTS)
    return builder.build()


def weights_of(settings: Settings, result: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Give the weights that a run collected, in the form of `model.init_all`."""
    weights: dict[str, Any] = sharded.assemble(
        model.init_all(settings), result[WEIGHTS]
    )
    return weights


def add_training(
    builder: GraphBuilder, settings: Settings, batches: StreamRef
) -> tuple[StreamRef, StreamRef]:
    """Add the whole training step; give the reports and the weights.

    Args:
        builder: Of the dataflow.
        settings: Sizes of the model.
        batches: Each data shard's part of the batch of each step.
    """
    like = {
        "context": np.zeros((settings.shard_batch, settings.window), np.uint8),
        "target": np.zeros(settings.shard_batch, np.uint8),
    }
    step = train_step(
        functools.partial(losses, settings),
        functools.partial(model.optimiser, settings),
        has_aux=True,
    )
    trained = step(model.init_all(settings), rows(batches, like))
    (reports,) = add_firing_operator(
        builder,
        "report",
        [InputSpec(stream, Gather(dense=True)) for stream in trained.aux],
        [Rule((0, 1, 2), Report(settings.num_experts), outputs=(0,))],
        num_outputs=1,
        num_shards=1,
        regular=True,
    )
    return reports, trained.weights
