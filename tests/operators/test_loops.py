"""Nested scopes and loops."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timelyml import Dataflow, Logic
from timelyml.errors import ConfigError, GraphError, LoopLimitError

EDGES = [(0, 1), (1, 2), (2, 3), (3, 1), (2, 4), (5, 6), (4, 7), (7, 0)]


def collatz_length(n):
    length = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        length += 1
    return length


def collatz_step(pair):
    start, n, length = pair
    return (start, n // 2 if n % 2 == 0 else 3 * n + 1, length + 1)


def test_iterate_goes_round_until_nothing_comes_back(cluster):
    def body(stream):
        done, again = stream.branch(lambda item: item[1] == 1)
        return again.map(collatz_step), done

    flow = Dataflow(num_shards=2)
    numbers = flow.source(range(1, 40)).exchange(lambda n: n)
    numbers.map(lambda n: (n, n, 0)).iterate(body).collect()

    found = {start: length for start, _, length in cluster.run(flow)["out"]}
    assert found == {n: collatz_length(n) for n in range(1, 40)}


def test_iterate_with_one_stream_goes_round_exactly_so_often(cluster):
    flow = Dataflow()
    numbers = flow.source(range(5))
    numbers.iterate(lambda s: s.map(lambda n: n + 1), max_iterations=7).collect()

    assert cluster.run(flow)["out"] == [n + 7 for n in range(5)]


def test_one_round_is_the_body_itself(cluster):
    flow = Dataflow()
    flow.source([1]).iterate(lambda s: s.map(str), max_iterations=1).collect()

    assert cluster.run(flow)["out"] == ["1"]


def test_max_iterations_drops_what_would_go_round_longer(cluster):
    def body(stream):
        out = stream.map(lambda n: n + 1)
        return out, out

    flow = Dataflow()
    flow.source([0]).iterate(body, max_iterations=4).collect()

    assert sorted(cluster.run(flow)["out"]) == [1, 2, 3, 4]


def test_what_leaves_a_loop_gets_the_time_at_which_it_entered(cluster):
    def body(stream):
        done, again = stream.map(lambda n: n - 1).branch(lambda n: n <= 0)
        return again, done

    flow = Dataflow(num_shards=2)
    stream = flow.source([3, 1, 5, 2], batch_size=1, epoch_every=1)
    stream.iterate(body).map(lambda n: 1).fold(0, lambda a, n: a + n).collect()

    assert cluster.run(flow).batches("out") == [(time, [1]) for time in range(4)]


def test_reachability_by_semi_naive_iteration(cluster):
    successors = defaultdict(set)
    for source, target in EDGES:
        successors[source].add(target)

    def fresh(shard, delivery):
        seen = shard.state_of("seen").setdefault(delivery.time[0], set())
        new = sorted({pair for pair in delivery.payload if pair not in seen})
        seen.update(new)
        shard.output().send(delivery.time, new)

    def body(pairs):
        new = pairs.exchange(lambda pair: pair[0]).unary(fresh, states=["seen"])
        again = new.flat_map(
            lambda pair: [(pair[0], target) for target in successors[pair[1]]]
        )
        return again, new

    flow = Dataflow(num_shards=3)
    flow.source(EDGES).iterate(body).collect()

    expected = set()
    for start in {source for source, _ in EDGES}:
        queue = deque(successors[start])
        while queue:
            node = queue.popleft()
            if (start, node) not in expected:
                expected.add((start, node))
                queue.extend(successors[node])
    found = cluster.run(flow)["out"]
    assert sorted(found) == sorted(expected)


def test_loops_nest(cluster):
    def inner(stream):
        return stream.map(lambda n: n + 1)

    def outer(stream):
        return stream.iterate(inner, max_iterations=3).map(lambda n: 10 * n)

    flow = Dataflow(num_shards=2)
    flow.source([0, 1]).exchange(lambda n: n).iterate(outer, max_iterations=2).collect()

    expected = [((n + 3) * 10 + 3) * 10 for n in (0, 1)]
    assert sorted(cluster.run(flow)["out"]) == expected


def test_a_stream_that_enters_and_leaves_at_once_is_itself(cluster):
    flow = Dataflow()
    stream = flow.source(range(6), batch_size=2, epoch_every=1)
    stream.enter(flow.scope("inside")).leave().collect()

    assert cluster.run(flow).batches("out") == [(0, [0, 1]), (1, [2, 3]), (2, [4, 5])]


def test_a_routed_stream_enters_and_leaves_too(cluster):
    flow = Dataflow(num_shards=3)
    routed = flow.source(range(6)).exchange(lambda n: n)
    routed.enter(flow.scope()).leave().fold(0, lambda a, n: a + n).collect()

    assert sorted(cluster.run(flow)["out"]) == [0 + 3, 1 + 4, 2 + 5]


def test_a_loop_of_ones_own_with_another_stride(cluster):
    flow = Dataflow(num_shards=2)
    scope = flow.scope("rounds")
    loop = flow.feedback(scope, by=2, num_shards=2)
    stream = flow.source([0]).enter(scope).concat(loop.stream)

    def note(shard, delivery):
        rounds = delivery.time[-1]
        shard.output(0).send(delivery.time, [rounds])
        if rounds < 6:
            shard.output(1).send(delivery.time, [0])

    unary = flow.operator(Logic(on_batch=note), inputs=[stream], outputs=2)
    loop.connect(unary[1])
    unary[0].leave().collect()

    assert sorted(cluster.run(flow)["out"]) == [0, 2, 4, 6]


def test_feedback_at_the_top_level_goes_to_the_next_epoch(cluster):
    flow = Dataflow(num_shards=1)
    loop = flow.feedback()
    stream = flow.source([3]).concat(loop.stream)
    loop.connect(stream.map(lambda n: n - 1).filter(lambda n: n > 0))
    stream.collect()

    assert cluster.run(flow).batches("out") == [(0, [3]), (1, [2]), (2, [1])]


def test_what_feedback_takes_beyond_the_last_time_is_dropped(cluster):
    flow = Dataflow(num_shards=1)
    loop = flow.feedback(by=2**61)
    stream = flow.source(["x"]).concat(loop.stream)
    loop.connect(stream.map(str.upper))
    stream.collect()

    times = [time for time, _ in cluster.run(flow).batches("out")]
    assert times == [0, 2**61, 2**62, 3 * 2**61]


def test_a_loop_that_is_never_connected_is_refused_by_name():
    flow = Dataflow()
    scope = flow.scope()
    loop = flow.feedback(scope, name="rank")
    flow.source([1]).enter(scope).concat(loop.stream).leave().collect()

    with pytest.raises(GraphError, match="'rank' is never connected"):
        flow.build()


@pytest.mark.parametrize(
    "body", [lambda s: s.map(abs), lambda s: s.map(abs).exchange(abs)]
)
def test_a_body_that_leaves_in_no_way_is_refused(body):
    stream = Dataflow().source([1])

    match = "has a body that ends nowhere; got only stream 'map'; expected"
    with pytest.raises(GraphError, match=match):
        stream.iterate(body)


def test_a_body_that_returns_no_stream_is_refused():
    stream = Dataflow().source([1])

    with pytest.raises(GraphError, match="needs a stream to read; got None"):
        stream.iterate(lambda s: None)


def test_max_iterations_must_be_positive():
    stream = Dataflow().source([1])

    with pytest.raises(ConfigError, match="'max_iterations' out of range; got 0"):
        stream.iterate(lambda s: s, max_iterations=0)


def test_a_loop_beyond_its_limit_fails_the_run_by_its_name(cluster):
    flow = Dataflow()
    endless = flow.source([1]).iterate(
        lambda s: s.map(lambda n: n + 1).branch(lambda n: n > 0),
        limit=20,
        name="growth",
    )
    endless.collect()

    with pytest.raises(LoopLimitError, match="loop 'growth' does not end; got 21"):
        cluster.run(flow)


def test_a_loop_within_its_limit_is_left_alone(cluster):
    def halve(numbers):
        return numbers.map(lambda n: n // 2).branch(lambda n: n > 0)

    flow = Dataflow()
    flow.source([8, 3]).iterate(halve, limit=4).collect()

    assert cluster.run(flow)["out"] == [0, 0]


def test_a_stream_of_another_scope_cannot_be_read():
    flow = Dataflow()
    outside = flow.source([1])

    with pytest.raises(GraphError, match="takes a stream of another scope"):
        outside.iterate(lambda s: (s.concat(outside), s))


@settings(max_examples=20, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 30), max_size=10),
    rounds=st.integers(1, 4),
    num_shards=st.integers(1, 3),
)
def test_rounds_compose(numbers, rounds, num_shards):
    flow = Dataflow(num_shards=num_shards)

    def body(stream):
        return stream.exchange(lambda n: n).map(lambda n: 2 * n + 1)

    flow.source(numbers).iterate(body, max_iterations=rounds).collect()

    expected = numbers
    for _ in range(rounds):
        expected = [2 * n + 1 for n in expected]
    assert sorted(flow.run()["out"]) == sorted(expected)
