"""Mixture-of-experts layers run as dataflows, and what comes out of them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from timelyml import Dataflow
from timelyml.ml import rows, sharded, train_step, value_and_grad
from timelyml.operators import collect

TIMEOUT_S = 200


class Pass(NamedTuple):
    """Output, routing and gradients of one pass, as the whole batch has them."""

    out: np.ndarray
    choice: object
    weights: np.ndarray
    sums: object
    """Added over shards."""
    params: dict
    x: np.ndarray


def weighted(out, cot):
    return jnp.sum(out * cot)[None]


def source_of(flow, blocks, name="batch"):
    """A source of one block for each time and shard; `blocks[time][shard]`."""

    def read(shard, num_shards):
        return (at_time[shard] for at_time in blocks)

    return flow.source(read, num_shards=len(blocks[0]), regular=True, name=name)


def collected(trees):
    """Collect streams, and give what reads them from a result, joined over shards."""
    leaves, structure = jax.tree.flatten(trees)
    for index, leaf in enumerate(leaves):
        collect(leaf, name=f"leaf {index}")

    def read(result, time=0):
        found = [
            [block for at, block in result.batches(f"leaf {index}") if at == time]
            for index in range(len(leaves))
        ]
        return jax.tree.unflatten(structure, map(_Blocks, found))

    return read


class _Blocks(list):
    """Blocks of one column, by shard; a leaf of a tree."""


def joined(blocks):
    return np.concatenate(list(blocks))


def layer_pass(moe, params, x, cot, cluster, **options):
    """Run a layer and the way back of `sum(out * cot)` for blocks of tokens."""
    flow = Dataflow("layer")
    blocks = [[{"x": a, "cot": b} for a, b in zip(x, cot, strict=True)]]
    batch = source_of(flow, blocks)

    def loss(params, batch):
        out, routing = moe(params, batch["x"], **options)
        return sharded.call(weighted, out, batch["cot"]), (out, routing)

    build = value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, aux), (by_params, by_batch) = build(params, rows(batch, blocks[0][0]))
    read = collected([aux, by_params, by_batch["x"]])
    (out, routing), gradients, by_x = read(
        cluster.run(flow.build(), timeout_s=TIMEOUT_S)
    )
    return Pass(
        joined(out),
        jax.tree.map(joined, routing.choice),
        joined(routing.weights),
        jax.tree.map(lambda blocks: np.sum(blocks, axis=0).squeeze(), routing.sums),
        {
            # A split parameter comes in parts, another with a leading axis of 1.
            key: jax.tree.map(joined if key == "experts" else _only, tree)
            for key, tree in gradients.items()
        },
        joined(by_x),
    )


def _only(blocks):
    ((gradient,),) = blocks
    return gradient


def train(loss, params, optimiser, blocks, cluster, **options):
    """Train, one step for each time; give losses, what else it tells, and weights."""
    flow = Dataflow("training")
    batch = source_of(flow, blocks)
    step = train_step(loss, optimiser, has_aux=True, **options)
    trained = step(params, rows(batch, blocks[0][0]))
    collect(trained.loss, name="loss")
    collect(trained.weights, name="weights")
    read = collected(trained.aux)
    result = cluster.run(flow.build(), timeout_s=TIMEOUT_S)
    losses = [float(block[0]) for _, block in result.batches("loss")]
    aux = [read(result, time) for time in range(len(blocks))]
    return losses, aux, sharded.assemble(params, result["weights"])
