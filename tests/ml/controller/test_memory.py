"""What the controller does about memory, in the order in which the ledger decided."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.ml.controller.test_core import output_errors
from tests.ml.controller.world import World
from tests.ml.store.test_ledger import buffer, claim
from timelyml.ml.controller.memory import Memory
from timelyml.ml.controller.outbox import Outbox


@pytest.mark.sources
def test_what_is_let_go_before_its_spill_was_told_is_not_spilled():
    """A refused call lets go of what it was given, one by one, and its slice goes."""
    on_host, given, idle = buffer(1, 25, "old"), buffer(2, 25, "old"), buffer(3, 40)
    slices = {name: SimpleNamespace(hosts=(0,)) for name in ("old", "all")}
    outbox, begun, refused = Outbox(), [], []
    memory = Memory(slices, outbox, str)
    memory.ledger.add_devices(["d0"], 100)
    memory.ledger.add_hosts(["0"], 30)
    for name in slices:
        memory.ledger.place(name, ["d0"], ["0"])

    def ask(claim, refuse=refused.append):
        memory.admit(claim, lambda: begun.append(claim.program), refuse)

    def let_go(error):
        refused.append(error)
        for each in (on_host, given):
            memory.free([each.number])
        del slices["old"]

    for each in (on_host, given, idle):
        ask(claim("put", makes=[each]))
        memory.release("put")
    ask(claim("runs", scratch=30))
    assert outbox.book(0).spills == [on_host.number]
    memory.spilled(0, [on_host.number])
    both = [on_host, given]
    ask(claim("refused", reads=both, donated=both, scratch=70), let_go)
    ask(claim("next", scratch=30))
    ask(claim("last", scratch=40))
    memory.release("runs")
    assert len(refused) == 1
    assert outbox.book(0).spills == [on_host.number]
    memory.release("next")
    assert begun == ["put", "put", "put", "runs", "next", "last"]
    assert not memory._spilling


def test_memory_that_a_slice_reserves_is_kept_from_values_of_other_clients():
    """A value takes 8 bytes of each device, a call 4 more; there are 44."""
    world = World(1, {"a": [0], "b": [1]}, num_clients=2, memory_bytes=44)
    theirs = world.slice(2, 2, "a")
    kept = [world.put(theirs, 2) for _ in range(5)]
    mine = world.slice(1, 2, "a", memory_bytes=24)
    xs = [world.put(mine) for _ in range(2)]
    world.settle()
    assert world.num_spilled == 2, "what is reserved is made free when it is used"
    theirs_too = [world.call("f", theirs, [x], client=2)[0][0] for x in kept]
    (large,), _ = world.call("g", theirs, kept[:2], client=2)
    (out,), _ = world.call("f", mine, xs[:1])
    world.settle()
    assert [output_errors(world, 2)[x] for x in theirs_too] == [None] * 5
    assert (
        "does not fit beside what is reserved (24 by" in output_errors(world, 2)[large]
    )
    assert output_errors(world)[out] is None
    assert all(world.core.buffers.memory.ledger.where(x)[0] for x in xs)
