"""The backward pass and the updates, as ordinary rules and loops of the dataflow.

    head ==dense, cotangents==> embed
    head --sparse, cotangents of rows--> experts --sparse--> embed
    embed, head ==dense broadcast, gradients, one step later==> embed, head

Everything here mirrors an edge or a rule of `flow.py`: an exchange is linear, so
its transpose is the exchange the other way. Differentiation of dataflows is to
write this file by itself.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.moe_routing import model
from examples.moe_routing.config import Settings
from examples.moe_routing.updates import Update, as_numpy, sum_in_order
from timelyml.graph import (
    Broadcast,
    Direct,
    GraphBuilder,
    InputSpec,
    LoopRef,
    Pipeline,
    StreamRef,
)
from timelyml.ml.buckets import pad_rows
from timelyml.ml.compiled import Compiled, compiled
from timelyml.ml.firing import Blocks, Firing, Rule, add_firing_operator
from timelyml.ml.moe import expert_backward, place_slots
from timelyml.progress import epoch_of


def reply(firing: Firing, output: int, blocks: Blocks, results: Any) -> None:
    """Send result rows back to where the blocks came from, slot by slot.

    Rows of `results` stand in the order of the blocks; padding follows them.
    """
    stop = 0
    for source, payload in zip(blocks.sources, blocks.payloads, strict=True):
        start, stop = stop, stop + len(payload["slot"])
        part = {"slot": payload["slot"], "rows": results[start:stop]}
        firing.send_to(output, source, part)


@dataclass(frozen=True, slots=True)
class Head:
    """The outputs of the head's operator."""

    row_cotangents: StreamRef
    cotangents: StreamRef
    gradients: StreamRef
    losses: StreamRef
    weights: StreamRef


@dataclass(frozen=True, slots=True)
class Loops:
    """What flows against the forward edges; open until `connect`."""

    embed_gradients: LoopRef
    head_gradients: LoopRef
    cotangents: LoopRef
    row_cotangents: LoopRef
    row_gradients: LoopRef
    routing: LoopRef

    def into_embed(self) -> list[InputSpec]:
        """Ports 1 to 4 of `embed`."""
        return [
            InputSpec(self.embed_gradients.stream, Broadcast(dense=True)),
            InputSpec(self.cotangents.stream, Pipeline(dense=True)),
            InputSpec(self.row_gradients.stream, Direct()),
            InputSpec(self.routing.stream, Broadcast(dense=True)),
        ]

    def into_experts(self) -> InputSpec:
        """Port 1 of `experts`."""
        return InputSpec(self.row_cotangents.stream, Direct())

    def into_head(self) -> InputSpec:
        """Port 2 of `head`."""
        return InputSpec(self.head_gradients.stream, Broadcast(dense=True))

    def close(
        self,
        head: Head,
        *,
        embed_gradients: StreamRef,
        routing: StreamRef,
        row_gradients: StreamRef,
    ) -> None:
        """Connect every loop to where its stream comes from."""
        self.embed_gradients.connect(embed_gradients)
        self.head_gradients.connect(head.gradients)
        self.cotangents.connect(head.cotangents)
        self.row_cotangents.connect(head.row_cotangents)
        self.row_gradients.connect(row_gradients)
        self.routing.connect(routing)


def open_loops(builder: GraphBuilder, settings: Settings) -> Loops:
    """Open every loop of a step; only gradients arrive a step later."""
    shards = settings.data_shards

    def loop(name: str, num_shards: int, by: int = 0) -> LoopRef:
        return builder.feedback(by=by, name=name, num_shards=num_shards)

    return Loops(
        embed_gradients=loop("embed gradients", shards, by=1),
        head_gradients=loop("head gradients", shards, by=1),
        cotangents=loop("cotangents", shards),
        row_cotangents=loop("row cotangents", shards),
        row_gradients=loop("row gradients", settings.num_experts),
        routing=loop("routing", shards),
    )


@dataclass(frozen=True, slots=True)
class EmbedBackward:
    """Gathers what the tokens of a data shard got back; gives its gradients."""

    pull: Compiled
    top_k: int

    def __call__(self, firing: Firing) -> None:
        """Give the shard's gradients to every data shard, for the next step."""
        cotangents, rows, routing = (firing.inputs[port].rows for port in (2, 3, 4))
        state = firing.state
        kept = state.pop("kept")
        num_slots = kept["chosen"].size
        placed = place_slots(rows["slot"], rows["rows"], num_slots)
        arrived = {
            "cotangents": cotangents,
            "rows": placed.reshape(-1, self.top_k, placed.shape[1]),
            "counts": routing["counts"],
        }
        firing.send(3, as_numpy(self.pull(state["params"], kept, arrived)))


def embed_rule(settings: Settings) -> Rule:
    """Give the backward rule of `embed`."""
    pull = compiled(functools.partial(pull_embed, settings))
    return Rule((2, 3, 4), EmbedBackward(pull, settings.top_k), outputs=(3,))


def pull_embed(settings: Settings, params: Any, kept: Any, arrived: Any) -> Any:
    """Give one shard's gradients of the embedding, as one stacked row.

    Args:
        settings: Sizes of the model.
        params: What the forward pass used.
        kept: Its `context` and `chosen`: the choice is replayed, not made again.
        arrived: `cotangents` of `residual` and `weights`; `rows`
            `(tokens, top_k, d_model)`, gradients from the experts by slot; `counts`
            `(data shards, experts)`, for balance is a matter of the whole batch.
    """
    outputs, pull = jax.vjp(
        lambda p: model.embed_outputs(settings, p, kept["context"], kept["chosen"]),
        params,
    )
    counts = sum_in_order(arrived["counts"])
    balance = functools.partial(model.balance_of, settings, counts)
    (gradients,) = pull(
        (
            arrived["cotangents"]["residual"],
            sum_in_order(jnp.swapaxes(arrived["rows"], 0, 1)),
            arrived["cotangents"]["weights"],
            jax.grad(balance)(outputs[3]),
        )
    )
    return jax.tree.map(lambda leaf: leaf[None], gradients)


@dataclass(frozen=True, slots=True)
class ExpertBackward:
    """Updates an expert by all its rows of a step, and sends gradients of rows."""

    pull: Compiled
    update: Update

    def __call__(self, firing: Firing) -> None:
        """Take one step of the optimiser."""
        blocks, state = firing.inputs[1], firing.state
        inputs = state.pop("kept")
        cotangents = pad_rows(blocks.rows["rows"], len(inputs))
        gradients, row_gradients = self.pull(state["params"], inputs, cotangents)
        self.update(state, gradients)
        reply(firing, 1, blocks, np.asarray(row_gradients))


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Answers with the weights of an expert, all steps before the time applied."""

    update: Update

    def __call__(self, firing: Firing) -> None:
        """Send the weights of this expert."""
        state = firing.state
        self.update.catch_up(state, epoch_of(firing.time))
        firing.send(2, [("experts", firing.shard.index, as_numpy(state["params"]))])


def expert_rules(update: Update) -> list[Rule]:
    """Give the backward rule of `experts`, and the one that tells its weights."""
    # The update is compiled apart: its shapes do not depend on the number of rows,
    # and it takes longer to compile than all the rest.
    backward = ExpertBackward(compiled(pull_expert), update)
    return [
        Rule((1,), backward, outputs=(1,), later=(0,)),
        Rule((0, 1, 2), ExpertWeights(update), outputs=(2,), asked_by=(2,)),
    ]


def pull_expert(
    params: Any, rows: jax.Array, cotangents: jax.Array
) -> tuple[Any, jax.Array]:
    """Give an expert's gradients, as one stacked row, and those of its rows."""
    gradients, row_gradients = expert_backward(params, rows, cotangents)
    return jax.tree.map(lambda leaf: leaf[None], gradients), row_gradients


@dataclass(frozen=True, slots=True)
class HeadTurn:
    """Combines expert rows, predicts, and starts the way back."""

    turn: Compiled
    update: Update
    top_k: int

    def __call__(self, firing: Firing) -> None:
        """Send losses, cotangents and gradients, or the final weights."""
        expert_rows, forward, gradients = (firing.inputs[port] for port in (0, 1, 2))
        state = firing.state
        if gradients:
            self.update(state, gradients.rows)
        if not forward:  # the clock stopped: these are the final weights
            if firing.shard.index == 0:
                firing.send(4, [("head", 0, as_numpy(state["params"]))])
            return
        routed, rows = forward.rows, expert_rows.rows
        num_slots = routed["weights"].size
        placed = place_slots(rows["slot"], rows["rows"], num_slots)
        placed = placed.reshape(-1, self.top_k, placed.shape[1])
        loss, back = as_numpy(self.turn(state["params"], routed, placed))
        by_slot = back["rows"].reshape(num_slots, -1)
        reply(firing, 0, expert_rows, by_slot[rows["slot"]])
        firing.send(1, {key: back[key] for key in ("residual", "weights")})
        firing.send(2, back["params"])
        firing.send(3, {"loss": loss[None]})


def turn_head(
    settings: Settings, params: Any, routed: Any, expert_rows: jax.Array
) -> tuple[jax.Array, dict[str, Any]]:
    """Give one shard's part of the loss and its gradients by all inputs."""

    def loss_of(params: Any, residual: Any, weights: Any, rows: Any) -> jax.Array:
        forward = {"residual": residual, "weights": weights}
        return model.head_loss(settings, params, forward, rows, routed["target"])

    loss, gradients = jax.value_and_grad(loss_of, argnums=(0, 1, 2, 3))(
        params, routed["residual"], routed["weights"], expert_rows
    )
    return loss, {
        "params": jax.tree.map(lambda leaf: leaf[None], gradients[0]),
        "residual": gradients[1],
        "weights": gradients[2],
        "rows": gradients[3],
    }


def add_head(
    loops: Loops,
    results: StreamRef,
    forward: StreamRef,
    *,
    settings: Settings,
    update: Update,
) -> Head:
    """Add the head, which is told of every step by the embedding's dense edge."""
    turn = compiled(functools.partial(turn_head, settings))
    outputs = add_firing_operator(
        results.builder,
        "head",
        # Ports: 0 results of experts, 1 what went past them, 2 gradients.
        [
            InputSpec(results, Direct()),
            InputSpec(forward, Pipeline(dense=True)),
            loops.into_head(),
        ],
        [
            Rule(
                (0, 1, 2),
                HeadTurn(turn, update, settings.top_k),
                outputs=(0, 1, 2, 3, 4),
            )
        ],
        num_outputs=5,
        num_shards=settings.data_shards,
        regular=True,
        on_start=functools.partial(start_head, settings, update),
    )
    return Head(*outputs)


def start_head(settings: Settings, update: Update, shard: Any) -> None:
    """Put the head's first weights in place."""
    update.start(shard, model.init_head(settings))
