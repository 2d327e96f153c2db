"""Laws of the ledger, over random histories of programs, frees and spills."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.ml.store.test_ledger import ME, buffer
from tests.ml.store.test_ledger import claim as claim_of
from timelyml.ml.store import Admit, Claim, Ledger, Refuse, Spill

CAPACITY = 100
PLACEMENTS = {
    "all": {"d0", "d1", "d2"},
    "left": {"d0", "d1"},
    "right": {"d2"},
    "own": {"d1", "d2"},  # which reserves some
}


class Histories(RuleBasedStateMachine):
    """Programs come, run and end; what the ledger says is followed independently."""

    @initialize(
        host_bytes=st.sampled_from([None, 30, 60]),
        reserved_bytes=st.sampled_from([0, 0, 40, 80]),
    )
    def start(self, host_bytes, reserved_bytes=0):
        self.host_bytes = host_bytes
        self.reserved_bytes = reserved_bytes
        self.ledger = Ledger()
        self.ledger.add_devices(PLACEMENTS["all"], CAPACITY)
        self.ledger.add_hosts(["h"], host_bytes)
        for name, devices in PLACEMENTS.items():
            reserved = reserved_bytes if name == "own" else 0
            self.ledger.place(name, devices, ["h"], reserved_bytes=reserved)
        self.buffers = {}  # by number, all that anybody can ask for
        self.on_device = set()
        self.on_host = set()
        self.spilling = set()
        self.waiting = {}
        self.running = {}
        self.freed = set()
        self.never = set()  # what a program would have made that was refused late
        self.given_up = []
        self.count = 0

    def follow(self, effects):
        self.follow_each(effects)
        while self.given_up:  # nobody holds it, and the ledger hears of one at a time
            number = self.given_up.pop()
            self.forget_what_is_over()
            self.follow_each(self.ledger.free([number]))

    def follow_each(self, effects):
        for effect in effects:
            match effect:
                case Admit():
                    claim = self.waiting.pop(effect.program)
                    self.running[effect.program] = claim
                    returns = {each.number for each in effect.returns}
                    there = set(claim.arguments) - self.never
                    assert returns == there - self.on_device
                    assert self.spilling.isdisjoint(there)
                    assert self.on_host >= returns
                    self.on_host -= returns
                    self.on_device |= there
                    self.on_device -= set(claim.donated)
                    self.on_device |= {each.number for each in claim.outputs}
                case Spill():
                    used = {n for c in self.running.values() for n in c.arguments}
                    number = effect.buffer.number
                    assert number in self.on_device - self.spilling - used
                    self.spilling.add(number)
                case Refuse():
                    self.refuse(effect)

    def refuse(self, effect):
        """Only for want of host memory, and where nothing runs that would help."""
        assert self.host_bytes is not None
        assert effect.error.missing_bytes > 0
        claim = self.waiting.pop(effect.program)
        devices = self.devices_of(claim)
        for running in self.running.values():
            assert (
                devices - self.devices_of(running)
                or not devices
                or (
                    self.reserved_bytes and self.devices_of(running) & PLACEMENTS["own"]
                )
            )
        self.never |= {each.number for each in claim.outputs}
        self.given_up += claim.donated
        self.forget_what_is_over()

    def devices_of(self, claim):
        placements = [each.placement for each in claim.outputs]
        placements += list(claim.scratch_bytes)
        placements += [self.buffers[number].placement for number in claim.arguments]
        return set().union(*(PLACEMENTS[each] for each in placements))

    @rule(
        data=st.data(),
        sizes=st.lists(st.integers(0, 25), max_size=2),
        scratch=st.dictionaries(
            st.sampled_from(sorted(PLACEMENTS)), st.integers(0, 20), min_size=1
        ),
    )
    def call(self, data, sizes, scratch):
        readable = sorted(set(self.buffers) - self.freed - self.never)
        arguments = data.draw(
            st.lists(st.sampled_from(readable), max_size=2, unique=True)
            if readable
            else st.just([])
        )
        used = {
            number
            for claim in (*self.waiting.values(), *self.running.values())
            for number in claim.arguments
        }
        donated = [
            number
            for number in arguments
            if number not in used and data.draw(st.booleans())
        ]
        self.count += 1
        outputs = [
            buffer(10 * self.count + index, size, where)
            for index, size in enumerate(sizes)
            for where in [data.draw(st.sampled_from(sorted(PLACEMENTS)))]
        ]
        claim = Claim(
            ME, f"p{self.count}", tuple(arguments), tuple(donated), tuple(outputs),
            scratch,
        )  # fmt: skip
        self.ask(claim)

    def ask(self, claim):
        self.waiting[claim.program] = claim
        effects = self.ledger.request(claim)
        if effects and isinstance(effects[0], Refuse) and self.is_too_large(effects[0]):
            del self.waiting[claim.program]
            return
        self.buffers.update({each.number: each for each in claim.outputs})
        self.freed |= set(claim.donated)
        self.follow(effects)

    def is_too_large(self, effect):
        text = str(effect.error)
        return "can never fit" in text or "fit beside what is reserved" in text

    @precondition(lambda self: self.running)
    @rule(data=st.data(), has_failed=st.booleans())
    def finish(self, data, has_failed):
        program = data.draw(st.sampled_from(sorted(self.running)))
        self.end(program, has_failed)

    def end(self, program, has_failed):
        claim = self.running.pop(program)
        if has_failed:
            made = {each.number for each in claim.outputs}
            self.on_device -= made
            self.spilling -= made
            self.never |= made
        self.forget_what_is_over()
        self.follow(self.ledger.finished(program, has_failed=has_failed))

    @precondition(lambda self: self.spilling)
    @rule(data=st.data())
    def spill(self, data):
        self.spill_one(data.draw(st.sampled_from(sorted(self.spilling))))

    def spill_one(self, number):
        self.spilling.discard(number)
        self.on_device.discard(number)
        self.on_host.add(number)
        self.follow(self.ledger.spilled(number))

    @precondition(lambda self: set(self.buffers) - self.freed)
    @rule(data=st.data())
    def free(self, data):
        number = data.draw(st.sampled_from(sorted(set(self.buffers) - self.freed)))
        self.free_one(number)

    def free_one(self, number):
        self.freed.add(number)
        self.forget_what_is_over()
        self.follow(self.ledger.free([number]))

    def forget_what_is_over(self):
        claims = (*self.waiting.values(), *self.running.values())
        used = {number for claim in claims for number in claim.arguments}
        used |= {each.number for claim in claims for each in claim.outputs}
        over = self.freed - used - set(self.given_up)
        self.on_device -= over
        self.on_host -= over
        self.spilling -= over

    @invariant()
    def what_is_used_is_what_is_there_and_never_more_than_the_memory(self):
        expected = dict.fromkeys(PLACEMENTS["all"], 0)
        for number in self.on_device:
            each = self.buffers[number]
            for device in PLACEMENTS[each.placement]:
                expected[device] += each.size_bytes
        for claim in self.running.values():
            for placement, size in claim.scratch_bytes.items():
                for device in PLACEMENTS[placement]:
                    expected[device] += size
        assert self.ledger.used_bytes() == expected
        assert max(expected.values()) <= CAPACITY
        own = sum(self.buffers[n].size_bytes for n in self.on_device if self.is_own(n))
        own += sum(each.scratch_bytes.get("own", 0) for each in self.running.values())
        for device in PLACEMENTS["own"]:  # what it does not use, nobody has
            kept = max(0, self.reserved_bytes - own)
            assert expected[device] + kept <= CAPACITY
        on_host = sum(self.buffers[n].size_bytes for n in self.on_host | self.spilling)
        assert self.ledger.host_bytes() == {"h": on_host}
        assert self.host_bytes is None or on_host <= self.host_bytes

    def is_own(self, number):
        return self.buffers[number].placement == "own"

    @invariant()
    def somebody_runs_or_something_moves_while_anybody_waits(self):
        assert not self.waiting or self.running or self.spilling

    def teardown(self):
        """Everything that waits comes to its end, whatever is kept by whom."""
        if not hasattr(self, "ledger"):
            return
        while self.running or self.spilling:
            for number in sorted(self.spilling):
                self.spill_one(number)
            for program in sorted(self.running):
                self.end(program, has_failed=False)
        assert not self.waiting
        for number in sorted(set(self.buffers) - self.freed):
            self.ledger.free([number])
        assert set(self.ledger.used_bytes().values()) <= {0}
        assert len(self.ledger._live) == 0


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    deadline=None,
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],  # on a machine that does much else
)


def history(*puts):
    """Begin a history with little host memory and with values that nobody uses."""
    machine = Histories()
    machine.start(host_bytes=30)
    for each in puts:
        machine.ask(claim_of("put", makes=[each]))
        machine.end("put", has_failed=False)
    return machine


def check(machine):
    machine.what_is_used_is_what_is_there_and_never_more_than_the_memory()
    machine.somebody_runs_or_something_moves_while_anybody_waits()


def test_what_only_a_refused_program_would_have_read_goes_with_it():
    read, idle = buffer(1, 20), buffer(2, 40)
    machine = history(read, idle)
    machine.ask(claim_of("runs", scratch=10))
    machine.ask(claim_of("refused", reads=[read], scratch=60))
    machine.free_one(read.number)
    machine.end("runs", has_failed=False)
    check(machine)
    assert machine.ledger.used_bytes() == dict.fromkeys(PLACEMENTS["all"], 40)
    machine.teardown()


def test_what_a_refused_program_was_given_may_be_spilled_before_it_is_let_go():
    on_host, given, idle = buffer(1, 25), buffer(2, 25), buffer(3, 40)
    machine = history(on_host, given, idle)
    machine.ask(claim_of("runs", scratch=30))
    machine.spill_one(on_host.number)
    both = [given, on_host]
    machine.ask(claim_of("refused", reads=both, donated=both, scratch=70))
    machine.ask(claim_of("next", scratch=30))
    machine.ask(claim_of("last", scratch=40))
    assert set(machine.waiting) == {"refused", "next", "last"}
    machine.end("runs", has_failed=False)
    assert set(machine.running) == {"next"}
    check(machine)
    assert machine.ledger.where(given.number) == (False, False)
    assert machine.ledger.host_bytes() == {"h": 0}
    machine.teardown()
