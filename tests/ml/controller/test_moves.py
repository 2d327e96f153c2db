"""Slices that move while calls come: every call ends as it would have without."""

from __future__ import annotations

import pytest

from tests.ml.controller.test_core import num_over, output_errors, random_calls
from tests.ml.controller.world import World, text_of
from timelyml.errors import PeerError
from timelyml.ml.controller import Fetch, Fetched, Finished, Refused
from timelyml.ml.controller.messages import Acknowledged
from timelyml.ml.controller.resource_messages import (
    AskDevices,
    ChangeDevices,
    ChangeSlice,
    Devices,
    Moved,
    ReformIsland,
)

ISLANDS = {"a": [0, 1], "b": [2], "c": [3, 4]}


def change(world, slice_name, what, island=None, client=1):
    """Ask for a change; return the number of the request."""
    request = len(world.heard[client]) + 10_000
    world.say(client, ChangeSlice(request, slice_name, what, island))
    return request


def answers(world, client=1):
    """What was answered to requests: None, or the text of a refusal."""
    found = {}
    for each in world.heard[client]:
        if isinstance(each, Acknowledged):
            found[each.request] = None
        elif isinstance(each, Refused):
            found[each.request] = text_of(each.error)
    return found


def stands(world, slice_name):
    return world.core._slices[slice_name].devices


class Restless(World):
    """A world whose slices are moved, suspended and resumed all the time."""

    is_restless = False

    def act(self):
        names = self.core.slices
        if self.is_restless and names and self.rng.random() < 0.15:
            what = self.rng.choice(["migrate", "suspend", "resume", "withdraw"])
            if what == "withdraw":
                self.withdraw()
            else:
                island = self.rng.choice([None, *self.islands])
                change(self, self.rng.choice(names), what, island)
        return super().act()

    def withdraw(self):
        if self.withdrawn:
            self.say(1, ChangeDevices(1, (self.withdrawn.pop(),), is_usable=True))
        else:
            host = self.rng.choice(sorted(self.hosts))
            self.withdrawn.append(f"{host}:{self.rng.randrange(2)}")
            devices = tuple(self.withdrawn)
            self.say(1, ChangeDevices(1, devices, is_usable=False, force=True))

    def rest(self):
        """Let everything stand that was suspended."""
        self.is_restless = False
        if self.withdrawn:
            self.withdraw()
        for name in self.core.slices:
            change(self, name, "resume")


def ended(world):
    """Return how the calls ended, once all did and every fetch was answered."""
    world.settle()
    assert num_over(world) == 40
    fetched = [each for each in world.heard[1] if isinstance(each, Fetched)]
    assert len(fetched) == world.num_fetches
    return output_errors(world)


def assert_nothing_is_left(world, live):
    """Let go of all values; the controller then keeps and counts nothing."""
    world.release(live)
    world.settle()
    assert len(world.core.buffers.directory) == 0
    assert len(world.core.dispatch) == 0
    ledger = world.core.buffers.memory.ledger
    used = {*ledger.used_bytes().values(), *ledger.host_bytes().values()}
    assert used == {0}


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("memory_bytes", [4 << 30, 160], ids=["ample", "tight"])
def test_calls_end_as_they_should_however_slices_move(seed, memory_bytes):
    world = Restless(seed, ISLANDS, memory_bytes=memory_bytes)
    world.is_restless, world.withdrawn = True, []
    expected, live = random_calls(world, 40, orders=(0, 1, 2))
    for _ in range(100):
        world.act()
    world.rest()

    found = ended(world)
    for out, fate in expected.items():
        assert found[out] in (fate or {None}), out
    assert_nothing_is_left(world, live)
    for host in world.hosts.values():
        left = host.buffers, host.expected, host.prepares, host.exports, host.early
        assert left == ({}, {}, {}, [], {})
        assert not host.copies
        assert all("@" not in name for name in host.slices)


def test_a_slice_moves_with_its_values_once_what_was_begun_is_over():
    world = World(3, ISLANDS)
    slice_ = world.slice(1, 4, "a")  # which an island that is named later overrules
    x = world.put(slice_)
    begun = [world.call("f", slice_, [x], size=4)[0][0] for _ in range(5)]
    request = change(world, slice_.slice, "migrate", "c")
    later = [world.call("f", slice_, [out], size=4)[0][0] for out in begun]
    world.settle()

    assert answers(world)[request] is None
    assert {host for host, _ in stands(world, slice_.slice)} == {3, 4}
    (moved,) = [each for each in world.heard[1] if isinstance(each, Moved)]
    assert (moved.island, moved.devices) == ("c", stands(world, slice_.slice))
    assert {output_errors(world)[out] for out in begun + later} == {None}
    assert [(out,) for out in begun + later] == [
        *world.hosts[0].launched,
        *world.hosts[3].launched,
    ]
    assert not world.hosts[0].slices
    assert x not in world.hosts[0].copies


def test_a_target_is_compiled_before_anything_stops_at_the_source():
    world = World(1, ISLANDS)
    slice_ = world.slice(1, 2, "b")
    x = world.put(slice_)
    world.call("f", slice_, [x])
    world.settle()
    change(world, slice_.slice, "migrate", "a")
    (early,), _ = world.call("f", slice_, [x])  # the target has said nothing yet
    compiling = [key for key in world.links if key[0] == 0 or key[1] == 0]
    held = {key: world.links.pop(key) for key in compiling}
    world.drain()
    assert output_errors(world)[early] is None
    assert stands(world, slice_.slice) == ((2, 0), (2, 1))

    world.links.update(held)
    world.settle()
    assert stands(world, slice_.slice) == ((0, 0), (0, 1))


def test_a_suspended_slice_keeps_calls_and_gives_its_values():
    world = World(2, ISLANDS)
    slice_, other = world.slice(1, 4, "a"), world.slice(1, 2, "b")
    x = world.put(slice_)
    (before,), _ = world.call("f", slice_, [x], size=4)  # not yet compiled
    request = change(world, slice_.slice, "suspend")
    world.settle()
    assert output_errors(world)[before] is None
    assert answers(world)[request] is None
    assert set(world.core.buffers.memory.ledger.used_bytes().values()) == {0}

    world.say(1, Fetch(x))
    (elsewhere,), _ = world.call("g", other, [x])
    (here,), _ = world.call("f", slice_, [x], size=4)
    put = world.put(slice_)
    (after,), _ = world.call("g", other, [put])
    world.settle()
    assert [e.error for e in world.heard[1] if isinstance(e, Fetched)] == [None]
    assert output_errors(world)[elsewhere] is None
    assert not {here, after} & output_errors(world).keys()

    request = change(world, slice_.slice, "resume")
    world.settle()
    assert answers(world)[request] is None
    assert output_errors(world)[here] is output_errors(world)[after] is None


def test_withdrawn_devices_are_free_once_their_slices_are_elsewhere():
    world = World(4, ISLANDS)
    slice_ = world.slice(1, 2, "a")
    names = tuple(f"{host}:{index}" for host, index in stands(world, slice_.slice))
    world.call("f", slice_, [world.put(slice_)])
    world.say(1, ChangeDevices(7, names, is_usable=False))
    assert 7 not in answers(world)
    world.settle()
    assert answers(world)[7] is None
    world.say(1, AskDevices(8))
    devices = {e.name: e for e in world.heard[1][-1].devices}
    assert isinstance(world.heard[1][-1], Devices)
    assert not any(devices[name].is_usable or devices[name].slices for name in names)
    now = {f"{host}:{index}" for host, index in stands(world, slice_.slice)}
    assert all(devices[name].slices == (slice_.slice,) for name in now)
    finished = [each for each in world.heard[1] if isinstance(each, Finished)]
    assert not any(each.num_calls and not each.buffers for each in finished)

    world.say(1, ChangeDevices(9, ("7:0",), is_usable=False))
    assert "devices are unknown; got ['7:0']" in answers(world)[9]


@pytest.mark.parametrize("is_island", [False, True])
def test_devices_under_slices_of_others_are_taken_by_force_only(is_island):
    world = World(4, ISLANDS, num_clients=3)
    mine = world.slice(1, 4, "a")
    theirs = world.slice(2, 4, "a")
    elsewhere = world.slice(3, 2, "b")
    names = tuple(f"{host}:{index}" for host, index in stands(world, mine.slice))

    def ask(request, *, force):
        if is_island:
            world.say(1, ReformIsland(request, "a", 2, force))
        else:
            change = ChangeDevices(request, names, is_usable=False, force=force)
            world.say(1, change)
        world.settle()
        return answers(world)[request]

    who = "by client 1; got slices of clients [2] there; expected none but its own"
    assert who in ask(7, force=False)
    assert stands(world, theirs.slice) == stands(world, mine.slice)
    assert ask(8, force=True) is None
    world.say(1, AskDevices(9))
    assert not any(e.slices for e in world.heard[1][-1].devices if e.name in names)
    assert stands(world, elsewhere.slice) == elsewhere.devices


def test_a_client_that_leaves_takes_slices_that_move_or_wait():
    world = World(5, ISLANDS, num_clients=2)
    for what in ("migrate", "suspend"):
        slice_ = world.slice(1, 2)
        (x,), _ = world.call("f", slice_, [world.put(slice_)])
        change(world, slice_.slice, what)
        world.call("f", slice_, [x])
        world.put(slice_)
        for _ in range(world.rng.randint(0, 20)):
            world.act()
    world.core.leave(1)
    world.settle()

    assert world.core.slices == []
    for host in world.hosts.values():
        left = host.slices, host.buffers, host.copies, host.prepares
        assert not any(left)
    assert len(world.core.buffers.directory) == 0


def test_changes_that_cannot_be_are_refused():
    world = World(6, {"a": [0]}, num_clients=2)
    slice_ = world.slice(1, 2)
    refused = [
        change(world, slice_.slice, "migrate"),
        change(world, "slice-9", "suspend"),
    ]
    found = [answers(world)[each] for each in refused]
    assert "cannot be migrated; got no other 2 devices" in found[0]
    assert "'slice-9' is not there" in found[1]
    theirs = change(world, slice_.slice, "suspend", client=2)
    assert "is not there" in answers(world, 2)[theirs]


class Mortal(Restless):
    """A world whose hosts die, now and then, while slices move."""

    num_deaths = 0

    def act(self):
        if self.is_restless and self.num_deaths < 3 and self.rng.random() < 0.02:
            there = sorted(self.hosts.keys() - self.dead - self.dismissed)
            self.num_deaths += 1
            self.lose(self.rng.choice(there), PeerError("a worker was killed"))
        return super().act()


@pytest.mark.parametrize("seed", range(10))
def test_nothing_waits_for_ever_however_hosts_die(seed):
    world = Mortal(seed, ISLANDS)
    world.is_restless, world.withdrawn = True, []
    expected, live = random_calls(world, 40, orders=(0, 1, 2))
    for _ in range(200):
        world.act()
    world.rest()

    found = ended(world)
    for out, fate in expected.items():
        is_lost = found[out] is not None and "lost" in found[out]
        assert is_lost or found[out] in (fate or {None}), out
    assert_nothing_is_left(world, live)
    for host in world.hosts.values():
        if host.index in world.dead | world.dismissed:
            continue
        assert (host.buffers, host.copies, host.prepares) == ({}, {}, {})
    assert len(world.core.places.islands) == 3


def test_what_is_put_and_fetched_while_an_island_forms_anew_comes():
    world = World(2, ISLANDS)
    slice_ = world.slice(1, 4, "a")
    world.settle()
    world.lose(0, PeerError("a worker was killed"))
    put = world.put(slice_)
    world.say(1, Fetch(put))
    world.settle()
    assert [e.error for e in world.heard[1] if isinstance(e, Fetched)] == [None]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_put_while_a_slice_moves_is_free_once_who_takes_it_is_over(seed):
    world = World(seed, ISLANDS)
    slice_ = world.slice(1, 2, "a")
    world.call("f", slice_, [world.put(slice_)])
    world.settle()
    change(world, slice_.slice, "migrate")
    while not world.core._slices[slice_.slice].is_closed:
        assert world.act()
    x = world.put(slice_)
    (y,), _ = world.call("f", slice_, [x])
    world.release([x, y])
    world.settle()
    there = world.core.buffers.memory.ledger._live.on(slice_.slice)
    assert not any(live.is_freed for live in there)


def test_what_is_lost_as_the_rest_of_an_island_ends_names_who_died_first():
    world = World(7, ISLANDS)
    x = world.put(world.slice(1, 4, "a"), spec=())
    world.settle()
    world.lose(0, PeerError("worker 0 was killed"))
    world.lose(1, PeerError("worker 1 was aborted by JAX, as worker 0 was gone"))
    world.settle()
    assert "got worker 0 was killed" in output_errors(world)[x]


def test_what_other_hosts_have_survives_the_death_of_one():
    world = World(7, ISLANDS)
    wide, narrow = world.slice(1, 4, "a"), world.slice(1, 2, "a")
    on = {host for host, _ in stands(world, narrow.slice)}
    (host,) = on
    cut, whole, alone = world.put(wide), world.put(wide, spec=()), world.put(narrow)
    world.settle()
    world.lose(1 - host, PeerError("a worker was killed"))
    world.settle()
    for each in (cut, whole, alone):
        world.say(1, Fetch(each))
    world.settle()

    errors = [each.error for each in world.heard[1] if isinstance(each, Fetched)]
    assert "is lost with island 'a'; got a worker was killed" in text_of(errors[0])
    assert errors[1:] == [None, None]
    outs = [
        world.call("f", wide, [whole], size=4, spec=())[0][0],
        world.call("f", narrow, [alone])[0][0],
    ]
    world.settle()
    assert [output_errors(world)[out] for out in outs] == [None, None]
    assert world.dismissed == {host}


@pytest.mark.parametrize("num_hosts", [1, 3])
def test_an_island_forms_anew_with_fewer_or_more_hosts(num_hosts):
    world = World(8, {"a": [0, 1]})
    slice_ = world.slice(1, 2)
    x = world.put(slice_)
    (out,), _ = world.call("f", slice_, [x])
    world.say(1, ReformIsland(99, "a", num_hosts))
    (later,), _ = world.call("f", slice_, [out])
    world.settle()

    assert answers(world)[99] is None
    assert output_errors(world)[out] is output_errors(world)[later] is None
    assert world.dismissed == {0, 1}
    world.say(1, AskDevices(100))
    assert len(world.heard[1][-1].devices) == 2 * num_hosts
    world.say(1, ReformIsland(101, "b", 1))
    assert "expected one of ['a']" in answers(world)[101]
    world.say(1, ReformIsland(102, "a", 1025))
    assert "1 to 1,024 hosts" in answers(world)[102]


def test_an_island_that_cannot_form_anew_is_lost_by_name():
    world = World(9, {"a": [0, 1], "b": [2]})
    world.has_more_hosts = False
    slice_ = world.slice(1, 4, "a")
    x = world.put(slice_)
    world.lose(0, PeerError("a worker was killed"))
    (out,), _ = world.call("f", slice_, [x], size=4)
    put = world.put(slice_)
    world.settle()
    assert "is lost with island 'a'" in output_errors(world)[out]
    assert "gone with its island 'a'" in output_errors(world)[put]
