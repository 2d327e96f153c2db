"""Calls that travel together mean what they would mean alone."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import pytest
from jax.sharding import AbstractMesh

from tests.ml.controller.world import FLOAT, computation
from timelyml.ml.client import ahead
from timelyml.ml.client.ahead import MAX_CALLS, PIECE_CALLS, Ahead
from timelyml.ml.client.handle import Handle
from timelyml.ml.client.inbox import Inbox
from timelyml.ml.client.releases import Releases
from timelyml.ml.client.slices import Slice
from timelyml.ml.controller import Call, CallProgram, Finished, Release
from timelyml.ml.controller.messages import Fetch
from timelyml.ml.functions import LogicalMesh
from timelyml.ml.programs import Arg
from timelyml.testing.leftovers import eventually

MESH = LogicalMesh(("x",), (2,))


class Sender:
    """Does what it is told on terms, each with a number: what a value is computed of."""

    shares_process = True

    def __init__(self):
        self.terms = {}
        self.values = {}
        self.programs = []
        self.messages = []
        self.releases = Releases(SimpleNamespace(send=self.forget))
        self.on_call = lambda: None

    def term(self, *parts):
        return self.terms.setdefault(parts, len(self.terms))

    def release(self, buffer):
        self.releases.add(buffer)

    def forget(self, message):
        """Hear of values that went; nobody knows those that were never sent."""
        for each in message.buffers:
            self.values.pop(each, None)

    def let_go(self, handle):
        pass

    def flush_calls(self):
        pass

    def register(self, program):
        self.programs.append(program)
        return len(self.programs) - 1

    def send(self, message):
        self.messages.append(message)
        if isinstance(message, Release):
            self.forget(message)
            return
        if not isinstance(message, Fetch):
            self.on_call()
        if isinstance(message, Call):
            args = tuple(self.values[x] for x in message.args)
            for position, out in enumerate(message.outs):
                self.values[out] = self.term(message.computation, args, position)
            return
        if isinstance(message, Fetch):
            assert message.buffer in self.values
            return
        assert isinstance(message, CallProgram)
        program, found = self.programs[message.program], {}
        for index, node in enumerate(program.nodes):
            if isinstance(node, Arg):
                found[index, 0] = self.values[message.inputs[node.position]]
            else:
                args = tuple(found[tuple(each)] for each in node.operands)
                for position in range(len(node.outputs)):
                    term = self.term(node.computation.identity, args, position)
                    found[index, position] = term
        outs = zip(message.outs, program.results, strict=True)
        self.values.update((out, found[tuple(ref)]) for out, ref in outs)


class Rig:
    """Calls in a random order on handles that come and go, beside what they mean."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.sender = Sender()
        self.inbox = Inbox(1 << 20)
        self.ahead = Ahead(
            self.sender, self.inbox, self.sender.releases, self.sender.register
        )
        mesh = AbstractMesh((2,), ("x",))
        self.slice = Slice("s", mesh, "cpu", "island", (), self.sender)
        self.next = 0
        self.terms = {}
        self.held = [self.handle() for _ in range(2)]
        for each in self.held:
            term = self.sender.term(each.buffer)
            self.terms[each.buffer] = self.sender.values[each.buffer] = term

    def handle(self):
        self.next += 1
        return Handle(self.sender, self.next, self.slice, FLOAT, ("x",))

    def call(self, operands, num_outs):
        made = computation("f", len(operands), num_outs, MESH)
        results = [self.handle() for _ in range(num_outs)]
        args = tuple(self.terms[each.buffer] for each in operands)
        for position, each in enumerate(results):
            term = self.sender.term(made.identity, args, position)
            self.terms[each.buffer] = term
        self.ahead.add(self.slice, made, operands, results)
        return results

    def check(self):
        self.ahead.flush()
        self.sender.releases.flush()
        assert self.sender.values == {
            each.buffer: self.terms[each.buffer] for each in self.held
        }

    def close(self):
        self.ahead.close()
        self.sender.releases.close()


@pytest.mark.parametrize("seed", range(20))
def test_values_are_those_of_single_calls_and_nothing_else_is_left(seed):
    rig = Rig(seed)
    period = rig.rng.randint(1, 4)
    for number in range(150):
        if not number % period:
            rig.rng.seed(seed)  # the same again, as in a loop
        operands = [rig.rng.choice(rig.held[-3:]) for _ in range(rig.rng.randint(1, 2))]
        rig.held += rig.call(operands, rig.rng.randint(1, 2))
        del operands
        while len(rig.held) > rig.rng.randint(2, 5):
            del rig.held[rig.rng.randrange(len(rig.held))]
        if rig.rng.random() < 0.02:
            rig.check()
    rig.check()
    assert rig.inbox.num_unfinished == 150
    rig.close()


@pytest.fixture
def unhurried(monkeypatch):
    """However slow the machine is, nothing goes before it is full or asked for."""
    monkeypatch.setattr(ahead, "DELAY_S", 60.0)


def test_a_loop_becomes_one_message_for_many_calls(unhurried):
    rig = Rig(0)
    for _ in range(10 * MAX_CALLS):
        rig.held = rig.call(rig.held[-1:], 1)
    rig.check()
    programs = [x for x in rig.sender.messages if isinstance(x, CallProgram)]
    whole = [
        x for x in programs if len(rig.sender.programs[x.program].nodes) > MAX_CALLS
    ]
    assert len(whole) == 9  # all but the first batch
    assert len(rig.sender.messages) <= len(whole) + 2 * PIECE_CALLS
    assert all(len(each.outs) == 1 for each in programs)  # the rest has no name
    rig.close()


def test_a_value_that_was_deleted_before_it_was_sent_is_not_kept():
    rig = Rig(0)
    for _ in range(3):
        kept, lost = rig.call(rig.held[:1], 2)
        lost.delete()
        rig.held.append(kept)
        rig.check()
    rig.close()


def test_a_value_that_only_calls_hold_goes_with_them(unhurried):
    rig = Rig(0)
    taken = rig.held[0].buffer
    rig.held.append(rig.call([rig.held.pop(0)], 1)[0])
    rig.ahead.flush()
    assert taken not in rig.sender.values
    rig.check()
    rig.close()


def test_a_value_that_goes_while_calls_are_sent_stays_for_those_that_take_it(unhurried):
    rig = Rig(0)
    made = list(rig.held[:1])
    for _ in range(3):
        made += rig.call(made[-1:], 1)
    rig.held.append(made.pop())
    inner = [each.buffer for each in made[1:]]
    made.clear()
    rig.sender.on_call = lambda: list(map(rig.sender.release, inner))
    rig.check()
    rig.close()


def test_what_another_thread_sends_comes_after_all_that_was_collected(unhurried):
    rig = Rig(0)
    made = list(rig.held[:1])
    for _ in range(3):
        made += rig.call(made[-1:], 1)
    rig.held += made[1:]
    fetch = Fetch(made[-1].buffer)
    other = threading.Thread(target=rig.ahead.send, args=[fetch])

    def on_call():
        if other.ident is None:
            other.start()
            other.join(0.1)  # as long as it would need to overtake the rest

    rig.sender.on_call = on_call
    rig.ahead.flush()
    other.join()
    calls = [x for x in rig.sender.messages if not isinstance(x, Release)]
    assert [type(each) for each in calls] == [Call, Call, Call, Fetch]
    rig.close()


def test_a_call_that_nothing_follows_is_sent_all_the_same():
    rig = Rig(0)
    rig.held += rig.call(rig.held[:1], 1)
    assert eventually(lambda: rig.sender.messages, 5.0)
    rig.check()
    rig.close()


def test_what_is_left_of_a_loop_goes_in_sizes_that_came_before(unhurried):
    rig = Rig(0)
    for num_calls in (MAX_CALLS, MAX_CALLS, MAX_CALLS // 2 + PIECE_CALLS):
        before = len(rig.sender.messages)
        for _ in range(num_calls):
            rig.held = rig.call(rig.held[-1:], 1)
        rig.check()
    sent = rig.sender.messages[before:]
    assert [type(each) for each in sent] == [CallProgram, CallProgram, Release]
    rig.close()


def busy_rig():
    rig = Rig(0)
    rig.inbox.pace_s = 1.0
    rig.inbox.begin_call(4)
    rig.held += rig.call(rig.held[:1], 1)
    return rig


def test_calls_are_kept_while_others_keep_devices_busy(monkeypatch):
    monkeypatch.setattr(ahead, "MAX_DELAY_S", 60.0)
    rig = busy_rig()
    rig.ahead.flush_late()
    assert not rig.sender.messages
    rig.inbox.pace_s = 0.0
    assert eventually(lambda: rig.sender.messages, 5.0)
    rig.check()
    rig.close()


def test_calls_are_not_kept_for_ever_by_others_that_do_not_end():
    rig = busy_rig()
    assert eventually(lambda: rig.sender.messages, 5.0)
    rig.close()


def test_programs_say_nothing_of_how_long_a_call_takes():
    inbox = Inbox(1 << 20)
    inbox.begin_call()
    inbox.receive(Finished(1, (), (), device_ns=64_000))
    pace_s = inbox.pace_s
    assert pace_s > 0
    assert inbox.call_s == pytest.approx(64e-6)
    for _ in range(100):
        inbox.begin_call(is_program=True)
        inbox.receive(Finished(1, (), (), device_ns=5_000_000))
    assert inbox.pace_s == pace_s
    assert inbox.call_s == pytest.approx(64e-6)


@pytest.mark.parametrize(("is_alone", "num_calls"), [(True, 128), (False, 16)])
def test_who_has_devices_alone_sends_more_calls_together(
    is_alone, num_calls, unhurried
):
    rig = Rig(0)
    rig.inbox.begin_call(64)
    rig.inbox.receive(Finished(1, (), (), device_ns=64 * 100_000, is_alone=is_alone))
    assert rig.inbox.call_s == pytest.approx(1e-4)
    rig.inbox.pace_s = 1.0  # others come in between
    for _ in range(3 * num_calls):
        rig.held = rig.call(rig.held[-1:], 1)
    rig.check()
    nodes = [len(each.nodes) for each in rig.sender.programs]
    assert max(nodes) == 1 + num_calls  # with what it takes
    rig.close()
