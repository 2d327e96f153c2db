from __future__ import annotations

import re

import pytest

from timelyml.errors import CycleError, DenseEdgeError
from timelyml.graph import (
    Broadcast,
    Exchange,
    Gather,
    GraphBuilder,
    InputSpec,
    Pipeline,
)
from timelyml.progress import Summary

from .graphs import binary, first_byte, loop_graph, sink, source, unary

DENSE = Pipeline(dense=True)
BY_KEY = Exchange.by_key(first_byte)


def loop_through(builder, *names, by):
    """A top-level cycle through the named operators; the first also has a source."""
    loop = builder.feedback(by=by)
    stream = binary(source(builder), loop.stream, names[0])
    for name in names[1:]:
        stream = unary(stream, name)
    loop.connect(stream)
    return stream


@pytest.mark.parametrize(
    ("names", "path"),
    [("a", ("a", "a")), ("ab", ("a", "b", "a")), ("abc", ("a", "b", "c", "a"))],
)
def test_a_cycle_that_does_not_advance_is_refused_with_its_path(names, path):
    builder = GraphBuilder("flow")
    loop_through(builder, *names, by=0)
    with pytest.raises(CycleError, match="does not advance time") as caught:
        builder.build()
    found = caught.value.path
    assert len(found) == len(path)
    assert found[0] == found[-1]
    assert set(found) == set(path)
    assert " -> ".join(found) in str(caught.value)


def test_an_operator_that_advances_makes_a_cycle_legal():
    builder = GraphBuilder("flow")
    loop = builder.feedback(by=0)
    merged = binary(source(builder), loop.stream, "merge")
    loop.connect(unary(merged, "delay", summaries=[[[Summary.advance(0)]]]))
    assert len(builder.build().channels) == 3


def test_an_input_that_causes_no_output_makes_a_cycle_legal():
    builder = GraphBuilder("flow")
    loop = builder.feedback(by=0)
    inputs = [InputSpec(source(builder)), InputSpec(loop.stream)]
    here = Summary.identity(0)
    (out,) = builder.add_operator(
        "gate", "gate", inputs=inputs, summaries=[[[here]], [[]]]
    )
    loop.connect(out)
    assert not any(channel.is_cyclic for channel in builder.build().channels)


def test_one_slow_way_among_fast_ones_is_found():
    # merge -> step -> merge advances, but there is a way past the feedback.
    builder = GraphBuilder("flow")
    fast, slow = (
        builder.feedback(by=1, name="fast"),
        builder.feedback(by=0, name="slow"),
    )
    merged = binary(source(builder), fast.stream, "merge")
    both = binary(merged, slow.stream, "both")
    fast.connect(both)
    slow.connect(both)
    with pytest.raises(CycleError, match="both -> both"):
        builder.build()


def test_advancing_a_counter_that_is_left_and_entered_again_does_not_count():
    builder = GraphBuilder("flow")
    scope = builder.scope("loop")
    loop = builder.feedback(scope)
    merged = binary(builder.enter(source(builder), scope), loop.stream, "merge")
    loop.connect(builder.enter(builder.leave(merged), scope))
    with pytest.raises(CycleError, match="merge -> merge"):
        builder.build()


def test_an_outer_counter_may_advance_around_an_inner_scope():
    builder = GraphBuilder("flow")
    scope = builder.scope("inner")
    loop = builder.feedback(name="epochs")
    merged = binary(source(builder), loop.stream, "merge")
    inside = unary(builder.enter(merged, scope), "inside")
    loop.connect(builder.leave(inside))
    assert all(
        channel.is_cyclic == (channel.source.operator != 0)
        for channel in builder.build().channels
    )


def test_only_edges_of_cycles_are_cyclic():
    graph = loop_graph()
    cyclic = {
        (
            graph.operators[c.source.operator].name,
            graph.operators[c.target.operator].name,
        )
        for c in graph.channels
        if c.is_cyclic
    }
    assert cyclic == {("merge", "step"), ("step", "merge")}


def dense_chain(**merge_options):
    """lines =dense=> a (promises) =dense=> b; returns the builder and b's stream."""
    builder = GraphBuilder("flow", 2)
    lines = source(builder, regular=True)
    a = unary(lines, "a", DENSE, regular=True)
    return builder, unary(a, "b", DENSE, **merge_options)


def test_dense_edges_follow_each_other_from_a_regular_source():
    builder, b = dense_chain(regular=True)
    sink(b, pact=Broadcast(dense=True))
    graph = builder.build()
    assert [spec.regular for spec in graph.operators] == [True, True, True, False]


def test_a_dense_edge_needs_a_producer_that_promises_to_be_regular():
    builder, b = dense_chain(kind="filter")
    sink(b, pact=DENSE)
    with pytest.raises(
        DenseEdgeError,
        match="edge from 'b' to 'out' cannot be dense; got a filter, which need not fire",
    ) as caught:
        builder.build()
    assert (caught.value.producer, caught.value.consumer) == ("b", "out")


def test_a_source_that_does_not_promise_feeds_no_dense_edge():
    builder = GraphBuilder("flow", 2)
    sink(source(builder), pact=DENSE)
    with pytest.raises(DenseEdgeError, match=r"from 'lines' to 'out' .* got a source"):
        builder.build()


def test_after_a_sparse_edge_a_promise_is_not_enough():
    builder = GraphBuilder("flow", 2)
    lines = source(builder, regular=True)
    sparse = unary(lines, "sparse", BY_KEY, regular=True)
    sink(sparse, pact=DENSE)
    with pytest.raises(
        DenseEdgeError, match=r"'sparse' to 'out' .* no dense input tells of every time"
    ):
        builder.build()


@pytest.mark.parametrize(("num_shards", "is_told"), [(1, True), (2, False)])
def test_a_dense_gather_tells_one_shard_alone(num_shards, is_told):
    builder = GraphBuilder("flow", 2)
    gathered = unary(
        source(builder, regular=True),
        "gathered",
        Gather(dense=True),
        regular=True,
        num_shards=num_shards,
    )
    sink(gathered, pact=Broadcast(dense=True))
    if is_told:
        assert builder.build().operators[1].regular
    else:
        with pytest.raises(DenseEdgeError, match="of every time on every shard"):
            builder.build()


def test_a_promise_that_is_not_kept_does_no_harm_without_dense_edges():
    builder = GraphBuilder("flow", 2)
    sink(unary(source(builder, regular=True), "sparse", BY_KEY, regular=True))
    graph = builder.build()
    assert [spec.regular for spec in graph.operators] == [True, False, False]


def test_an_operator_told_densely_may_feed_a_dense_edge_after_a_sparse_one():
    builder = GraphBuilder("flow", 2)
    lines = source(builder, regular=True)
    sparse = unary(lines, "route", BY_KEY)
    inputs = [InputSpec(lines, DENSE), InputSpec(sparse, BY_KEY)]
    (combined,) = builder.add_operator("expert", "compute", inputs=inputs, regular=True)
    sink(combined, pact=DENSE)
    assert builder.build().operator_named("expert").regular


def test_operators_that_only_tell_each_other_are_not_regular():
    builder = GraphBuilder("flow", 2)
    loop = builder.feedback()
    inputs = [InputSpec(source(builder)), InputSpec(loop.stream, DENSE)]
    (stream,) = builder.add_operator("step", "step", inputs=inputs, regular=True)
    loop.connect(stream)
    with pytest.raises(DenseEdgeError, match="from 'step' to 'step' cannot be dense"):
        builder.build()


def test_a_dense_edge_may_enter_a_scope_but_not_leave_it():
    builder = GraphBuilder("flow", 2)
    lines = source(builder, regular=True)
    inside = unary(
        builder.enter(lines, builder.scope("loop")), "inside", DENSE, regular=True
    )
    assert builder.build().operator_named("inside").regular
    sink(builder.leave(inside), pact=DENSE)
    with pytest.raises(DenseEdgeError, match="got an edge out of a scope"):
        builder.build()


def test_messages_keep_the_form_of_the_house():
    builder = GraphBuilder("flow")
    loop_through(builder, "a", "b", by=0)
    with pytest.raises(CycleError, match="flow") as caught:
        builder.build()
    assert re.fullmatch(r".+; got .+; expected .+; .+", str(caught.value))
