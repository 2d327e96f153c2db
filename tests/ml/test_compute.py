"""`compute` against numpy, wherever it runs and in whatever order blocks arrive."""

import functools
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

from timelyml import Broadcast, Dataflow
from timelyml.errors import ConfigError, GraphError, OperatorError
from timelyml.ml import bucket_size, compiled, compute

EPOCHS = 4


def table(epoch, shard, rows=5):
    rng = np.random.default_rng([epoch, shard])
    return rng.standard_normal((rows + epoch, 3)).astype(np.float32)


def tables(flow, num_shards=2):
    """A source of `EPOCHS` epochs, in which every shard sends a table of its own."""

    def read(shard, num_shards):
        return (table(epoch, shard) for epoch in range(EPOCHS))

    return flow.source(read, num_shards=num_shards, regular=True, name="tables")


def collected(flow, up):
    from timelyml.operators import collect

    collect(up, name="out")
    return flow


def test_a_function_is_applied_to_all_rows_of_a_time(cluster):
    flow = Dataflow("f")
    result = cluster.run(
        collected(flow, compute(tables(flow).ref, lambda x: jnp.sin(x).sum(axis=1)))
    )
    batches = result.batches("out")
    assert len(batches) == 2 * EPOCHS
    for index, (time, rows) in enumerate(batches):
        expected = np.sin(table(time, index % 2)).sum(axis=1)
        np.testing.assert_allclose(rows, expected, rtol=1e-5)


def test_rows_come_in_the_order_of_producer_shards(cluster):
    flow = Dataflow("f")
    gathered = compute(
        tables(flow, 3).gather().ref, lambda x: x, num_shards=1, name="gathered"
    )
    result = cluster.run(collected(flow, gathered))
    for time, rows in result.batches("out"):
        expected = np.concatenate([table(time, shard) for shard in range(3)])
        assert (rows == expected).all()


def test_state_lives_with_the_shard_and_changes_in_time_order(cluster):
    def step(total, rows):
        total = total * 2 + rows.sum(axis=0)
        return total, total[None]

    flow = Dataflow("f")
    totals = compute(
        tables(flow).ref, step, init=lambda shard: np.full(3, shard, np.float32)
    )
    result = cluster.run(collected(flow, totals))
    expected = [np.full(3, shard, np.float32) for shard in range(2)]
    for index, (time, rows) in enumerate(result.batches("out")):
        shard = index % 2
        expected[shard] = expected[shard] * 2 + table(time, shard).sum(axis=0)
        np.testing.assert_allclose(rows[0], expected[shard], rtol=1e-4)


def test_padded_rows_are_cut_and_shapes_are_few(cluster):
    def double(rows):
        assert rows.shape[0] == bucket_size(rows.shape[0])  # while it is traced
        return {"twice": rows["x"] * 2} if isinstance(rows, dict) else rows * 2

    flow = Dataflow("f")
    doubled = compute(tables(flow).ref, double, pad=True)
    result = cluster.run(collected(flow, doubled))
    for index, (time, rows) in enumerate(result.batches("out")):
        assert (rows == table(time, index % 2) * 2).all()


def test_several_streams_are_arguments_of_the_function(cluster):
    flow = Dataflow("f")
    up = tables(flow)
    squares = compute(up.ref, lambda x: x**2, name="squares")
    both = compute([up.ref, squares], lambda x, y: x + y, name="both")
    result = cluster.run(collected(flow, both))
    for index, (time, rows) in enumerate(result.batches("out")):
        rows_in = table(time, index % 2)
        np.testing.assert_allclose(rows, rows_in + rows_in**2, rtol=1e-6)


def test_a_stream_without_rows_at_a_time_gives_none_of_the_known_shape(cluster):
    def sparse(shard, num_shards):
        yield 0, np.ones((2, 3), np.float32)
        yield 2, np.ones((4, 3), np.float32)

    flow = Dataflow("f")
    some = flow.source(sparse, num_shards=2, name="some")
    sizes = compute(
        [tables(flow).ref, some.ref],
        lambda x, y: jnp.array([[x.shape[0], y.shape[0]]]),
    )
    result = cluster.run(collected(flow, sizes))
    seen = [(time, rows[0].tolist()) for time, rows in result.batches("out")]
    assert seen[::2] == [(0, [5, 2]), (1, [6, 0]), (2, [7, 4]), (3, [8, 0])]


def test_records_that_are_numbers_arrive_as_an_array(cluster):
    flow = Dataflow("f")
    result = cluster.run(
        collected(flow, compute(flow.source([1, 2, 3]).ref, lambda x: x + 1))
    )
    assert [int(value) for value in result["out"]] == [2, 3, 4]


def test_it_may_feed_a_dense_edge_where_it_is_told_of_every_time(cluster):
    flow = Dataflow("f")
    told = compute(tables(flow).ref, lambda x: x, pact=Broadcast(dense=True), name="a")
    again = compute(told, lambda x: x[:1], pact=Broadcast(dense=True), name="b")
    result = cluster.run(collected(flow, again))
    assert len(result["out"]) == 2 * EPOCHS


def test_an_error_in_the_function_names_the_operator(cluster):
    def wrong(rows):
        raise KeyError("no such column")

    flow = Dataflow("f")
    graph = collected(flow, compute(tables(flow).ref, wrong, name="wrong"))
    with pytest.raises(OperatorError, match="wrong"):
        cluster.run(graph)


def test_what_cannot_be_computed_is_refused_at_the_call():
    flow = Dataflow("f")
    up = tables(flow).ref
    with pytest.raises(ConfigError, match="not a function"):
        compute(up, 3)
    with pytest.raises(ConfigError, match="cannot draw its state"):
        compute(up, lambda s, x: (s, x), init=np.zeros(3))
    with pytest.raises(ConfigError, match="pacts for other streams"):
        compute(up, lambda x: x, pact=[Broadcast(), Broadcast()])
    with pytest.raises(GraphError, match="needs a stream"):
        compute([up, "stream"], lambda x, y: x)


def negative(x):
    return -x


def test_the_fluent_method_computes_too(cluster):
    flow = Dataflow("f")
    up = tables(flow)
    sums = up.compute(lambda x: x.sum(axis=1), name="sums")
    up.compute(lambda x, y: x * y[:, None], sums, pad=True).collect()
    result = cluster.run(flow)
    for index, (time, rows) in enumerate(result.batches("out")):
        given = table(time, index % 2)
        expected = given * given.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-6)


def test_a_compiled_function_travels_without_its_compiled_form():
    double = compiled(negative)
    assert float(double(2.0)) == -2.0
    copy = pickle.loads(pickle.dumps(double))
    assert copy._jitted is None
    assert float(copy(3.0)) == -3.0
    assert copy.name == "negative"


def scaled(factor, rows):
    TRACED.append(factor)
    return rows * factor


TRACED = []


def test_copies_of_a_function_in_one_process_are_compiled_once():
    TRACED.clear()
    for _ in range(3):
        copy = pickle.loads(pickle.dumps(compiled(functools.partial(scaled, 3.0))))
        assert float(copy(jnp.float32(2))) == 6.0
    assert TRACED == [3.0]


def test_what_a_partial_binds_may_be_unhashable_and_donations_still_fit():
    def move(by, state, rows):
        return state + by[0], rows

    moved = compiled(functools.partial(move, [2.0]), donate=(0,))
    assert float(moved(jnp.zeros(4), jnp.ones(2))[0][0]) == 2.0


def grow(state, rows):
    state = state + rows.sum()
    return state, state


def test_what_was_sent_stays_as_it_was_though_its_memory_is_donated(cluster):
    # The state, whose memory each step may reuse, is also what the step before sent.
    flow = Dataflow("f")
    grown = compute(
        tables(flow).ref,
        compiled(grow, donate=(0,)),
        init=lambda shard: np.full(50_000, shard, np.float32),  # beyond one frame
    )
    batches = cluster.run(collected(flow, grown)).batches("out")

    assert len(batches) == 2 * EPOCHS
    for index, (time, state) in enumerate(batches):
        assert not state.flags.writeable
        total = sum(table(epoch, index % 2).sum() for epoch in range(time + 1))
        np.testing.assert_allclose(state, np.full(50_000, index % 2 + total), rtol=1e-4)
