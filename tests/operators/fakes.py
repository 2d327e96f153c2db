"""A shard without a runtime, for what a test must see call by call."""

from __future__ import annotations

import itertools

from timelyml.errors import CapabilityError
from timelyml.progress import CapabilityTable


class FakeShard:
    """Records what an operator's logic asks for; grants epochs up to `last_epoch`."""

    def __init__(self, index=0, num_shards=1, *, last_epoch=10**9, tick_s=0.0):
        self.records_per_step = 1
        self.index = index
        self.num_shards = num_shards
        self.operator = "operator under test"
        self.last_epoch = last_epoch
        self._clock = itertools.count(step=tick_s)
        self.state = {}
        self._other_states = {}
        self.sent = []
        self.activations = 0
        self.delays = []
        self._table = CapabilityTable(lambda location, time, delta: None)

    def initial_capability(self, output=0):
        return self._table.start(output, 0, "initial")

    def state_of(self, name):
        return self._other_states.setdefault(name, {})

    def held(self):
        return sorted(holding.time for holding in self._table.holdings())

    def output(self, index=0):
        return self

    def send(self, time, payload, *, is_last=True):
        if not self._table.covers(0, time):
            raise CapabilityError(f"nothing justifies {time}")
        self.sent.append((time, payload, is_last))

    def now(self):
        return next(self._clock)

    def activate(self):
        self.activations += 1

    def activate_after(self, seconds):
        self.delays.append(seconds)

    def can_start_epoch(self, epoch):
        return epoch <= self.last_epoch

    def may_go_on(self):
        return False  # so that each activation is one thing

    def turn(self, logic):
        """One activation; returns what it sent."""
        before = len(self.sent)
        logic.on_activate(self)
        return self.sent[before:]

    def drain(self, logic, most=1000):
        """Activate until nothing is held any more."""
        for _ in range(most):
            if not self.held():
                return self.sent
            logic.on_activate(self)
        raise AssertionError(f"still holds {self.held()}")


def logic_of(stream):
    """The callbacks of the operator that a stream comes from."""
    graph = stream.flow.build()
    return graph.operators[stream.ref.operator].logic
