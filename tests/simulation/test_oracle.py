"""The oracle itself: what it computes is right, and it sees what it should."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from timelyml.graph import Exchange, GraphBuilder, InputSpec
from timelyml.progress import Tracker, less_equal
from timelyml.runtime.effects import Released
from timelyml.runtime.simulation import Violation
from timelyml.runtime.simulation.behaviour import Behaviour
from timelyml.runtime.simulation.closure import Closure, as_time, as_timestamp
from timelyml.runtime.simulation.generate import random_plan
from timelyml.runtime.simulation.oracle import Oracle
from timelyml.runtime.simulation.plan import GraphPlan
from timelyml.runtime.simulation.reference import Reference
from timelyml.runtime.simulation.routes import RouteBy
from timelyml.runtime.simulation.rules import Kind, Rule, make_record, mix
from timelyml.runtime.simulation.sources import Source
from timelyml.runtime.simulation.trace import Asked, Done, Got, Held, Sent, Told

SOURCE, FOLD, SINK = range(3)


def _plan():
    """A source, a fold and a sink, two shards each, of one worker."""
    rules = [
        Rule(Kind.SOURCE, 1, 0, 0, 1, num_epochs=2),
        Rule(Kind.FOLD, 2, 0, 1, 1),
        Rule(Kind.SINK, 3, 0, 1, 0),
    ]
    operators = (
        Source(SOURCE, rules[0]),
        Behaviour(FOLD, rules[1], told_ports=(0,)),
        Behaviour(SINK, rules[2], told_ports=(0,)),
    )
    builder = GraphBuilder("small", num_shards=2)
    (stream,) = builder.add_operator("source", "source", is_source=True)
    exchange = InputSpec(stream, Exchange(route=RouteBy(7)))
    (folded,) = builder.add_operator("fold", "fold", inputs=[exchange])
    builder.add_operator("sink", "collect", inputs=[InputSpec(folded)], num_outputs=0)
    return GraphPlan(builder.build().resolve(1), operators)


@pytest.fixture
def oracle():
    oracle = Oracle(_plan(), 1, 2)
    oracle.observe([Held(SOURCE, 0, (0,), 1)], has_started=True)
    return oracle


def _tracker(oracle, counts):
    return Tracker(oracle.graph.reachability(), counts)


def _send(record, time=0, shard=0):
    return Sent(SOURCE, shard, 0, (time,), (record,), True, None)


def _shard_of(record):
    return RouteBy(7).destination(record, 2)


@pytest.mark.parametrize("seed", range(25))
def test_the_closure_agrees_with_minimal_summaries(seed):
    """Two independent computations: search by edges, and composed summaries."""
    rng = random.Random(seed)
    graph = random_plan(rng, 2, 4, max_records=200).graph
    reachability, closure = graph.reachability(), Closure(graph)
    depths = {
        location: graph.operators[graph.port_of(location).operator].depth
        for location in range(graph.num_locations)
    }
    for location, depth in depths.items():
        time = tuple(rng.randrange(3) for _ in range(depth + 1))
        found = closure.from_(location, time)
        for target in depths:
            expected = set()
            for summary in reachability.minimal_summaries(location, target):
                result = summary.results_in(as_timestamp(time))
                expected.add(as_time(result))
            minimal = {
                a
                for a in expected
                if not any(
                    b != a and less_equal(as_timestamp(b), as_timestamp(a))
                    for b in expected
                )
            }
            assert set(found.get(target, ())) == minimal


def test_initial_capabilities_are_live_until_a_worker_has_started():
    oracle = Oracle(_plan(), 2, 2)
    output = oracle.graph.location_of_output(FOLD)
    assert oracle.truth.live[output, (0,)] == 2

    oracle.observe([], has_started=True)

    assert oracle.truth.live[output, (0,)] == 1


def test_a_record_is_live_until_its_callback_ends(oracle):
    place = oracle.graph.location_of_input(FOLD)
    oracle.observe([_send(16)], has_started=False)
    got = Got(FOLD, _shard_of(16), 0, (0,), 0, (16,))
    oracle.observe([got], has_started=False)
    assert oracle.truth.live[place, (0,)] == 1

    oracle.observe([Done(FOLD, _shard_of(16), 0, (0,), 1)], has_started=False)

    assert oracle.truth.live[place, (0,)] == 0


def test_a_frontier_may_stand_at_what_is_live(oracle):
    source = oracle.graph.location_of_output(SOURCE)

    oracle.check_tracker(0, _tracker(oracle, [(source, 0, 1)]))


def test_a_frontier_that_passed_a_live_capability_is_seen(oracle):
    source = oracle.graph.location_of_output(SOURCE)

    with pytest.raises(Violation, match="safety: for worker 0 the frontier"):
        oracle.check_tracker(0, _tracker(oracle, [(source, 1, 1)]))


def test_what_becomes_live_behind_a_frontier_is_seen(oracle):
    source = oracle.graph.location_of_output(SOURCE)
    oracle.observe(
        [Held(SOURCE, 0, (0,), -1), Held(SOURCE, 0, (3,), 1)], has_started=False
    )
    oracle.check_tracker(0, _tracker(oracle, [(source, 3, 1)]))

    with pytest.raises(Violation, match=r"safety.*live"):
        oracle.observe([_send(16, time=1)], has_started=False)


def test_a_frontier_that_moves_backwards_is_seen(oracle):
    source = oracle.graph.location_of_output(SOURCE)
    tracker = _tracker(oracle, [(source, 0, 1)])
    oracle.observe([Held(SOURCE, 0, (0,), -1)], has_started=False)
    tracker.update_many([(source, 0, -1), (source, 2, 1)])
    tracker.propagate()
    oracle.check_tracker(0, tracker)
    tracker.update_many([(source, 1, 1)])
    tracker.propagate()

    with pytest.raises(Violation, match=r"safety.*went back"):
        oracle.check_tracker(0, tracker)


def test_a_record_that_nobody_sent_is_seen(oracle):
    with pytest.raises(Violation, match=r"delivery.*not sent to it"):
        oracle.observe([Got(FOLD, 0, 0, (0,), 0, (16,))], has_started=False)


def test_a_record_delivered_twice_is_seen(oracle):
    got = Got(FOLD, _shard_of(16), 0, (0,), 0, (16,))

    with pytest.raises(Violation, match=r"delivery.*not sent to it"):
        oracle.observe([_send(16), got, got], has_started=False)


def test_a_record_at_the_wrong_shard_is_seen(oracle):
    got = Got(FOLD, 1 - _shard_of(16), 0, (0,), 0, (16,))

    with pytest.raises(Violation, match=r"delivery.*not sent to it"):
        oracle.observe([_send(16), got], has_started=False)


def test_a_notification_before_the_last_record_is_seen(oracle):
    shard = _shard_of(16)
    asked = Asked(FOLD, shard, (0,), (0,))

    with pytest.raises(Violation, match=r"notification.*is live and leads to"):
        oracle.observe([asked, Told(FOLD, shard, (0,), (0,))], has_started=False)


def test_a_record_after_the_notification_is_seen(oracle):
    shard = _shard_of(16)
    told = [Asked(FOLD, shard, (0,), (0,)), Told(FOLD, shard, (0,), (0,))]
    closed = Held(SOURCE, 0, (0,), -1)
    got = Got(FOLD, shard, 0, (0,), 0, (16,))
    used = Done(FOLD, shard, 0, (0,), 1)

    with pytest.raises(Violation, match=r"notification.*after it was told"):
        oracle.observe([closed, *told, _send(16), got, used], has_started=False)


def test_a_notification_that_nobody_asked_for_is_seen(oracle):
    closed = Held(SOURCE, 0, (0,), -1)

    with pytest.raises(Violation, match=r"notification.*unasked"):
        oracle.observe([closed, Told(FOLD, 0, (0,), (0,))], has_started=False)


def test_notifications_against_the_order_of_time_are_seen(oracle):
    closed = Held(SOURCE, 0, (0,), -1)
    asked = [Asked(FOLD, 0, (time,), (0,)) for time in (1, 2)]

    with pytest.raises(Violation, match=r"is told of \(2,\) while it waits for \(1,\)"):
        oracle.observe([closed, *asked, Told(FOLD, 0, (2,), (0,))], has_started=False)


def test_a_source_too_far_ahead_is_seen(oracle):
    oracle.observe([_send(16), Held(SOURCE, 0, (2,), 1)], has_started=False)

    with pytest.raises(Violation, match=r"credit.*in epoch 2 while 0 is open"):
        oracle.observe([_send(16, time=2)], has_started=False)


def test_results_that_are_released_too_early_are_seen(oracle):
    with pytest.raises(Violation, match=r"notification.*is released"):
        oracle.release(Released("sink", 0, ()))


def test_an_end_with_something_left_is_seen(oracle):
    with pytest.raises(Violation, match="the run is over, but live are"):
        oracle.finish(is_stopped=True)


def test_a_lost_record_is_seen_at_the_end(oracle):
    sent, done = _send(16), Done(FOLD, 0, 0, (0,), 1)
    oracle.observe([sent, Held(SOURCE, 0, (0,), -1), done], has_started=False)

    with pytest.raises(Violation, match=r"delivery.*lost"):
        oracle.finish(is_stopped=True)


def test_a_wrong_result_is_seen_at_the_end(oracle):
    shard = _shard_of(16)
    wrong = make_record(5, 0, 0)
    oracle.observe(
        [
            _send(16),
            Held(SOURCE, 0, (0,), -1),
            Got(FOLD, shard, 0, (0,), 0, (16,)),
            Done(FOLD, shard, 0, (0,), 1),
            Sent(FOLD, shard, 0, (0,), (wrong,), True, None),
            Got(SINK, shard, 0, (0,), shard, (wrong,)),
            Done(SINK, shard, 0, (0,), 1),
        ],
        has_started=False,
    )
    oracle.release(Released("sink", 0, ((shard, [wrong]),)))

    with pytest.raises(Violation, match="output: operator 'sink'"):
        oracle.finish(is_stopped=True)


def test_the_reference_folds_each_time_of_each_shard():
    plan = _plan()
    reference = Reference(plan.graph, plan.operators)
    records = [16, 32, 48, 64]

    reference.run([_send(record, time=record // 48) for record in records])

    expected = Counter()
    for time in (0, 1):
        for shard in (0, 1):
            values = [
                record // 16
                for record in records
                if record // 48 == time and _shard_of(record) == shard
            ]
            if values:
                folded = mix(2, sum(values) + len(values))
                expected[time, make_record(folded, 0, 0)] += 1
    collected = Counter(
        {
            (time[0], record): count
            for time, found in reference.records_at(SINK).items()
            for record, count in found.items()
        }
    )
    assert collected == expected
