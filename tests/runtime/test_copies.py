"""How often a large array is copied on the whole way from one worker to another.

Counted by what Python and numpy allocate in each process; ZeroMQ sends the memory of
the array itself, and what it receives into is the memory of the array that arrives.
Where shared memory is there by then, rows for the other worker are gathered in it, or
copied into it, which is not counted.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from timelyml import Dataflow
from timelyml.runtime.operator import Logic

ROWS, COLUMNS = 65_536, 256  # float32: 64 MiB
ARRAY_BYTES = ROWS * COLUMNS * 4
LITTLE_BYTES = 2 << 20  # indices of rows, messages, and what the runtime itself needs
NUM_SMALL = 3  # epochs before the large one: then every module is loaded


def array_of(epoch):
    return np.ones((ROWS if epoch == NUM_SMALL else 8, COLUMNS), np.float32)


def on_start(shard):
    shard.state["capability"] = shard.initial_capability()
    if shard.index == 0:
        shard.activate()
    else:
        shard.state.pop("capability").release()


def on_activate(shard):
    """Send one epoch; when it has left, tell what sending it took."""
    capability = shard.state["capability"]
    epoch = capability.time
    if epoch > NUM_SMALL:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        shard.emit("sending", peak - shard.state["before"])
        capability.release()
        return
    rows = array_of(epoch)
    if epoch == NUM_SMALL:
        tracemalloc.start()
        tracemalloc.reset_peak()
        shard.state["before"], _ = tracemalloc.get_traced_memory()
    shard.output().send(epoch, rows)
    capability.downgrade(epoch + 1)
    shard.activate()


def on_batch(shard, delivery):
    if shard.index == 0:
        return
    if delivery.time == NUM_SMALL - 1:
        tracemalloc.start()
    elif delivery.time == NUM_SMALL:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        rows = delivery.payload
        assert not rows.flags.writeable
        shard.emit("receiving", (peak, len(rows), float(rows[::64].sum())))


@pytest.mark.parametrize(
    ("route", "num_sent", "num_copies"),
    [
        (lambda rows: np.ones(len(rows), np.intp), ROWS, 0),
        (lambda rows: np.arange(len(rows)) >= len(rows) // 2, ROWS // 2, 0),
        (lambda rows: np.arange(len(rows)) % 2, ROWS // 2, 1),
    ],
    ids=["to one shard", "in order of shards", "in any order"],
)
def test_an_array_is_copied_at_most_once_from_worker_to_worker(
    route, num_sent, num_copies
):
    flow = Dataflow(num_shards=2)
    (rows,) = flow.operator(
        Logic(on_start=on_start, on_activate=on_activate),
        is_source=True,
        states=("state",),
    )
    routed = rows.exchange(lambda rows: route(rows).astype(np.intp), by_batch=True)
    routed.sink(on_batch)
    told = {}

    flow.run(workers=2, on_message=lambda _o, _s, tag, body: told.update({tag: body}))

    received, num_rows, total = told["receiving"]
    assert (num_rows, total) == (num_sent, num_sent / 64 * COLUMNS)
    assert told["sending"] < num_copies * ARRAY_BYTES + LITTLE_BYTES
    assert told["sending"] >= num_copies * (ARRAY_BYTES - num_sent * COLUMNS * 4)
    assert received < LITTLE_BYTES
