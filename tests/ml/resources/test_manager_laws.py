"""Laws of the resource manager, over random histories."""

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

from tests.ml.resources.clusters import GIB, ask, mesh
from timelyml.errors import SliceError
from timelyml.ml.resources import (
    Displaced,
    Freed,
    Granted,
    Prepare,
    Released,
    Remapped,
    ResourceManager,
    SliceState,
    TimedOut,
    Vacate,
)
from timelyml.ml.resources.fitting import fit

HOSTS = {
    **mesh(4, per_host=2),
    **mesh(2, 2, island="b", per_host=2),
    **mesh(2, island="c", kind="gpu"),
}
DEVICES = {device.name: device for each in HOSTS.values() for device in each}


class Histories(RuleBasedStateMachine):
    """A cluster with hosts that come and go, and clients that ask for slices.

    What the manager says is followed here independently: where each slice stands, what
    it has reserved, and which questions are unanswered.
    """

    @initialize()
    def start(self):
        self.manager = ResourceManager()
        self.there = set()
        self.withdrawn = set()
        self.freed = set()
        self.standing = {}
        self.targets = {}
        self.requests = {}
        self.questions = []
        self.vacating = {}  # slice: the ticket of its answer
        self.suspended = set()
        self.count = 0
        for host, devices in HOSTS.items():
            self.follow(self.manager.add_host(host, devices))
            self.there |= {device.name for device in devices}

    def follow(self, effects):
        for effect in effects:
            match effect:
                case Granted():
                    assert effect.slice not in self.standing
                    self.standing[effect.slice] = effect.devices
                case Prepare():
                    self.targets[effect.slice] = effect.devices
                    self.questions.append(effect)
                case Vacate():
                    assert self.standing[effect.slice] == effect.devices
                    self.questions.append(effect)
                    self.vacating[effect.slice] = effect.ticket
                case Remapped():
                    assert self.standing.get(effect.slice, ()) == ()
                    assert self.targets.pop(effect.slice) == effect.devices
                    self.standing[effect.slice] = effect.devices
                case Displaced():
                    assert set(effect.lost).isdisjoint(self.there)
                    self.standing[effect.slice] = ()
                    self.vacating.pop(effect.slice, None)
                case Released() | TimedOut():
                    self.standing.pop(effect.slice, None)
                    self.targets.pop(effect.slice, None)
                    self.vacating.pop(effect.slice, None)
                    del self.requests[effect.slice]
                    self.suspended.discard(effect.slice)
                case Freed():
                    used = {d for each in self.standing.values() for d in each}
                    assert used.isdisjoint(effect.devices)
                    assert set(effect.devices) <= self.withdrawn
                    self.freed |= set(effect.devices)

    @rule(
        sizes=st.lists(st.integers(1, 2), min_size=1, max_size=2),
        memory=st.sampled_from([0, 0, GIB // 2, GIB]),
        island=st.sampled_from([None, None, "a", "b"]),
        adjacent=st.booleans(),
        client=st.sampled_from(["me", "you"]),
    )
    def ask(self, sizes, memory, island, adjacent, client):
        name = f"s{self.count}"
        self.count += 1
        request = ask(
            name, *sizes, client=client, memory_bytes=memory, island=island,
            is_adjacent=adjacent,
        )  # fmt: skip
        self.requests[name] = request
        try:
            effects = self.manager.request(request, 0.0)
        except SliceError:
            del self.requests[name]
            present = [DEVICES[d] for d in self.there]
            assert fit(request, present, lambda _: (0, 0)) is None
        else:
            self.follow(effects)

    @precondition(lambda self: self.requests)
    @rule(
        data=st.data(), what=st.sampled_from(["release", "suspend", "resume", "move"])
    )
    def change_a_slice(self, data, what):
        name = data.draw(st.sampled_from(sorted(self.requests)))
        if what != "release" and self.manager.state(name) is SliceState.WAITING:
            return
        if what == "release":
            self.follow(self.manager.release(name))
        elif what == "suspend":
            self.suspended.add(name)
            self.targets.pop(name, None)
            self.follow(self.manager.suspend(name))
        elif what == "resume":
            self.suspended.discard(name)
            self.follow(self.manager.resume(name))
        elif self.manager.state(name) is SliceState.ACTIVE:
            try:
                self.follow(self.manager.migrate(name))
            except SliceError:
                assert self.manager.state(name) is SliceState.ACTIVE

    @rule(client=st.sampled_from(["me", "you"]))
    def lose_a_client(self, client):
        self.follow(self.manager.leave(client))
        assert not any(r.client == client for r in self.requests.values())

    @rule(host=st.sampled_from(sorted(HOSTS)))
    def lose_or_add_a_host(self, host):
        mine = {device.name for device in HOSTS[host]}
        if mine <= self.there:
            self.there -= mine
            self.withdrawn -= mine
            self.freed -= mine
            self.forget_targets(mine)
            self.follow(self.manager.lose_host(host))
        else:
            self.there |= mine
            self.follow(self.manager.add_host(host, HOSTS[host]))

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def withdraw_or_restore(self, data):
        device = data.draw(st.sampled_from(sorted(self.there)))
        if device in self.withdrawn:
            self.withdrawn.discard(device)
            self.freed.discard(device)
            self.follow(self.manager.restore([device]))
        else:
            self.withdrawn.add(device)
            self.forget_targets({device})
            self.follow(self.manager.withdraw([device]))

    def forget_targets(self, gone):
        for name in [n for n, each in self.targets.items() if gone & set(each)]:
            del self.targets[name]

    @precondition(lambda self: self.questions)
    @rule(data=st.data())
    def answer(self, data):
        index = data.draw(st.integers(0, len(self.questions) - 1))
        self.answer_one(self.questions.pop(index))

    def answer_one(self, question):
        if isinstance(question, Prepare):
            self.follow(self.manager.prepared(question.slice, question.ticket))
            return
        if self.vacating.get(question.slice) == question.ticket:
            del self.vacating[question.slice]
            self.standing[question.slice] = ()
        self.follow(self.manager.vacated(question.slice, question.ticket))

    @invariant()
    def the_manager_says_what_followed_from_its_effects(self):
        for request, state, devices in self.manager.slices():
            assert request == self.requests[request.name]
            assert devices == self.standing.get(request.name, ())
            waits_for_the_first = request.name not in self.standing
            assert (state is SliceState.WAITING) is waits_for_the_first

    @invariant()
    def no_memory_is_reserved_twice(self):
        reserved = dict.fromkeys(self.there, 0)
        for each in (self.standing, self.targets):
            for name, devices in each.items():
                for device in devices:
                    reserved[device] += self.requests[name].memory_bytes
        assert all(size <= DEVICES[d].memory_bytes for d, size in reserved.items())

    @invariant()
    def nobody_waits_who_could_be_served(self):
        waiting = [
            request
            for request, state, _ in self.manager.slices()
            if state in {SliceState.WAITING, SliceState.DISPLACED}
        ]
        shared = [request for request in waiting if not request.memory_bytes]
        usable = [DEVICES[d] for d in self.there - self.withdrawn]
        for request in shared:
            assert fit(request, usable, lambda _: (0, 0)) is None

    def teardown(self):
        """Once all questions are answered and all hosts are back, everybody stands."""
        if not hasattr(self, "manager"):
            return
        for host, devices in HOSTS.items():
            if not {device.name for device in devices} <= self.there:
                self.there |= {device.name for device in devices}
                self.follow(self.manager.add_host(host, devices))
        self.freed.clear()
        restored, self.withdrawn = self.withdrawn, set()
        self.follow(self.manager.restore(restored))
        while self.questions:
            self.answer_one(self.questions.pop(0))
        total = 0
        while self.requests:
            progress = [n for n, devices in self.standing.items() if devices]
            progress += [n for n in self.suspended if n in self.requests]
            assert progress, "slices wait for each other"
            self.follow(self.manager.release(progress[0]))
            while self.questions:
                self.answer_one(self.questions.pop(0))
            total += 1
        assert self.manager.slices() == ()
        assert all(self.manager._loads.is_free(name) for name in DEVICES)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40)
