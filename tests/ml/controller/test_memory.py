"""What the controller does about memory, in the order in which the ledger decided."""

from __future__ import annotations

from types import SimpleNamespace

from tests.ml.store.test_ledger import buffer, claim
from timelyml.ml.controller.memory import Memory
from timelyml.ml.controller.records import Outbox


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
            memory.free(each.number)
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
