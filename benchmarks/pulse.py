"""The smallest dataflow that closes epochs one after another, driven from inside.

Each shard of `pacer` opens an epoch, sends to the next shard what the benchmark asks
for, gives the epoch up, and waits until the probe behind the crossing has closed it on
all workers; only then does it open the next one. No driver takes part in between.
"""

from __future__ import annotations

import time
from functools import partial

from timelyml import Delivery, Logic, Shard
from timelyml.graph import PER_WORKER, Direct, Graph, GraphBuilder, StreamRef
from timelyml.operators import OperatorBuilder, collect, gather

RECORDS, SAMPLES = 0, 1  # outputs of the pacer


def pulse_graph(*, num_epochs: int, senders: str) -> Graph:
    """Build it; the result's `seconds` holds (shard, seconds of each epoch).

    Args:
        num_epochs: How many epochs each run closes.
        senders: Which shards send one record per epoch to the next shard: `none`
            (a barrier), `first`, or `all`.
    """
    builder = GraphBuilder("pulse")
    loop = builder.feedback(num_shards=PER_WORKER)
    records, samples = _pacer(builder, loop.stream, num_epochs, senders)
    crossing = OperatorBuilder(builder, "crossing", num_shards=PER_WORKER)
    crossing.add_input(records, Direct())
    crossing.add_output()
    (probed,) = crossing.build(Logic(on_batch=_consume))
    loop.connect(probed)
    collect(gather(samples), name="seconds")
    return builder.build()


def _pacer(
    builder: GraphBuilder, probed: StreamRef, num_epochs: int, senders: str
) -> tuple[StreamRef, ...]:
    pacer = OperatorBuilder(
        builder, "pacer", is_source=True, states=("state",), num_shards=PER_WORKER
    )
    pacer.add_input(probed)
    for _ in (RECORDS, SAMPLES):
        pacer.add_output(effects={})  # what it hears of the probe carries no record
    logic = Logic(
        on_start=partial(_open_first, senders=senders),
        on_frontier=partial(_open_next, num_epochs=num_epochs, senders=senders),
    )
    return pacer.build(logic)


def _open_first(shard: Shard, *, senders: str) -> None:
    state = shard.state
    state["records"] = shard.initial_capability(RECORDS)
    state["samples"] = shard.initial_capability(SAMPLES)
    state["seconds"] = []
    _open(shard, 0, senders)


def _open_next(shard: Shard, *, num_epochs: int, senders: str) -> None:
    state = shard.state
    epoch: int = state.get("epoch", num_epochs)
    # Feedback adds 1, so `epoch` is closed once nothing can come at epoch + 1.
    if epoch >= num_epochs or shard.frontier().less_equal(epoch + 1):
        return
    state["seconds"].append(time.perf_counter() - state["opened_at"])
    if epoch + 1 < num_epochs:
        _open(shard, epoch + 1, senders)
        return
    state["epoch"] = num_epochs
    state.pop("records").release()
    with state.pop("samples"):
        shard.output(SAMPLES).send(0, [(shard.index, state["seconds"])])


def _open(shard: Shard, epoch: int, senders: str) -> None:
    state = shard.state
    state["opened_at"] = time.perf_counter()
    state["epoch"] = epoch
    if senders == "all" or (senders == "first" and shard.index == 0):
        receiver = (shard.index + 1) % shard.num_shards
        shard.output(RECORDS).send_to(epoch, receiver, [epoch])
    state["records"].downgrade(epoch + 1)


def _consume(shard: Shard, delivery: Delivery) -> None:
    """Take the record and send nothing."""
