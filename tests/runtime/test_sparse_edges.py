"""What crosses a sparse edge: something for shards that get rows, nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from tests.runtime.test_worker import chain, summing
from tests.runtime.world import World
from timelyml.exchange import CONTROLLER
from timelyml.graph import Exchange
from timelyml.runtime.messages import DataMessage

NUM_SHARDS = 4096


def messages_of(world):
    """Note the data messages that workers send."""
    sent = []
    for worker in world.workers:
        transport = worker._transport

        def send(peer, message, *lane, inner=transport.send, sender=worker.index):
            if isinstance(message, DataMessage) and peer != CONTROLLER:
                sent.append((sender, peer, message))
            inner(peer, message, *lane)

        transport.send = send
    return sent


def to_few(rows, num_shards):
    return rows % 3 * 1000 + 1  # shards 1, 1001 and 2001


def test_shards_that_get_nothing_cost_nothing():
    graph = chain(
        summing(),
        Exchange(route=to_few),
        payload_of=lambda shard, epoch: np.arange(9),
        num_epochs=5,
        shards=(1, NUM_SHARDS),
    )
    world = World(4)
    sent = messages_of(world)

    collected = world.run(graph)

    assert {shard for _, shard, _ in collected} == {1, 1001, 2001}
    assert {peer for _, peer, _ in sent} == {1}  # all of these stand on worker 1
    parts = [part for _, _, m in sent for block in m.blocks for part in block.parts]
    assert len(parts) == 5 * 3
    for worker, metrics in world.metrics.items():
        sink = metrics["operators"]["sink"]
        expected = (5 * 3, 5 * 3) if worker == 1 else (0, 0)
        assert (sink["batches_in"], sink["notifications"]) == expected


def test_what_a_step_sends_to_a_worker_is_one_message():
    graph = chain(
        summing(),
        Exchange(route=lambda rows, n: rows % n),
        payload_of=lambda shard, epoch: np.arange(NUM_SHARDS),
        num_epochs=1,
        shards=(1, NUM_SHARDS),
    )
    world = World(4)
    sent = messages_of(world)

    collected = world.run(graph)

    assert len(collected) == NUM_SHARDS
    assert sorted((sender, peer) for sender, peer, _ in sent) == [
        (0, 1),
        (0, 2),
        (0, 3),
    ]
    for _, _, message in sent:
        (block,) = message.blocks
        assert len(block.parts) == NUM_SHARDS // 4


@pytest.mark.parametrize("num_workers", [2, 4])
def test_eight_shards_are_spread_evenly_over_two_or_four_workers(num_workers):
    graph = chain(
        summing(),
        Exchange(route=lambda rows, n: rows % n),
        payload_of=lambda shard, epoch: np.arange(8),
        num_epochs=1,
        shards=(8, 8),
    )
    world = World(num_workers)

    world.run(graph)

    # Each of the eight producers has a row for each of the eight consumers.
    by_worker = [m["operators"]["sink"]["batches_in"] for m in world.metrics.values()]
    assert by_worker == [64 // num_workers] * num_workers
