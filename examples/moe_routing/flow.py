"""The forward pass as a dataflow: clock, batches, embedding, experts, report.

    clock =dense=> batches =dense=> embed --sparse--> experts --sparse--> head
                                      +========== dense, residual ========^

One epoch is one training step. Data shards hold the same copy of embedding and
head; each expert is a shard of its own. What flows back is in `backward.py`; where
batches come from, if not from a clock, in `inputs.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from examples.corpus import Corpus
from examples.moe_routing import backward, model
from examples.moe_routing.config import Settings
from examples.moe_routing.inputs import TextFeed, add_batches
from examples.moe_routing.updates import Update, as_numpy
from timelyml.graph import (
    Broadcast,
    Direct,
    Gather,
    Graph,
    GraphBuilder,
    InputSpec,
    Pipeline,
    StreamRef,
)
from timelyml.ml.buckets import bucket_size, pad_rows
from timelyml.ml.compiled import Compiled, compiled
from timelyml.ml.firing import Firing, Rule, add_firing_operator
from timelyml.ml.moe import expert_forward, plan_dispatch
from timelyml.operators.outputs import collect
from timelyml.progress import epoch_of

REPORT = "reports"
WEIGHTS = ("embed weights", "expert weights", "head weights")


@dataclass(frozen=True, slots=True)
class EmbedForward:
    """Embeds and routes; before that, takes over the gradients of the last step."""

    embed: Compiled
    update: Update
    num_experts: int

    def __call__(self, firing: Firing) -> None:
        """Send rows to experts, or the final weights once the clock has stopped."""
        batches, gradients = firing.inputs[0], firing.inputs[1]
        state = firing.state
        if gradients:
            self.update(state, gradients.rows)
        if not batches:  # the clock stopped: these are the final weights
            if firing.shard.index == 0:
                firing.send(4, [("embed", 0, as_numpy(state["params"]))])
                firing.send(5, [firing.time])
            return
        batch = batches.rows
        routed = as_numpy(self.embed(state["params"], batch["context"]))
        state["kept"] = {"context": batch["context"], "chosen": routed["chosen"]}
        plan = plan_dispatch(routed["chosen"], self.num_experts)
        rows = {"slot": plan.slots, "rows": routed["rows"][plan.tokens]}
        stop = 0
        for expert in np.flatnonzero(plan.counts).tolist():
            start, stop = stop, stop + int(plan.counts[expert])
            part = {key: column[start:stop] for key, column in rows.items()}
            firing.send_to(0, expert, part)
        forward = ("residual", "weights")
        firing.send(1, {k: routed[k] for k in forward} | {"target": batch["target"]})
        sums = ("counts", "probability_sums")
        firing.send(2, {key: routed[key][None] for key in sums})


@dataclass(frozen=True, slots=True)
class ExpertForward:
    """Computes all rows of one expert at one step, and sends them back."""

    forward: Compiled
    update: Update
    smallest_bucket: int

    def __call__(self, firing: Firing) -> None:
        """Send results back to the data shards that rows came from."""
        blocks, state = firing.inputs[0], firing.state
        self.update.catch_up(state, epoch_of(firing.time))
        rows = blocks.rows
        size = bucket_size(len(rows["slot"]), smallest=self.smallest_bucket)
        padded = pad_rows(rows["rows"], size)
        state["kept"] = padded
        results = np.asarray(self.forward(state["params"], padded))
        backward.reply(firing, 0, blocks, results)


@dataclass(frozen=True, slots=True)
class Report:
    """Sums what the data shards measured into one record per step."""

    balance: Compiled

    def __call__(self, firing: Firing) -> None:
        """Send the record of the step."""
        routing, losses = firing.inputs[0].rows, firing.inputs[1].rows
        counts = routing["counts"].sum(axis=0)
        sums = routing["probability_sums"].sum(axis=0)
        balance = self.balance(counts, sums)
        firing.send(
            0,
            {
                "step": np.array([firing.time]),
                "loss": losses["loss"].sum(axis=0, keepdims=True),
                "balance": np.asarray(balance)[None],
                "counts": counts[None],
            },
        )


def _start_embed(settings: Settings, update: Update, shard: Any) -> None:
    update.start(shard, model.init_embed(settings))


def _start_expert(settings: Settings, update: Update, shard: Any) -> None:
    update.start(shard, model.init_expert(settings, shard.index))


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
        trained, `WEIGHTS`: (part, index, weights).
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
    for stream, name in zip(weights, WEIGHTS, strict=True):
        collect(stream, name=name)
    return builder.build()


def weights_of(result: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Give the weights that a run collected, in the form of `dense.init_all`."""
    (embed,), (head,) = result["embed weights"], result["head weights"]
    experts = sorted(result["expert weights"], key=lambda record: int(record[1]))
    return {
        "embed": embed[2],
        "experts": [record[2] for record in experts],
        "head": head[2],
    }


def add_training(
    builder: GraphBuilder, settings: Settings, batches: StreamRef
) -> tuple[StreamRef, tuple[StreamRef, ...]]:
    """Add the whole training step; give the reports and the streams of weights.

    Args:
        builder: Of the dataflow.
        settings: Sizes of the model.
        batches: Each data shard's part of the batch of each step.
    """
    update = Update.of(settings)
    loops = backward.open_loops(builder, settings)
    embed = compiled(functools.partial(model.embed, settings))
    balance = compiled(functools.partial(model.balance_of, settings))
    # Half of the mean load: below it, compiling costs more than padding.
    smallest = max(16, settings.batch * settings.top_k // settings.num_experts // 2)
    rows, forward, routing, embed_gradients, embed_weights, ask = add_firing_operator(
        builder,
        "embed",
        # Ports: 0 batches, 1 gradients of the last step, 2 to 4 what comes back.
        [
            InputSpec(batches, Pipeline(dense=True)),
            *loops.into_embed(),
        ],
        [
            Rule(
                (0, 1),
                EmbedForward(embed, update, settings.num_experts),
                outputs=(0, 1, 2, 4, 5),
            ),
            backward.embed_rule(settings),
        ],
        num_outputs=6,
        regular=True,
        on_start=functools.partial(_start_embed, settings, update),
    )
    results, row_gradients, expert_weights = add_firing_operator(
        builder,
        "experts",
        # Ports: 0 rows, 1 cotangents of their results, 2 who asks for the weights.
        [InputSpec(rows, Direct()), loops.into_experts(), InputSpec(ask, Broadcast())],
        [
            Rule(
                (0,),
                ExpertForward(compiled(expert_forward), update, smallest),
                outputs=(0,),
            ),
            *backward.expert_rules(update),
        ],
        num_outputs=3,
        num_shards=settings.num_experts,
        on_start=functools.partial(_start_expert, settings, update),
    )
    head = backward.add_head(loops, results, forward, settings=settings, update=update)
    loops.close(
        head,
        embed_gradients=embed_gradients,
        routing=routing,
        row_gradients=row_gradients,
    )
    (reports,) = add_firing_operator(
        builder,
        "report",
        [
            InputSpec(routing, Gather(dense=True)),
            InputSpec(head.losses, Gather(dense=True)),
        ],
        [Rule((0, 1), Report(balance), outputs=(0,))],
        num_outputs=1,
        num_shards=1,
        regular=True,
    )
    return reports, (embed_weights, expert_weights, head.weights)
