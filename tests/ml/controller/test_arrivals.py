"""Hosts that come while the cluster runs form islands; those that leave are let go."""

from __future__ import annotations

import pytest

from tests.ml.controller.test_core import output_errors
from tests.ml.controller.world import DEVICES, FakeHost, World
from timelyml.errors import PeerError, SliceError
from timelyml.ml.controller import AskSlice, Core, DropSlice, SliceGiven
from timelyml.ml.controller.outbox import StartHosts, ToClient
from timelyml.ml.hosts import Arrived, Formed, HostRefused, Leaving, Present
from timelyml.runtime.failure import unpack_error


def arrive(world, host, island, num_hosts=1):
    """Let a host come; return what it is told."""
    world.hosts[host] = FakeHost(host, world)
    world.core.heard(host, Arrived(island, num_hosts, DEVICES), 0.0)
    return [each.body for each in world.core.flush() if each.host == host]


def form(world, island, hosts):
    for host in hosts:
        arrive(world, host, island, len(hosts))
    world.islands[island] = list(hosts)
    for host in hosts:
        world.core.heard(host, Present("cpu", "cpu", DEVICES), 0.0)
    world.settle()


def test_an_island_is_formed_once_all_its_hosts_have_come():
    world = World(islands={"a": [0]})
    assert arrive(world, 7, "b", 2) == []
    assert arrive(world, 5, "b", 2) == [Formed("b", (7, 5))]
    (late,) = arrive(world, 8, "b", 2)
    assert isinstance(late, HostRefused)
    assert "formed before" in late.reason
    (other,) = [m for m in arrive(world, 9, "") if isinstance(m, Formed)]
    assert other == Formed("island-0", (9,))


@pytest.mark.parametrize("num_hosts", [1, 3, 0])
def test_a_host_that_says_otherwise_than_the_first_is_turned_away(num_hosts):
    world = World(islands={"a": [0]})
    arrive(world, 7, "b", 2)
    (answer,) = arrive(world, 8, "b", num_hosts)
    assert "expected 2 of 2" in answer.reason
    world.core.lose(7, PeerError("gone"), 0.0)
    assert arrive(world, 9, "b")[-1] == Formed("b", (9,)), "nobody waits any more"


def test_a_request_that_waits_is_met_by_an_island_that_comes_whole():
    world = World(islands={"a": [0]}, memory_bytes=100)
    for _ in range(2):
        world.say(1, AskSlice(1, ("x",), (1,), memory_bytes=100))
    world.say(1, AskSlice(2, ("x",), (2,), memory_bytes=100))
    assert isinstance(world.heard[1][-1], SliceGiven)
    arrive(world, 7, "b", 2)
    arrive(world, 8, "b", 2)
    world.core.heard(7, Present("cpu", "cpu", DEVICES), 0.0)
    world.flush()
    assert world.heard[1][-1].request == 1, "not by half an island"
    world.core.heard(8, Present("cpu", "cpu", DEVICES), 0.0)
    world.flush()
    given = world.heard[1][-1]
    assert (given.request, given.island) == (2, "b")


def test_what_runs_on_an_island_that_joined_ends_as_elsewhere():
    world = World(islands={"a": [0]}, num_clients=2)
    form(world, "b", [7, 8])
    here, there = world.slice(1, island="a"), world.slice(2, 4, island="b")
    x = world.put(there, 2, spec=())
    outs, _ = world.call("f", there, [x], client=2, size=4, spec=())
    y = world.put(here)
    mine, _ = world.call("g", here, [y])
    world.settle()
    assert output_errors(world, 2)[outs[0]] is None
    assert output_errors(world)[mine[0]] is None


def test_a_host_that_would_leave_waits_until_its_island_is_empty():
    world = World(islands={"a": [0]})
    form(world, "b", [7, 8])
    slice_ = world.slice(island="b")
    x = world.put(slice_)
    world.core.heard(8, Leaving(30.0), 100.0)
    world.settle()
    assert not world.dismissed
    assert world.core.next_deadline() == 130.0
    world.say(1, DropSlice(slice_.slice))
    world.release([x])
    world.settle()
    assert sorted(world.dismissed) == [7, 8], "one is of no use without the other"
    assert world.core.next_deadline() is None
    assert not output_errors(world)


def test_what_is_left_when_a_host_waits_no_longer_is_lost_by_name():
    world = World(islands={"a": [0]})
    form(world, "b", [7])
    x = world.put(world.slice(island="b"))
    world.core.heard(7, Leaving(30.0), 100.0)
    world.settle()
    world.core.tick(130.0)
    world.dead.add(7)
    world.flush()
    assert world.dismissed == {7}
    assert "lost with island 'b'; got worker 7 left" in output_errors(world)[x]


def test_the_sudden_end_of_a_host_lets_the_others_of_its_island_go():
    world = World(islands={"a": [0], "c": [1, 2]})
    form(world, "b", [7, 8])
    x = world.put(world.slice(island="b"))
    world.lose(8, PeerError("worker 8 is gone"))
    world.settle()
    assert "worker 8 is gone" in output_errors(world)[x]
    assert world.dismissed == {7}
    world.lose(1, PeerError("worker 1 is gone"))
    world.settle()
    assert world.dismissed == {2, 7}, "others take the place of its island"


def asked_of_islands_to_come(timeout_s=None):
    """A controller of an island of two hosts, none of them there; a client asks."""
    core = Core({"a": [0, 1]})
    core.join(1)
    core.handle(1, AskSlice(1, ("x",), (4,), timeout_s=timeout_s), 0.0)
    return core


def lost_at_start(core, host):
    """Lose a host; return the hosts that are to be started, and what the client hears."""
    core.lose(host, PeerError(f"worker {host} starved"), 0.0)
    effects = core.flush()
    started = [each for each in effects if isinstance(each, StartHosts)]
    return started, [each.body for each in effects if isinstance(each, ToClient)]


def test_a_request_is_refused_with_the_reason_if_an_island_never_was_there():
    core = asked_of_islands_to_come()
    started, (refused,) = lost_at_start(core, 0)
    assert started == []
    with pytest.raises(SliceError, match=r"no devices.*'a' is lost: worker 0 starved"):
        raise unpack_error(refused.error)


def test_a_request_waits_for_an_island_that_joins_as_long_as_it_may():
    world = World(islands={"a": [0]})
    arrive(world, 7, "b", 2)
    arrive(world, 8, "b", 2)
    for request, timeout_s in enumerate((0, 5, None)):
        ask = AskSlice(request, ("x",), (2 * DEVICES,), timeout_s=timeout_s)
        world.core.handle(1, ask, 1.0)
    world.flush()
    assert [each.request for each in world.heard[1]] == [0]
    assert world.core.next_deadline() == 6.0
    world.core.tick(6.0)
    world.flush()
    assert [each.request for each in world.heard[1]] == [0, 1]
    for host in (7, 8):
        world.core.heard(host, Present("cpu", "cpu", DEVICES), 7.0)
    world.flush()
    given = world.heard[1][-1]
    assert (given.request, given.island) == (2, "b")
