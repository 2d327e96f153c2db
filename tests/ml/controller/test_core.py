"""The controller's core: whatever the links do, calls end, and end rightly."""

from __future__ import annotations

import re

import pytest

from tests.ml.controller.world import World, failure, text_of
from timelyml.errors import PeerError
from timelyml.ml.controller import (
    AskSlice,
    Call,
    Core,
    DropSlice,
    Failed,
    Fetch,
    Fetched,
    Finished,
    Refused,
    SliceGiven,
)
from timelyml.ml.hosts import Orders, Present
from timelyml.ml.scheduling import (
    GangKey,
    Grant,
    Outcome,
    ProgramDone,
    ProportionalShare,
)


def output_errors(world, client=1):
    """What became of each buffer: None, or the text of its error."""
    found = {}
    for message in world.heard[client]:
        if isinstance(message, Finished):
            found.update(dict.fromkeys(message.buffers))
        elif isinstance(message, Failed):
            found.update(dict.fromkeys(message.buffers, text_of(message.error)))
    return found


def num_over(world, client=1):
    return sum(
        message.num_calls
        for message in world.heard[client]
        if isinstance(message, Finished | Failed)
    )


def random_calls(world, num_calls, *, orders=(0,), failing=0.1):
    """Call at random; return what may be said of each result, and what is held.

    Of several arguments that failed, the error of any may be told.
    """
    rng = world.rng
    slices = [
        (world.slice(1, 4, "a"), 4),
        (world.slice(1, 2, "a"), 2),
        (world.slice(1, 2, "b"), 2),
    ]
    live = [world.put(slices[0][0]), world.put(slices[2][0], spec=())]
    errors: dict[int, set[str]] = {buffer: set() for buffer in live}
    expected = {}
    for number in range(num_calls):
        slice_, size = rng.choice(slices)
        args = [rng.choice(live) for _ in range(rng.randint(1, 3))]
        donated = (0,) if rng.random() < 0.3 else ()
        spec = rng.choice([("x",), ()])
        name = f"f{number}"
        outs, identity = world.call(
            name, slice_, args, num_outs=rng.randint(1, 2), size=size, spec=spec,
            donated=donated, order=orders[number % len(orders)],
        )  # fmt: skip
        world.declared.append((slice_.slice, orders[number % len(orders)], outs))
        found = set().union(*(errors[arg] for arg in args))
        if rng.random() < failing:
            world.failures[identity] = failure(name)
            found = found or {f"{name} failed"}
        for out in outs:
            errors[out] = expected[out] = found
        if donated:
            live.remove(args[0])
        live += outs
        for _ in range(rng.randint(0, 6)):
            world.act()
        if rng.random() < 0.2 and len(live) > 2:
            world.release([live.pop(rng.randrange(len(live)))])
        if rng.random() < 0.2:
            world.num_fetches += 1
            world.say(1, Fetch(rng.choice(live)))
    return expected, live


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("memory_bytes", [4 << 30, 160], ids=["ample", "tight"])
def test_calls_end_as_they_should_whatever_is_late(seed, memory_bytes):
    world = World(seed, memory_bytes=memory_bytes)
    expected, live = random_calls(world, 40)
    world.settle()

    assert num_over(world) == 40
    found = output_errors(world)
    for out, fate in expected.items():
        assert found[out] in (fate or {None}), out
    shared = [host.launched for host in world.hosts.values()]
    common = [outs for outs in shared[0] if outs in shared[1]]
    assert common == [outs for outs in shared[1] if outs in shared[0]]

    world.release(live)
    world.settle()
    assert len(world.core.buffers.directory) == 0
    assert len(world.core.dispatch) == 0
    for host in world.hosts.values():
        left = host.buffers, host.expected, host.prepares, host.exports, host.early
        assert left == ({}, {}, {}, [], {})
        assert not host.copies
    ledger = world.core.buffers.memory.ledger
    used = {*ledger.used_bytes().values(), *ledger.host_bytes().values()}
    assert used == {0}
    assert memory_bytes == 160 or not world.num_spilled


@pytest.mark.parametrize("seed", range(5))
def test_who_misses_rows_before_the_controller_knows_why_waits_to_say_why(seed):
    world = World(seed)
    here, there = world.slice(1, 2, "a"), world.slice(1, 2, "b")
    x = world.put(here)
    (slow,), _ = world.call("slow", here, [x])
    (moved,), _ = world.call("move", there, [slow])
    while not world.hosts[0].running:
        world.act()
    world.die(0)
    world.settle()
    assert moved not in output_errors(world)

    world.lose(0, PeerError("worker 0 (pid 7) was killed by SIGKILL"))
    world.settle()
    for each in (x, slow, moved):
        told = output_errors(world)[each]
        assert re.search(r"island 'a'.* worker 0 \(pid 7\) .* by SIGKILL", told), told


@pytest.mark.parametrize("seed", range(20))
def test_an_island_that_dies_takes_only_what_depends_on_it(seed):
    world = World(seed)
    here, there = world.slice(1, 2, "a"), world.slice(1, 2, "b")
    x, y = world.put(here), world.put(there)
    (moved,), _ = world.call("move", there, [x])
    (both,), _ = world.call("both", there, [moved, y])
    (alone,), _ = world.call("alone", there, [y])
    (gone,), _ = world.call("gone", here, [x, y])
    for _ in range(world.rng.randint(0, 12)):
        world.act()
    before = output_errors(world)
    world.lose(0, PeerError("worker 0 was killed"))
    world.settle()

    found = output_errors(world)
    assert found[alone] is None
    assert "is lost with island 'a'" in found[x]
    assert found[gone] is not None
    for out in (moved, both):
        if before.get(out, "unknown") is not None:
            assert found[out] is None or "lost with island 'a'" in found[out]
    (after,), _ = world.call("after", there, [alone])
    (again,), _ = world.call("again", here, [alone])
    world.settle()
    assert output_errors(world)[after] is output_errors(world)[again] is None
    assert num_over(world) == 6
    assert world.slice(1, 4, "a").island == "a"
    assert "a" not in world.core.dispatch.islands.schedulers
    assert world.dismissed == {1}


def test_a_call_costs_one_message_for_each_host():
    world = World(islands={"a": [0, 1, 2, 3]})
    slice_ = world.slice(1, 8)
    x = world.put(slice_)
    world.call("f", slice_, [x], size=8)
    world.settle()
    sent = []
    world.send = lambda sender, receiver, body, lane: sent.append((receiver, body))
    message = Call(
        next(iter(world.computations)), slice_.slice, (x,), (world.buffer(),)
    )

    world.core.handle(1, message, 0.0)
    world.core.handle(
        1, Call(message.computation, slice_.slice, (x,), (world.buffer(),)), 0.0
    )
    world.flush()

    assert sorted(receiver for receiver, _ in sent) == [0, 1, 2, 3]
    for _, orders in sent:
        assert isinstance(orders, Orders)
        assert len(orders.prepares) == len(orders.tickets) == 2


def test_what_a_client_asks_for_after_an_error_is_answered_at_once():
    world = World()
    slice_ = world.slice()
    x = world.put(slice_)
    (bad,), identity = world.call("f", slice_, [x])
    world.failures[identity] = failure("f")
    world.settle()
    world.say(1, Fetch(bad))
    (worse,), _ = world.call("g", slice_, [bad])

    fetched = [each for each in world.heard[1] if isinstance(each, Fetched)]
    assert [text_of(each.error) for each in fetched] == ["f failed"]
    assert output_errors(world)[worse] == "f failed"
    assert all(
        host.launched == [(bad,)] for host in world.hosts.values() if host.launched
    )


def test_a_value_that_is_put_is_told_to_be_there_once_all_its_hosts_have_it():
    world = World()
    x = world.put(world.slice(1, 4, "a"))
    world.say(1, Fetch(x, is_notice=True))

    def is_everywhere():
        return sum(x in host.buffers for host in world.hosts.values()) == 2

    def is_told():
        return Finished(0, (x,), ()) in world.heard[1]

    while not is_everywhere():
        assert not is_told()
        assert world.act()
    world.settle()
    assert is_told()


def test_unknown_buffers_slices_and_computations_fail_only_the_call():
    world = World(num_clients=2)
    slice_, other = world.slice(1), world.slice(2)
    x, theirs = world.put(slice_), world.put(other, client=2)
    (good,), identity = world.call("f", slice_, [x])
    results = [world.buffer() for _ in range(4)]
    world.say(1, Call(identity, slice_.slice, (12345,), (results[0],)))
    world.say(1, Call(identity, "slice-99", (x,), (results[1],)))
    world.say(1, Call("nothing", slice_.slice, (x,), (results[2],)))
    world.say(1, Call(identity, slice_.slice, (theirs,), (results[3],)))
    world.say(1, Fetch(theirs))
    lost = world.put(SliceGiven(0, "slice-98", "a", "cpu", ()))
    world.settle()

    found = output_errors(world)
    assert found[good] is None
    assert "'slice-98' is not there" in found[lost]
    assert "a buffer is not client 1's" in found[results[0]]
    assert "'slice-99' is not there" in found[results[1]]
    assert "is not registered" in found[results[2]]
    assert "a buffer is not client 1's" in found[results[3]]
    fetched = [each for each in world.heard[1] if isinstance(each, Fetched)]
    assert "a buffer is not client 1's" in text_of(fetched[0].error)


@pytest.mark.parametrize("seed", range(20))
def test_a_client_that_leaves_takes_all_that_is_its_own(seed):
    world = World(seed, num_clients=2)
    mine, theirs = world.slice(1, 4, "a"), world.slice(2, 2, "a")
    x, y = world.put(mine), world.put(theirs, client=2)
    for number in range(60):
        (x,), _ = world.call(f"f{number % 3}", mine, [x], size=4)
        (y,), _ = world.call("g", theirs, [y], client=2)
        if number % 10 == 0:
            world.say(1, Fetch(x))
        if world.rng.random() < 0.5:
            world.act()
    world.core.leave(1)
    world.flush()
    world.settle()

    assert world.core.buffers.directory.of_client(1) == []
    assert world.core.slices == [theirs.slice]
    assert set(output_errors(world, 2).values()) == {None}
    assert len(output_errors(world, 2)) == 60
    for host in world.hosts.values():
        assert not host.prepares
        assert not host.promised
        assert mine.slice not in host.slices
        assert all(buffer >> 40 == 2 for buffer in host.buffers)
    (last,), _ = world.call("g", theirs, [y], client=2)
    world.settle()
    assert output_errors(world, 2)[last] is None


def test_a_slice_is_taken_apart_once_nothing_is_left_on_it():
    world = World()
    slice_ = world.slice(1, 2, "b")
    x = world.put(slice_)
    (y,), _ = world.call("f", slice_, [x])
    world.say(1, DropSlice(slice_.slice))
    world.settle()
    assert world.core.slices == [slice_.slice]

    world.release([x, y])
    world.settle()
    assert world.core.slices == []
    assert world.hosts[2].slices == {}


def test_requests_wait_until_all_hosts_have_said_what_they_have():
    core = Core({"a": [0], "b": [1]})
    core.join(1)
    core.handle(1, AskSlice(1, ("x",), (2,), None, "b"), 0.0)
    core.heard(0, Present("cpu", "cpu", 2), 0.0)
    assert core.flush() == []
    core.heard(1, Present("cpu", "cpu", 2), 0.0)
    (*_, given) = core.flush()
    assert given.body.island == "b"


def test_a_request_that_waits_too_long_is_refused():
    world = World(islands={"a": [0]})
    world.say(1, AskSlice(1, ("x",), (2,), None, None, 3 << 30))
    world.say(1, AskSlice(2, ("x",), (2,), None, None, 3 << 30, 5.0))
    assert isinstance(world.heard[1][-1], SliceGiven)
    assert world.core.next_deadline() == 5.0
    world.core.tick(5.0)
    world.flush()

    assert isinstance(world.heard[1][-1], Refused)
    assert world.core.next_deadline() is None


@pytest.mark.parametrize("seed", range(5))
def test_clients_get_device_time_by_their_weights(seed):
    weights = (1, 3)
    world = World(seed, {"a": [0]}, 2, weights, ProportionalShare)
    slices = [world.slice(client, 2) for client in (1, 2)]
    inputs = [world.put(each, client) for client, each in enumerate(slices, 1)]
    for _ in range(400):
        for client in (1, 2):
            given = slices[client - 1], [inputs[client - 1]]
            world.call("f", *given, client=client)
    host = world.hosts[0]
    while len(host.launched) < 464:
        assert world.act()

    counted = [outs[0] >> 40 for outs in host.launched[64:464]]
    assert counted.count(2) == pytest.approx(300, abs=6)


@pytest.mark.parametrize("is_failing", [False, True])
def test_a_long_chain_that_waits_for_its_code_goes_on_call_by_call(is_failing):
    world = World()
    slice_ = world.slice()
    first = x = world.put(slice_)
    for number in range(900):
        name = "g" if number else "f"
        (x,), identity = world.call(name, slice_, [x])
        if is_failing and not number:
            world.failures[identity] = failure("f")
    assert not any(host.launched for host in world.hosts.values())
    world.settle()

    found = output_errors(world)
    assert set(found.values()) == {"f failed" if is_failing else None}
    assert len(found) == 900
    world.release([first, *found])
    world.settle()
    assert len(world.core.buffers.directory) == 0


def test_a_call_that_reads_comes_before_one_that_takes_though_it_is_known_later():
    world = World()
    here, there = world.slice(1, 2, "a"), world.slice(1, 2, "b")
    x, y = world.put(here), world.put(there)
    world.call("take", here, [world.put(here)], donated=(0,))
    world.settle()
    (far,), _ = world.call("far", there, [y])
    (read,), _ = world.call("read", here, [x, far])
    (taken,), _ = world.call("take", here, [x], donated=(0,))
    world.settle()

    launched = [outs for host in world.hosts.values() for outs in host.launched]
    assert launched.index((read,)) < launched.index((taken,))
    assert output_errors(world)[read] is output_errors(world)[taken] is None
    # Nothing was copied: the memory of x was free to be taken.
    assert all(not host.copied for host in world.hosts.values())


def test_idle_values_leave_for_a_call_and_come_back_for_another():
    world = World(islands={"a": [0]}, memory_bytes=40)
    slice_ = world.slice()
    kept = [world.put(slice_, spec=()) for _ in range(2)]  # 16 bytes on each device
    ledger = world.core.buffers.memory.ledger
    assert [ledger.where(each) for each in kept] == [(True, False)] * 2
    (big,), _ = world.call("f", slice_, [kept[1]], spec=())  # and 16 + 4
    world.settle()
    assert [ledger.where(each) for each in kept] == [(False, True), (True, False)]
    assert output_errors(world)[big] is None

    (back,), _ = world.call("f", slice_, [kept[0]], spec=())
    world.settle()
    assert ledger.where(kept[0]) == (True, False)
    assert output_errors(world)[back] is None
    assert max(ledger.used_bytes().values()) <= 40
    world.say(1, Fetch(kept[1]))
    world.settle()
    (fetched,) = [each for each in world.heard[1] if isinstance(each, Fetched)]
    assert fetched.error is None
    assert ledger.where(kept[1]) == (False, True)  # read where it is


@pytest.mark.parametrize("seed", [1, 2, 6])
def test_beyond_the_memory_of_hosts_calls_fail_and_none_waits_for_ever(seed):
    world = World(seed, memory_bytes=136, host_memory_bytes=32)
    _, live = random_calls(world, 60)
    world.settle()

    assert num_over(world) == 60
    refused = [
        text for text in output_errors(world).values() if text and "no room" in text
    ]
    assert refused
    assert all("kept by client 1" in text for text in refused)
    assert len(world.core.buffers.memory) == 0
    world.release(live)
    world.settle()
    assert len(world.core.buffers.directory) == 0


@pytest.mark.sources
def test_what_an_end_lets_begin_is_told_after_what_had_its_place_before(monkeypatch):
    """Memory that an end frees admits what has waited, in the middle of the news."""
    dispatch, told = World(1).core.dispatch, []

    def grant(sequence):
        key, positions = GangKey("runs", sequence, 0), (("0", sequence),)
        return "a", Grant(0, sequence, key, "1", "s", positions, 0)

    def take(_, grant):
        told.append(grant.sequence)
        return ()

    monkeypatch.setattr(dispatch, "_grant", take)
    monkeypatch.setattr(dispatch, "_finish", lambda *_: dispatch.follow([grant(9)]))
    dispatch._works["ends"] = None

    ended = "a", ProgramDone("1", "ends", Outcome.FINISHED)
    dispatch.follow([ended, grant(7), grant(8)])

    assert told == [7, 8, 9]
    dispatch.follow([grant(10)])
    assert told[3:] == [10]


def test_a_client_hears_what_calls_took_and_whether_others_run_there():
    world = World(3, {"a": [0]}, num_clients=2)
    mine, theirs = world.slice(1, 2), world.slice(2, 2)
    for client, slice_ in ((1, mine), (2, theirs), (1, mine)):
        world.call("f", slice_, [world.put(slice_, client)], client=client)
        world.settle()
    first, last = [
        each for each in world.heard[1] if isinstance(each, Finished) and each.num_calls
    ]
    assert min(first.device_ns, last.device_ns) > 0
    assert (first.is_alone, last.is_alone) == (True, False)
