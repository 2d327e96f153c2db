"""Ranks launch their actions in the order of the schedule, whichever values are late.

The controller is the real one; hosts only pretend to compute, and a seed says when what
they launched ends.
"""

from __future__ import annotations

import pickle

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.ml.controller.world import World
from timelyml import ml
from timelyml.ml.client.client import Client
from timelyml.ml.controller import Call, Register

RANKS, MICROBATCHES = 4, 8
ISLANDS = {f"island-{rank}": [rank] for rank in range(RANKS)}


class WorldLink:
    """The way of a client to a controller that is driven by the test."""

    def __init__(self, world):
        self.world = world
        self.calls = {}  # what computes what, by its first result

    def connect(self, receive):
        self.world.heard[1] = self
        self.append = receive  # as of the list of what a client heard
        return 1, 4096

    def send(self, message):
        if isinstance(message, Register):
            made = pickle.loads(message.pickled)  # of this test
            self.world.computations[made.identity] = made
        elif isinstance(message, Call):
            self.calls[message.outs] = message
        self.world.say(1, message)

    def close(self):
        """Nothing is to be ended."""


def stage(params, x):
    return jnp.tanh(x @ params["w"])


def loss_fn(y, target):
    return jnp.sum((y - target) ** 2), jnp.float32(y.shape[0])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("schedule", ["zbv", "interleaved-zb"])
def test_actions_of_a_rank_are_launched_in_the_order_of_the_schedule(schedule, seed):
    world = World(seed, islands=ISLANDS)
    link = WorldLink(world)
    client = Client(link, max_unfinished_calls=4096)
    slices = [client.slice({"data": 1}, island=name) for name in ISLANDS]
    pipe = ml.pipeline(
        [stage] * (2 * RANKS),
        slices=slices,
        schedule=schedule,
        num_microbatches=MICROBATCHES,
    )
    step = pipe.train_step(loss_fn, optax.sgd(0.1))
    state = step.init([{"w": np.zeros((4, 4), np.float32)}] * (2 * RANKS))
    rows = np.zeros((MICROBATCHES, 4), np.float32)
    step(state, rows, rows)
    world.settle()

    for rank, host in world.hosts.items():
        calls = [link.calls[outs] for outs in host.launched]
        names = [world.computations[each.computation].name for each in calls]
        parts = [name.removeprefix("stage_") for name in names if "stage" in name]
        expected = [action.op.name for (action,) in pipe.schedule.rows[rank]]
        assert [each.upper() for each in parts] == expected
        numbers = [each.outs[0] for each in calls if each.order]
        assert numbers == sorted(numbers)  # as they were started
    client.close()
