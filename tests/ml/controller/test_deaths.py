"""Hosts that die under several clients with many calls under way: nothing waits for ever."""

from __future__ import annotations

import pytest

from tests.ml.controller.test_core import failure, num_over, output_errors
from tests.ml.controller.test_moves import assert_nothing_is_left, change
from tests.ml.controller.world import World
from timelyml.errors import PeerError
from timelyml.ml.controller import SliceGiven
from timelyml.ml.controller.explained import AskWhy, Why
from timelyml.ml.scheduling import ProportionalShare

ISLANDS = {"a": [0, 1], "b": [2], "c": [3, 4]}
WEIGHTS = (1, 2, 4, 8)
MAX_DEATHS = 5
MAX_UNDER_WAY = 32
ENDS = "failed", "lost", "got a worker was killed"


class Battered(World):
    """A world whose hosts die, slices move, and clients ask why, and leave."""

    is_restless = False
    num_deaths = 0
    num_whys = 0

    def act(self):
        if self.is_restless:
            self.batter(self.rng.random())
        return super().act()

    def flush(self):
        """Send what follows; mostly of several events, as a step of the service has."""
        if not self.is_restless or self.rng.random() < 0.4:
            super().flush()

    def batter(self, chance):
        client = self.rng.choice(sorted(self.values))
        if chance < 0.015 and self.num_deaths < MAX_DEATHS:
            there = sorted(self.hosts.keys() - self.dead - self.dismissed)
            self.num_deaths += 1
            self.lose(self.rng.choice(there), PeerError("a worker was killed"))
        elif chance < 0.05:
            what = self.rng.choice(["migrate", "suspend", "resume"])
            island = self.rng.choice([None, *self.islands])
            change(self, self.rng.choice(self.own(client)), what, island, client)
        elif chance < 0.09:
            self.num_whys += 1
            self.say(client, AskWhy(900_000 + self.num_whys, self.values[client][-1]))
            super().flush()
            assert any(
                isinstance(each, Why) and each.request == 900_000 + self.num_whys
                for each in self.heard[client]
            )
        elif chance < 0.095 and len(self.values) > 2 and self.num_deaths > 1:
            del self.values[client]
            self.core.leave(client)
            self.flush()

    def own(self, client):
        return [n for n, each in self.core._slices.items() if each.client == client]


def burst(world, client, slice_, size):
    """Call at random; return what the calls make, and how many they are."""
    rng, made = world.rng, []
    num_calls = rng.randint(1, MAX_UNDER_WAY)
    for _ in range(num_calls):
        live = world.values[client]
        args = [rng.choice(live) for _ in range(rng.randint(1, 2))]
        name = f"f{client}_{rng.randint(0, 5)}_{size}_{len(args)}"
        outs, identity = world.call(
            name, slice_, args, client=client, size=size, spec=()
        )
        if rng.random() < 0.05:
            world.failures[identity] = failure(name)
        live += outs
        made += outs
        if len(live) > 30:
            world.release([live.pop(rng.randrange(len(live)))], client)
    return made, num_calls


@pytest.mark.parametrize("seed", range(12))
def test_calls_of_all_clients_end_however_hosts_die_under_them(seed):
    memory = {} if seed % 2 else {"memory_bytes": 400}
    world = Battered(seed, ISLANDS, len(WEIGHTS), WEIGHTS, ProportionalShare, **memory)
    world.values, made, num_calls, slices = {}, {}, {}, {}
    for client in range(1, len(WEIGHTS) + 1):
        slices[client] = [
            (world.slice(client, 1, world.rng.choice([None, *ISLANDS])), 1),
            (world.slice(client, 4, world.rng.choice([None, "a", "c"])), 4),
        ]
        puts = [world.put(each, client, spec=()) for each, _ in slices[client]]
        world.values[client], made[client], num_calls[client] = puts, [], 0
    world.is_restless = True
    for _ in range(6):
        for client in sorted(world.values):
            if client in world.values:  # it may leave while others call
                outs, count = burst(world, client, *world.rng.choice(slices[client]))
                made[client] += outs
                num_calls[client] += count
            for _ in range(world.rng.randint(0, 40)):
                world.act()
    world.is_restless = False
    for name, slice_ in list(world.core._slices.items()):
        change(world, name, "resume", client=slice_.client)
    world.settle()

    for client, live in world.values.items():
        assert num_over(world, client) == num_calls[client]
        errors = output_errors(world, client)
        for out in made[client]:
            error = errors[out]
            assert error is None or any(each in error for each in ENDS), error
        world.release(live, client)
    assert_nothing_is_left(world, [])
    assert isinstance(world.slice(min(world.values), 1), SliceGiven)
