"""What clients may have and say: limits, priorities, and messages that nobody sends."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ml.controller.test_core import output_errors
from tests.ml.controller.world import FLOAT, World
from timelyml.errors import WireError
from timelyml.ml.controller import AskSlice, Call, DropSlice, Finished, Put
from timelyml.ml.controller.admission import Limits
from timelyml.ml.controller.messages import Open, Register
from timelyml.ml.functions import ArrayType
from timelyml.ml.scheduling import Priority


def test_a_call_that_is_one_too_many_fails_alone():
    world = World(islands={"a": [0]}, limits=Limits(max_calls=3), num_clients=2)
    slice_, other = world.slice(1), world.slice(2)
    x, y = world.put(slice_), world.put(other, 2)
    results = [world.call("f", slice_, [x])[0][0] for _ in range(4)]
    theirs = world.call("f", other, [y], client=2)[0][0]
    world.settle()
    ends = output_errors(world)
    assert [ends[each] for each in results[:3]] == [None] * 3
    assert "too many calls under way; got 3" in ends[results[3]]
    assert output_errors(world, 2)[theirs] is None

    again = world.call("f", slice_, [x])[0][0]
    world.settle()
    assert output_errors(world)[again] is None, "those that are over count no more"


def test_schedulers_take_as_many_calls_as_clients_may_have():
    world = World(islands={"a": [0]}, limits=Limits(max_calls=1100))
    slice_ = world.slice(1)
    x = world.put(slice_)
    (first,), made = world.call("f", slice_, [x])
    world.settle()
    for _ in range(1100):
        world.say(1, Call(made, slice_.slice, (x,), (world.buffer(),)))
    assert output_errors(world) == {first: None}, "none was refused"


def test_bytes_are_counted_as_long_as_they_are_held():
    world = World(islands={"a": [0]}, limits=Limits(max_bytes=3 * FLOAT.size_bytes))
    slice_ = world.slice()
    kept = [world.put(slice_) for _ in range(3)]
    too_much = world.put(slice_), world.call("f", slice_, kept[:1])[0][0]
    in_place = world.call("g", slice_, kept[:1], donated=(0,))[0][0]
    world.release(kept[1:2])
    fits = world.put(slice_)
    world.settle()
    ends = output_errors(world)
    for each in too_much:
        assert "may not hold so much; got 16 bytes more than the 48" in ends[each]
    assert ends[in_place] is None
    assert fits not in ends, "nobody waits for it, and it did not fail"
    world.core.leave(1)
    assert world.core.buffers.directory.held_bytes(1) == 0


def test_a_client_of_larger_priority_goes_first():
    world = World(islands={"a": [0]}, num_clients=2, policy=Priority)
    world.core.leave(2)
    world.core.join(2, priority=5)
    slice_, urgent = world.slice(1), world.slice(2)
    x, y = world.put(slice_), world.put(urgent, 2)
    world.settle()
    for _ in range(40):
        world.call("f", slice_, [x])
    late = world.call("g", urgent, [y], client=2)[0]
    world.settle()
    launched = world.hosts[0].launched
    assert launched.index(late) < len(launched) - 1, "not after what was there before"


def test_what_is_kept_for_calls_goes_with_its_slice():
    world = World(islands={"a": [0]})
    slice_ = world.slice()
    x = world.put(slice_)
    out = world.call("f", slice_, [x])[0][0]
    world.settle()
    assert world.core._calls._graphs
    world.release([x, out])
    world.say(1, DropSlice(slice_.slice))
    world.settle()
    assert not world.core._calls._graphs


ZEROS = np.zeros(8, np.float16)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda s, n: Put(n, s, FLOAT, ("x",), ZEROS[:2]), "is no float16"),
        (lambda s, n: Put(n, s, FLOAT, ("x",), np.zeros(8)), "is no float16"),
        (lambda s, n: Put(n, s, FLOAT, ("x",), "zeros"), "cannot lie there"),
        (lambda s, n: Put(n, s, FLOAT, ("y",), ZEROS), "cannot lie there"),
        (lambda s, n: Put(n, s, FLOAT, 3, ZEROS), "cannot lie there"),
        (lambda s, n: Put(n, s, ArrayType((8,), "no", 2), (), ZEROS), "cannot lie"),
        (lambda s, n: Put(n, s, ArrayType((8,), "float16", 1), (), ZEROS), "is no"),
        (lambda s, n: Put(n + (1 << 40), s, FLOAT, (), ZEROS), "number of another"),
        (lambda s, n: Call("f", s, (), (7,)), "number of another"),
        (lambda s, n: Register("f", "slice-1", b""), "slice of another"),
        (lambda s, n: AskSlice(1, ("x",), (1,), 3), "impossible slice"),
        (lambda s, n: AskSlice(1, ("x",), (), None), "impossible slice"),
        (lambda s, n: AskSlice(1, ("x",), (1,), memory_bytes=-1), "impossible slice"),
        (lambda s, n: AskSlice(1, ("x",), (1,), timeout_s="long"), "no number of sec"),
        (lambda s, n: Open(1, "name", float("nan")), "no number of seconds"),
        (lambda s, n: Finished(1, (n,), ()), "says what no client says"),
        (lambda s, n: "hello", "says what no client says"),
    ],
)
def test_what_no_client_says_is_refused_before_it_changes_anything(wrong, reason):
    world = World(islands={"a": [0]}, num_clients=2)
    world.slice(1)
    slice_ = world.slice(2)
    world.settle()
    with pytest.raises(WireError, match=f"client 2 .*{reason}"):
        world.say(2, wrong(slice_.slice, world.buffer(2)))
    assert not world.core.flush()
    assert not world.core.buffers.directory.entries()
