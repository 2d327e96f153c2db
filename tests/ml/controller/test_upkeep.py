"""What hosts are told beside launches goes in epochs, which close whatever happens."""

from __future__ import annotations

import pickle

import pytest

from tests.ml.controller.test_core import random_calls
from tests.ml.controller.world import World, computation
from timelyml.errors import PeerError
from timelyml.ml.controller import Register
from timelyml.ml.controller.code import MAX_UNUSED
from timelyml.ml.controller.monitored import AskHosts, Hosts
from timelyml.ml.controller.outbox import Outbox, ToHost, Upkeep
from timelyml.ml.functions import LogicalMesh
from timelyml.ml.hosts import CarriedOut, CleanUp, Holdings


def orders_of(world, kind):
    return [x for each in world.upkeep for x in each.orders if isinstance(x, kind)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("memory_bytes", [4 << 30, 160], ids=["ample", "tight"])
def test_hosts_drop_all_of_a_gone_client_in_epochs_that_close(seed, memory_bytes):
    world = World(seed, num_clients=2, memory_bytes=memory_bytes)
    mine = world.slice(2, 2, "a")
    x = world.put(mine, client=2)
    random_calls(world, 30)
    y, _ = world.call("mine", mine, [x], client=2)  # may wait for the memory of others
    world.core.leave(1)
    world.settle()

    assert orders_of(world, CleanUp)
    assert world.core.slices == [mine.slice]
    for host in world.hosts.values():
        assert host.slices.keys() <= {mine.slice}
        assert (host.buffers | host.copies).keys() <= {x, *y}
    assert world.hosts[0].buffers.get(y[0], "missing") is None


def test_upkeep_comes_after_what_its_host_was_told_before_in_the_same_step():
    outbox = Outbox()
    outbox.order(0, "make a slice")
    outbox.book(0).releases.append(7)
    outbox.order(1, "make it too")  # was told nothing before
    outbox.order(0, "leave")
    outbox.book(0).releases.append(8)
    effects = outbox.flush()

    orders = [(x.host, x.orders) for x in effects if isinstance(x, Upkeep)]
    releases = [x.body.releases for x in effects if isinstance(x, ToHost)]
    assert orders == [(0, ("make a slice",)), (1, ("make it too",)), (0, ("leave",))]
    assert releases == [(7,), (8,)]
    assert [type(x) for x in effects] == [Upkeep, Upkeep, ToHost, Upkeep, ToHost]


@pytest.mark.parametrize("seed", range(8))
def test_who_asks_for_hosts_is_answered_by_those_that_are_left(seed):
    world = World(seed, num_clients=2)
    slices = [world.slice(1, 2, island) for island in ("a", "b")]
    world.settle()
    world.say(1, AskHosts(7))
    world.say(2, AskHosts(8))
    for _ in range(seed):
        world.act()
    world.lose(2, PeerError("host 2 died"))
    world.settle()

    for client, request in ((1, 7), (2, 8)):
        (found,) = [x for x in world.heard[client] if isinstance(x, Hosts)]
        assert found.request == request
        hosts = [info for info in found.hosts if info.host < 2]
        assert [info.island for info in hosts] == ["a", "a"]
        assert hosts[0].num_slices == sum(x.island == "a" for x in slices)


def test_an_epoch_is_open_until_each_host_has_carried_it_out():
    world = World()
    world.slice(1, 4, "a")
    epoch = world.upkeep[-1].epoch

    world.core.heard(0, CarriedOut(epoch + 1), 0.0)
    world.core.heard(1, CarriedOut(epoch), 0.0)
    assert world.core.num_open_epochs == 1
    world.core.heard(1, CarriedOut(epoch + 1), 0.0)

    assert world.core.num_open_epochs == 0


def test_hosts_are_listed_while_functions_are_compiled():
    world = World()
    slice_ = world.slice(1, 4, "a")
    world.settle()
    made = computation("f", 1, 1, LogicalMesh(("x",), (4,)))
    world.say(1, Register(made.identity, slice_.slice, pickle.dumps(made)))
    world.say(1, AskHosts(7))
    epoch = world.upkeep[-1].epoch
    for host in world.hosts:
        world.core.heard(host, Holdings(epoch, 100 + host, 1, 0, 0, 0, 0), 0.0)
    world.flush()

    (found,) = [x for x in world.heard[1] if isinstance(x, Hosts)]
    assert [x.process_id for x in found.hosts] == [100, 101, 102]
    assert [x.num_open_epochs for x in found.hosts] == [1, 1, 0]


def test_functions_of_gone_clients_are_forgotten_beyond_those_registered_last():
    world = World(num_clients=2)
    slice_ = world.slice(1, 2, "b")
    kept = world.slice(2, 2, "b")
    made = [
        computation(f"f{n}", 1, 1, LogicalMesh(("x",), (2,)))
        for n in range(MAX_UNUSED + 4)
    ]
    for each in made:
        world.computations[each.identity] = each
        world.say(1, Register(each.identity, slice_.slice, pickle.dumps(each)))
    world.say(2, Register(made[0].identity, kept.slice, pickle.dumps(made[0])))
    world.core.leave(1)
    world.settle()

    forgotten = {each.identity for each in made[1:4]}
    assert world.hosts[2].forgotten == forgotten
    assert not world.hosts[0].forgotten
    # What was forgotten is sent as a whole when it is registered again.
    world.say(2, Register(made[1].identity, kept.slice, pickle.dumps(made[1])))
    assert world.upkeep[-1].orders[0].pickled is not None
