"""Traces: spans of hosts whose clocks differ, on the controller's; nobody is waited for."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from timelyml.ml.controller.messages import Acknowledged, Refused
from timelyml.ml.controller.outbox import Outbox, ToClient
from timelyml.ml.controller.traced import AskTrace, Traced
from timelyml.ml.controller.tracing import ANSWER_S, MAX_TRACES, NUM_QUESTIONS, Traces
from timelyml.ml.hosts import Arrival, AskTime, Done, Reports, Time
from timelyml.runtime.failure import unpack_error

NS = 1_000_000_000
AHEAD_S = {0: 0.0, 1: 5_000.0, 2: -300.25}
WAY_S = 1e-3  # the longest that a message takes either way
MOST_S = 2 * len(AHEAD_S) * WAY_S  # as hosts are asked at once, and answer in turn


class Owner:
    def described(self, work, gang):
        del work
        return f"gang {gang}", "s", (gang,)


@dataclass
class Work:
    client: int = 7
    owner: Owner = field(default_factory=Owner)


class Hosts:
    """Hosts with clocks of their own, asked over ways of unequal length."""

    def __init__(self, ahead_s=AHEAD_S):
        self.outbox = Outbox()
        self.traces = Traces(self.outbox, {("a", 3): (Work(), 5)})
        self.ahead_s = ahead_s
        self.now_s = 100.0
        self.told = []
        self.is_traced = {}
        self.silent = set()
        for host in ahead_s:
            self.traces.welcome(host, f"island-{host}", self.now_s)

    def clock_ns(self, host):
        return round((self.now_s + self.ahead_s[host]) * NS)

    def ask(self, client, message):
        assert self.traces.handle(client, message, self.now_s)
        self.run()

    def run(self):
        while effects := self.outbox.flush():
            for effect in effects:
                if isinstance(effect, ToClient):
                    self.told.append(effect.body)
                    continue
                self.is_traced[effect.host] = effect.body.is_traced
                if effect.host not in self.silent:
                    self.answer(effect.host)

    def answer(self, host):
        self.now_s += WAY_S
        said = Time(self.clock_ns(host))
        self.now_s += WAY_S / 4
        self.traces.time(host, said, self.now_s)

    def launch(self, host, began_s, ended_s):
        """Report what ran then, by the controller's clock."""
        ended_ns = round((ended_s + self.ahead_s[host]) * NS)
        done = Done(3, round((ended_s - began_s) * NS), (), (), ended_ns)
        self.traces.reported("a", host, Reports((done,)))


def test_spans_of_all_hosts_are_on_one_clock_within_the_error_that_is_told():
    hosts = Hosts()
    hosts.ask(7, AskTrace(1))
    assert hosts.told == [Acknowledged(1)]
    for host in AHEAD_S:
        hosts.launch(host, 100.5, 101.25)
    sent_ns, came_ns = (round((x + AHEAD_S[h]) * NS) for x, h in ((101.3, 1), (102, 2)))
    arrival = Arrival(1, 64, sent_ns, came_ns)
    hosts.traces.reported("a", 2, Reports((), (arrival,)))

    hosts.ask(7, AskTrace(2, ends=1))

    traced = hosts.told[-1]
    assert isinstance(traced, Traced)
    assert 0 < traced.clock_error_s <= MOST_S
    assert [each.host for each in traced.launches] == list(AHEAD_S)
    close = pytest.approx(0, abs=traced.clock_error_s + 1e-6)
    for each in traced.launches:
        assert each.began_s - 100.5 == close
        assert each.ended_s - each.began_s == pytest.approx(0.75)
        assert (each.name, each.client, each.results) == ("gang 5", 7, (5,))
    (move,) = traced.transfers
    assert (move.source_island, move.island, move.size_bytes) == (
        "island-1",
        "island-2",
        64,
    )
    assert move.began_s - 101.3 == close
    assert move.ended_s - 102 == close
    assert traced.num_left_out == 0


def test_clocks_that_no_answer_tells_apart_count_as_one():
    hosts = Hosts({0: 0.0, 1: 0.0})
    hosts.ask(7, AskTrace(1))
    hosts.launch(1, 100.5, 101.25)
    hosts.ask(7, AskTrace(2, ends=1))
    (span,) = hosts.told[-1].launches
    assert (span.began_s, span.ended_s) == (100.5, 101.25)
    assert hosts.told[-1].clock_error_s == 0


def test_hosts_tell_of_transfers_as_long_as_somebody_traces():
    hosts = Hosts()
    hosts.ask(7, AskTrace(1))
    hosts.ask(8, AskTrace(1))
    hosts.ask(7, AskTrace(2, ends=1))
    assert set(hosts.is_traced.values()) == {True}
    hosts.traces.leave(8)
    hosts.run()
    assert set(hosts.is_traced.values()) == {False}
    assert not hosts.traces.is_on


def test_a_trace_within_another_ends_alone():
    hosts = Hosts()
    hosts.ask(7, AskTrace(1))
    hosts.launch(0, 100.0, 100.1)
    hosts.ask(7, AskTrace(2))
    hosts.launch(0, 100.2, 100.3)
    hosts.ask(7, AskTrace(3, ends=2))
    hosts.launch(0, 100.4, 100.5)
    hosts.ask(7, AskTrace(4, ends=1))
    inner, outer = (each for each in hosts.told if isinstance(each, Traced))
    assert [each.began_s for each in inner.launches] == pytest.approx([100.2])
    assert [each.began_s for each in outer.launches] == pytest.approx(
        [100.0, 100.2, 100.4]
    )


def test_a_host_that_dies_is_not_waited_for_and_what_it_did_stays():
    hosts = Hosts()
    hosts.ask(7, AskTrace(1))
    hosts.launch(1, 100.5, 101.25)
    hosts.silent.add(1)
    hosts.ask(7, AskTrace(2, ends=1))
    assert not isinstance(hosts.told[-1], Traced)
    hosts.traces.lose(1)
    hosts.run()
    (span,) = hosts.told[-1].launches
    assert span.began_s == pytest.approx(100.5, abs=MOST_S)


def test_a_host_that_says_nothing_is_waited_for_no_longer_than_promised():
    hosts = Hosts()
    hosts.silent.add(2)
    hosts.ask(7, AskTrace(1))
    assert not hosts.told
    hosts.now_s = hosts.traces.next_deadline()
    assert hosts.now_s < 100.1 + ANSWER_S
    hosts.traces.tick(hosts.now_s)
    hosts.run()
    assert hosts.told == [Acknowledged(1)]
    hosts.launch(2, 100.5, 101.25)
    hosts.ask(7, AskTrace(2, ends=1))
    hosts.now_s = hosts.traces.next_deadline()
    hosts.traces.tick(hosts.now_s)
    hosts.run()
    assert hosts.told[-1].launches == (), "nobody knows when it was"
    assert hosts.told[-1].num_left_out == 1


def test_traces_that_are_never_read_make_room():
    hosts = Hosts({0: 0.0})
    for request in range(1, MAX_TRACES + 2):
        hosts.ask(7, AskTrace(request))
    hosts.ask(7, AskTrace(100, ends=1))
    refused = hosts.told[-1]
    assert isinstance(refused, Refused)
    assert "client 7 has no such trace any more" in str(unpack_error(refused.error))
    hosts.ask(7, AskTrace(101, ends=2))
    assert isinstance(hosts.told[-1], Traced)


def test_each_host_is_asked_a_few_times_only():
    hosts = Hosts({0: 0.0})
    hosts.traces.handle(7, AskTrace(1), hosts.now_s)
    asked = 0
    while effects := hosts.outbox.flush():
        for effect in effects:
            asked += isinstance(getattr(effect, "body", None), AskTime)
            if not isinstance(effect, ToClient):
                hosts.answer(0)
    assert asked == NUM_QUESTIONS
