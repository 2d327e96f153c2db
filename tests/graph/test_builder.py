from __future__ import annotations

import pickle

import pytest

from timelyml.errors import (
    DuplicateNameError,
    ForeignStreamError,
    GraphError,
    LoopError,
    PlacementError,
    ScopeError,
    ShardCountError,
)
from timelyml.graph import (
    PER_WORKER,
    Broadcast,
    Contiguous,
    Custom,
    Exchange,
    Gather,
    GraphBuilder,
    InputSpec,
    PortRef,
)
from timelyml.progress import Summary

from .graphs import binary, first_byte, loop_graph, sink, source, unary, word_count


def test_each_operator_and_each_edge_is_one_record():
    graph = word_count()
    assert [spec.name for spec in graph.operators] == ["lines", "split", "count", "out"]
    assert [(c.source, c.target) for c in graph.channels] == [
        (PortRef(0, 0), PortRef(1, 0)),
        (PortRef(1, 0), PortRef(2, 0)),
        (PortRef(2, 0), PortRef(3, 0)),
    ]
    assert all(channel.keeps_time for channel in graph.channels)
    assert not any(channel.is_cyclic for channel in graph.channels)


def test_an_operator_keeps_what_it_was_given():
    builder = GraphBuilder("flow", 2)
    logic, placement = object(), Custom((1, 0))
    unary(
        source(builder),
        "a",
        kind="fold",
        logic=logic,
        states=["state", "seen"],
        placement=placement,
    )
    spec = builder.build().operator_named("a")
    assert spec.logic is logic
    assert spec.placement is placement
    assert (spec.kind, spec.states) == ("fold", ("state", "seen"))
    assert (spec.num_inputs, spec.num_outputs, spec.num_shards) == (1, 1, 2)


def test_a_stream_may_have_many_consumers():
    builder = GraphBuilder("flow")
    lines = source(builder)
    sink(lines, "a")
    sink(lines, "b")
    graph = builder.build()
    assert [c.target.operator for c in graph.channels_from(0)] == [1, 2]


def test_building_twice_gives_equal_graphs():
    builder = GraphBuilder("flow")
    lines = source(builder)
    assert builder.build() == builder.build()
    sink(lines)
    assert len(builder.build().operators) == 2


def test_an_empty_dataflow_builds():
    assert GraphBuilder("nothing").build().num_locations == 0


def test_operators_without_a_name_get_readable_ones():
    builder = GraphBuilder("flow")
    lines = source(builder)
    for _ in range(3):
        lines = unary(lines)
    names = [spec.name for spec in builder.build().operators]
    assert names == ["lines", "map", "map-2", "map-3"]


def test_a_second_operator_of_one_name_is_refused():
    builder = GraphBuilder("flow")
    lines = source(builder)
    with pytest.raises(
        DuplicateNameError, match=r"two operators of one name; got 'lin"
    ):
        unary(lines, "lines")


def test_a_refused_operator_leaves_no_trace():
    builder = GraphBuilder("flow", 4)
    lines = source(builder)
    with pytest.raises(ShardCountError, match="cannot be pipelined"):
        unary(lines, "a", num_shards=2)
    unary(lines, "a")
    graph = builder.build()
    assert [spec.name for spec in graph.operators] == ["lines", "a"]
    assert len(graph.channels) == 1


def test_scopes_and_loops_have_names_of_their_own():
    builder = GraphBuilder("flow")
    assert [builder.scope().name, builder.scope().name] == ["scope", "scope-2"]
    builder.scope("rank")
    builder.feedback(name="rank")
    with pytest.raises(DuplicateNameError, match="two scopes of one name; got 'rank'"):
        builder.scope("rank")
    with pytest.raises(DuplicateNameError, match="two loops of one name; got 'rank'"):
        builder.feedback(name="rank")


def test_shards_come_from_the_call_the_first_input_or_the_builder():
    builder = GraphBuilder("flow", 4)
    lines = source(builder)
    wide = unary(lines, "wide", Broadcast(), num_shards=8)
    inherited = unary(wide, "inherited")
    per_worker = unary(inherited, "per worker", Broadcast(), num_shards=PER_WORKER)
    unary(per_worker, "still")
    graph = builder.build()
    counts = {spec.name: spec.num_shards for spec in graph.operators}
    assert counts == {
        "lines": 4,
        "wide": 8,
        "inherited": 8,
        "per worker": None,
        "still": None,
    }
    assert graph.resolve(3).operator_named("still").num_shards == 3
    assert graph.resolve(3).operator_named("wide").num_shards == 8


@pytest.mark.parametrize("num_shards", [-1, 1.5, True, "4"])
def test_a_shard_count_that_is_none_is_refused(num_shards):
    builder = GraphBuilder("flow")
    with pytest.raises(ShardCountError, match="operator 'lines' has"):
        source(builder, num_shards=num_shards)


def test_a_pipeline_between_different_shard_counts_is_refused():
    builder = GraphBuilder("flow", 4)
    lines = source(builder)
    with pytest.raises(
        ShardCountError,
        match="'narrow' cannot be pipelined after 'lines'; got 4 shards of 'lines' and "
        "2 shards of 'narrow'",
    ) as caught:
        unary(lines, "narrow", num_shards=2)
    assert (caught.value.source_shards, caught.value.target_shards) == (4, 2)
    with pytest.raises(ShardCountError, match="1 shard per worker of 'any'"):
        unary(lines, "any", num_shards=PER_WORKER)


def test_a_pipeline_out_of_a_loop_is_checked_once_it_is_connected():
    builder = GraphBuilder("flow", 4)
    scope = builder.scope("loop")
    loop = builder.feedback(scope)
    entered = builder.enter(source(builder), scope)
    merged = binary(entered, loop.stream, "merge")
    loop.connect(unary(merged, "wide", Broadcast(), num_shards=8))
    with pytest.raises(
        ShardCountError, match="'merge' cannot be pipelined after 'wide'"
    ):
        builder.build()


def test_a_gather_beyond_the_last_shard_is_refused():
    builder = GraphBuilder("flow", 4)
    lines = source(builder)
    with pytest.raises(ShardCountError, match="got shard 4; expected less than 4"):
        sink(lines, pact=Gather(4))
    sink(lines, pact=Gather(4), num_shards=PER_WORKER)
    graph = builder.build()
    assert graph.resolve(5).operator_named("out").num_shards == 5
    with pytest.raises(ShardCountError, match="got shard 4; expected less than 2"):
        graph.resolve(2)


def test_a_placement_is_checked_as_soon_as_its_size_is_known():
    builder = GraphBuilder("flow", 4)
    with pytest.raises(PlacementError, match="operator 'lines' is placed by a table"):
        source(builder, placement=Custom((0, 1)))
    source(builder, placement=Custom((0, 1)), num_shards=PER_WORKER)
    graph = builder.build()
    assert graph.resolve(2).operators[0].num_shards == 2
    with pytest.raises(PlacementError, match="got 2; expected 3"):
        graph.resolve(3)


def test_a_placement_on_a_missing_worker_is_refused_when_workers_are_known():
    builder = GraphBuilder("flow", 2)
    source(builder, placement=Custom((0, 3)))
    with pytest.raises(PlacementError, match="got 3; expected less than 2"):
        builder.build().resolve(2)


def test_an_operator_without_inputs_must_be_a_source():
    with pytest.raises(GraphError, match="operator 'a' would never run"):
        GraphBuilder("flow").add_operator("a", "map")


def test_a_sink_has_an_output_that_nobody_reads():
    builder = GraphBuilder("flow")
    inputs = [InputSpec(source(builder))]
    assert builder.add_operator("out", "sink", inputs=inputs, num_outputs=0) == ()
    graph = builder.build()
    assert graph.operator_named("out").num_outputs == 1
    assert graph.operator_named("out").summaries == (((Summary.identity(0),),),)
    assert graph.channels_from(1) == ()


def test_summaries_of_an_operator_are_its_minimal_ones():
    builder = GraphBuilder("flow")
    later, now = Summary.advance(0, by=2), Summary.identity(0)
    unary(source(builder), "a", summaries=[[[later, now, later]]])
    assert builder.build().operator_named("a").summaries == (((now,),),)


def test_an_operator_may_do_one_of_several_things_to_time():
    builder = GraphBuilder("flow")
    entered = builder.enter(source(builder), builder.scope("loop"))
    effects = [Summary(2, (0, 3)), Summary(2, (1, 0))]
    unary(entered, "a", summaries=[[effects]])
    graph = builder.build()
    assert graph.operator_named("a").summaries == ((tuple(effects),),)
    ways = graph.reachability().minimal_summaries(
        graph.location_of_input(1), graph.location_of_output(1)
    )
    assert sorted(way.results_in((5, 5)) for way in ways.elements) == [(5, 8), (6, 5)]


def test_an_input_may_be_disconnected_from_an_output():
    builder = GraphBuilder("flow")
    lines = source(builder)
    inputs = [InputSpec(lines), InputSpec(lines)]
    here = Summary.identity(0)
    builder.add_operator("a", "join", inputs=inputs, summaries=[[[here]], [[]]])
    assert builder.build().operator_named("a").summaries == (((here,),), ((),))


@pytest.mark.parametrize("summaries", [[], [[]], [[[], []]], [[[]], [[]]]])
def test_summaries_of_the_wrong_shape_are_refused(summaries):
    lines = source(GraphBuilder("flow"))
    with pytest.raises(GraphError, match="expected 1 inputs by 1 outputs"):
        unary(lines, "a", summaries=summaries)


@pytest.mark.parametrize("summary", [Summary.enter(0), Summary.identity(1)])
def test_a_summary_that_changes_the_scope_is_refused(summary):
    lines = source(GraphBuilder("flow"))
    with pytest.raises(GraphError, match="operator 'a' has a summary that changes"):
        unary(lines, "a", summaries=[[[summary]]])


def test_entering_and_leaving_are_summaries_on_channels():
    graph = loop_graph()
    summaries = {
        (
            graph.operators[c.source.operator].name,
            graph.operators[c.target.operator].name,
        ): c
        for c in graph.channels
    }
    assert len(graph.operators) == 4
    assert summaries["lines", "merge"].summary == Summary.enter(0)
    assert summaries["step", "merge"].summary == Summary.advance(1)
    assert summaries["step", "out"].summary == Summary.leave(1)
    assert [spec.scope for spec in graph.operators] == [(), (0,), (0,), ()]


def test_leaving_changes_time_although_its_summary_looks_like_an_identity():
    (leaving,) = (c for c in loop_graph().channels if c.summary == Summary.leave(1))
    assert leaving.summary.is_identity
    assert not leaving.keeps_time


def test_entering_and_leaving_at_once_is_no_change():
    builder = GraphBuilder("flow")
    lines = source(builder)
    inside = builder.enter(lines, builder.scope("loop"))
    sink(builder.leave(inside))
    (channel,) = builder.build().channels
    assert channel.summary == Summary.identity(0)
    assert channel.keeps_time


def test_scopes_nest():
    builder = GraphBuilder("flow")
    outer = builder.scope("outer")
    inner = builder.scope("inner", parent=outer)
    lines = source(builder)
    deep = unary(builder.enter(builder.enter(lines, outer), inner), "deep")
    sink(builder.leave(builder.leave(deep)))
    graph = builder.build()
    assert graph.operator_named("deep").scope == (0, 1)
    first, last = graph.channels
    assert first.summary.results_in(7) == (7, 0, 0)
    assert last.summary.results_in((7, 2, 3)) == 7


def test_a_source_may_stand_in_a_scope():
    builder = GraphBuilder("flow")
    scope = builder.scope("loop")
    assert source(builder, scope=scope).scope == (0,)


def test_a_scope_is_entered_one_at_a_time():
    builder = GraphBuilder("flow")
    inner = builder.scope("inner", parent=builder.scope("outer"))
    lines = source(builder)
    with pytest.raises(
        ScopeError,
        match=r"stream 'lines' cannot enter scope 'inner' .* got the top level; "
        "expected scope 'outer'",
    ):
        builder.enter(lines, inner)


def test_leaving_at_the_top_level_is_refused():
    builder = GraphBuilder("flow")
    lines = source(builder)
    with pytest.raises(ScopeError, match="stream 'lines' cannot leave a scope"):
        builder.leave(lines)


def test_streams_of_different_scopes_do_not_meet():
    builder = GraphBuilder("flow")
    outside = source(builder)
    inside = builder.enter(source(builder, "seeds"), builder.scope("loop"))
    with pytest.raises(
        ScopeError,
        match="operator 'merge' takes a stream of another scope; got stream 'lines' in "
        "the top level; expected scope 'loop'; enter or leave a scope first",
    ) as caught:
        binary(inside, outside, "merge")
    assert caught.value.operator == "merge"


def test_an_operator_stands_in_the_scope_it_names():
    builder = GraphBuilder("flow")
    lines = source(builder)
    with pytest.raises(ScopeError, match="expected scope 'loop'"):
        unary(lines, scope=builder.scope("loop"))


def test_a_loop_that_is_never_connected_is_refused_by_name():
    builder = GraphBuilder("flow")
    builder.feedback(builder.scope("loop"), name="rank")
    with pytest.raises(LoopError, match="loop 'rank' is never connected") as caught:
        builder.build()
    assert caught.value.loop == "rank"


def test_a_loop_is_connected_once():
    builder = GraphBuilder("flow")
    loop = builder.feedback(name="rank")
    lines = source(builder)
    loop.connect(lines)
    with pytest.raises(LoopError, match="got stream 'lines' after stream 'lines'"):
        loop.connect(lines)


def test_a_loop_is_connected_in_its_own_scope():
    builder = GraphBuilder("flow")
    loop = builder.feedback(builder.scope("loop"), name="rank")
    lines = source(builder)
    with pytest.raises(ScopeError, match="into loop 'rank'; got the top level; exp"):
        loop.connect(lines)


def test_a_loop_without_an_operator_is_refused():
    builder = GraphBuilder("flow")
    first, second = builder.feedback(name="a"), builder.feedback(name="b")
    first.connect(second.stream)
    second.connect(first.stream)
    sink(first.stream)
    with pytest.raises(LoopError, match="loop 'a' feeds itself"):
        builder.build()


def test_a_loop_may_be_fed_by_another_loop():
    builder = GraphBuilder("flow")
    first, second = builder.feedback(name="a"), builder.feedback(by=2, name="b")
    merged = binary(source(builder), first.stream, "merge")
    first.connect(second.stream)
    second.connect(merged)
    graph = builder.build()
    assert graph.channels_into(1, 1)[0].summary == Summary.advance(0, by=3)


def test_feedback_at_the_top_level_advances_the_epoch():
    builder = GraphBuilder("flow")
    loop = builder.feedback()
    loop.connect(binary(source(builder), loop.stream, "merge"))
    (channel,) = builder.build().channels_into(1, 1)
    assert channel.summary.results_in(4) == 5
    assert channel.is_cyclic


def test_a_loop_may_advance_by_any_summary_of_its_scope():
    builder = GraphBuilder("flow")
    scope = builder.scope("loop")
    next_epoch = Summary(2, (1, 0))
    loop = builder.feedback(scope, summary=next_epoch)
    entered = builder.enter(source(builder), scope)
    loop.connect(binary(entered, loop.stream, "merge"))
    assert builder.build().channels_into(1, 1)[0].summary == next_epoch
    with pytest.raises(GraphError, match="loop 'bad' has a summary that changes"):
        builder.feedback(scope, summary=Summary.leave(1), name="bad")


def test_a_loop_does_not_go_backwards():
    with pytest.raises(GraphError, match="loop 'rank' cannot go backwards; got by=-1"):
        GraphBuilder("flow").feedback(by=-1, name="rank")


def test_advances_beyond_the_last_time_are_refused():
    builder = GraphBuilder("flow")
    first, second = (builder.feedback(by=2**62, name=name) for name in "ab")
    first.connect(second.stream)
    second.connect(source(builder))
    sink(first.stream)
    with pytest.raises(GraphError, match="loop 'a' never has a time left"):
        builder.build()


def test_parts_of_another_dataflow_are_refused():
    mine, other = GraphBuilder("mine"), GraphBuilder("other")
    foreign, scope = source(other, "theirs"), other.scope("loop")
    lines = source(mine)
    match = "belongs to another dataflow; got one of 'other'; expected one of 'mine'"
    for use in (
        lambda: binary(lines, foreign),
        lambda: mine.enter(lines, scope),
        lambda: mine.enter(foreign, mine.scope()),
        lambda: mine.leave(foreign),
        lambda: mine.scope(parent=scope),
        lambda: mine.feedback(scope),
        lambda: mine.connect(other.feedback(), lines),
        lambda: mine.feedback().connect(foreign),
        lambda: source(mine, "x", scope=scope),
    ):
        with pytest.raises(ForeignStreamError, match=match):
            use()


def test_errors_survive_pickling_with_their_values():
    builder = GraphBuilder("flow", 4)
    lines = source(builder)
    with pytest.raises(ShardCountError, match="cannot be pipelined") as caught:
        unary(lines, "narrow", num_shards=2)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is ShardCountError
    assert str(copy) == str(caught.value)
    assert copy.target == "narrow"


def test_routes_of_the_user_reach_the_channel():
    builder = GraphBuilder("flow")
    unary(source(builder), "a", Exchange.by_key(first_byte))
    (channel,) = builder.build().channels
    assert channel.pact == Exchange(key=first_byte)


def test_a_pipelined_operator_stands_where_its_producer_does():
    builder = GraphBuilder("placed", num_shards=4)
    (near,) = builder.add_operator(
        "near", "source", is_source=True, placement=Contiguous()
    )
    (mapped,) = builder.add_operator("mapped", "map", inputs=[InputSpec(near)])
    builder.add_operator("spread", "map", inputs=[InputSpec(mapped, Broadcast())])

    graph = builder.build()

    placements = [spec.placement for spec in graph.operators]
    assert placements == [Contiguous(), Contiguous(), None]
