"""Laws of the ledger, over random histories of programs, frees and spills."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from timelyml.ml.store import Admit, Buffer, Claim, Handle, Ledger, Refuse, Spill

CAPACITY = 100
PLACEMENTS = {"all": {"d0", "d1", "d2"}, "left": {"d0", "d1"}, "right": {"d2"}}


class Histories(RuleBasedStateMachine):
    """Programs come, run and end; what the ledger says is followed independently."""

    @initialize()
    def start(self):
        self.ledger = Ledger()
        self.ledger.add_devices(PLACEMENTS["all"], CAPACITY)
        for name, devices in PLACEMENTS.items():
            self.ledger.place(name, devices)
        self.buffers = {}  # handle: buffer, of all that anybody can ask for
        self.on_device = set()
        self.on_host = set()
        self.spilling = set()
        self.waiting = {}
        self.running = {}
        self.freed = set()
        self.count = 0

    def follow(self, effects):
        for effect in effects:
            match effect:
                case Admit():
                    claim = self.waiting.pop(effect.program)
                    self.running[effect.program] = claim
                    assert set(effect.returns) == set(claim.arguments) - self.on_device
                    assert self.spilling.isdisjoint(claim.arguments)
                    assert self.on_host >= set(effect.returns)
                    self.on_device |= set(claim.arguments)
                    self.on_device -= set(claim.donated)
                    self.on_device |= {each.handle for each in claim.outputs}
                case Spill():
                    used = {h for c in self.running.values() for h in c.arguments}
                    assert effect.handle in self.on_device - self.spilling - used
                    self.spilling.add(effect.handle)
                case Refuse():
                    raise AssertionError(effect)

    @rule(
        data=st.data(),
        sizes=st.lists(st.integers(0, 25), max_size=2),
        scratch=st.dictionaries(
            st.sampled_from(sorted(PLACEMENTS)), st.integers(0, 20), min_size=1
        ),
    )
    def call(self, data, sizes, scratch):
        readable = sorted(set(self.buffers) - self.freed)
        arguments = data.draw(
            st.lists(st.sampled_from(readable), max_size=2, unique=True)
            if readable
            else st.just([])
        )
        used = {
            handle
            for claim in (*self.waiting.values(), *self.running.values())
            for handle in claim.arguments
        }
        donated = [
            handle
            for handle in arguments
            if handle not in used and data.draw(st.booleans())
        ]
        self.count += 1
        outputs = [
            Buffer(Handle("me", 10 * self.count + index), where, size)
            for index, size in enumerate(sizes)
            for where in [data.draw(st.sampled_from(sorted(PLACEMENTS)))]
        ]
        claim = Claim(
            "me", f"p{self.count}", tuple(arguments), tuple(donated), tuple(outputs),
            scratch,
        )  # fmt: skip
        self.waiting[claim.program] = claim
        effects = self.ledger.request(claim)
        if effects and isinstance(effects[0], Refuse):
            del self.waiting[claim.program]
            return
        self.buffers.update({each.handle: each for each in outputs})
        self.freed |= set(donated)
        self.follow(effects)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), has_failed=st.booleans())
    def finish(self, data, has_failed):
        program = data.draw(st.sampled_from(sorted(self.running)))
        claim = self.running[program]
        made = {each.handle for each in claim.outputs}
        readers = {h for c in self.waiting.values() for h in c.arguments}
        readers |= {h for c in self.running.values() for h in c.arguments}
        self.end(program, has_failed and made.isdisjoint(readers))

    def end(self, program, has_failed):
        claim = self.running.pop(program)
        if has_failed:
            made = {each.handle for each in claim.outputs}
            self.on_device -= made
            self.freed |= made
        self.forget_what_is_over()
        self.follow(self.ledger.finished(program, has_failed=has_failed))

    @precondition(lambda self: self.spilling)
    @rule(data=st.data())
    def spill(self, data):
        self.spill_one(data.draw(st.sampled_from(sorted(self.spilling))))

    def spill_one(self, handle):
        self.spilling.discard(handle)
        self.on_device.discard(handle)
        self.on_host.add(handle)
        self.follow(self.ledger.spilled(handle))

    @precondition(lambda self: set(self.buffers) - self.freed)
    @rule(data=st.data())
    def free(self, data):
        handle = data.draw(st.sampled_from(sorted(set(self.buffers) - self.freed)))
        self.freed.add(handle)
        self.forget_what_is_over()
        self.follow(self.ledger.free(handle))

    def forget_what_is_over(self):
        claims = (*self.waiting.values(), *self.running.values())
        used = {handle for claim in claims for handle in claim.arguments}
        used |= {each.handle for claim in claims for each in claim.outputs}
        over = self.freed - used
        self.on_device -= over
        self.spilling -= over

    @invariant()
    def what_is_used_is_what_is_there_and_never_more_than_the_memory(self):
        expected = dict.fromkeys(PLACEMENTS["all"], 0)
        for handle in self.on_device:
            each = self.buffers[handle]
            for device in PLACEMENTS[each.placement]:
                expected[device] += each.size_bytes
        for claim in self.running.values():
            for placement, size in claim.scratch_bytes.items():
                for device in PLACEMENTS[placement]:
                    expected[device] += size
        assert self.ledger.used_bytes() == expected
        assert max(expected.values()) <= CAPACITY

    @invariant()
    def somebody_runs_or_something_moves_while_anybody_waits(self):
        assert not self.waiting or self.running or self.spilling

    def teardown(self):
        """Everything that waits comes to its end, whatever is kept by whom."""
        if not hasattr(self, "ledger"):
            return
        while self.running or self.spilling:
            for handle in sorted(self.spilling):
                self.spill_one(handle)
            for program in sorted(self.running):
                self.end(program, has_failed=False)
        assert not self.waiting
        for handle in sorted(set(self.buffers) - self.freed):
            self.ledger.free(handle)
        assert set(self.ledger.used_bytes().values()) <= {0}
        assert not self.ledger._live


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=80, stateful_step_count=40)
