"""Random graphs, valid and not."""

from __future__ import annotations

from hypothesis import strategies as st

from timelyml.graph import (
    Broadcast,
    Graph,
    GraphBuilder,
    InputSpec,
    Pipeline,
    ScopeRef,
    StreamRef,
)
from timelyml.progress import Summary


@st.composite
def builders(draw, loop_by) -> GraphBuilder:
    """A builder of a random graph with nested scopes, loops and several ports.

    Streams enter a scope before any leaves it, so that every cycle stays in the
    scope of one of its loops: if `loop_by` is at least 1, each graph is valid.
    """
    builder = GraphBuilder("random", draw(st.sampled_from([None, 1, 3])))
    scopes: list[ScopeRef | None] = [None]
    for _ in range(draw(st.integers(0, 3))):
        scopes.append(builder.scope(parent=draw(st.sampled_from(scopes))))
    paths = [scope.path if scope else () for scope in scopes]
    streams: dict[tuple[int, ...], list[StreamRef]] = {path: [] for path in paths}
    loops = [
        builder.feedback(draw(st.sampled_from(scopes)), by=draw(loop_by))
        for _ in range(draw(st.integers(0, 3)))
    ]
    for loop in loops:
        streams[loop.stream.scope].append(loop.stream)
    for scope, path in zip(scopes, paths, strict=True):
        streams[path] += builder.add_operator(
            None, "source", is_source=True, scope=scope
        )
        if scope is not None and draw(st.booleans()):
            outside = draw(st.sampled_from(streams[path[:-1]]))
            streams[path].append(builder.enter(outside, scope))
        draw_operators(draw, builder, streams[path])
    for path in reversed(paths):
        draw_operators(draw, builder, streams[path])
        if path and draw(st.booleans()):
            inside = draw(st.sampled_from(streams[path]))
            streams[path[:-1]].append(builder.leave(inside))
    for loop in loops:
        # a loop that is fed by loops alone has no operator
        ends = [s for s in streams[loop.stream.scope] if s.loop is None]
        loop.connect(draw(st.sampled_from(ends)))
    return builder


def draw_operators(draw, builder: GraphBuilder, streams: list[StreamRef]) -> None:
    """Add up to two operators that listen to some of the streams of one scope."""
    for _ in range(draw(st.integers(0, 2))):
        chosen = draw(st.lists(st.sampled_from(streams), min_size=1, max_size=3))
        inputs = [InputSpec(stream, Broadcast()) for stream in chosen]
        num_shards = draw(st.sampled_from([None, 2]))
        if num_shards is None and chosen[0].loop is None:
            inputs[0] = InputSpec(chosen[0], Pipeline())
        num_outputs = draw(st.integers(0, 2))
        here = Summary.identity(chosen[0].depth)
        later = Summary.advance(chosen[0].depth)
        way = st.sampled_from([[here], [later], [here, later], []])
        row = st.lists(way, min_size=num_outputs, max_size=num_outputs)
        rows = st.lists(row, min_size=len(inputs), max_size=len(inputs))
        streams += builder.add_operator(
            None,
            "op",
            inputs=inputs,
            num_outputs=num_outputs,
            num_shards=num_shards,
            summaries=draw(st.none() | rows),
        )


def graphs() -> st.SearchStrategy[Graph]:
    """Valid graphs."""
    return builders(st.integers(1, 2)).map(lambda builder: builder.build())
