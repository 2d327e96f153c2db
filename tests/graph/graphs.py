"""Graphs that several tests of the graph package build."""

from __future__ import annotations

from timelyml.graph import Exchange, Graph, GraphBuilder, InputSpec, Pipeline, StreamRef


def source(builder: GraphBuilder, name: str = "lines", **options) -> StreamRef:
    (stream,) = builder.add_operator(name, "source", is_source=True, **options)
    return stream


def unary(up: StreamRef, name: str | None = None, pact=None, **options) -> StreamRef:
    inputs = [InputSpec(up, Pipeline() if pact is None else pact)]
    kind = options.pop("kind", "map")
    (stream,) = up.builder.add_operator(name, kind, inputs=inputs, **options)
    return stream


def binary(
    left: StreamRef, right: StreamRef, name: str | None = None, **options
) -> StreamRef:
    inputs = [InputSpec(left), InputSpec(right)]
    (stream,) = left.builder.add_operator(name, "concat", inputs=inputs, **options)
    return stream


def sink(up: StreamRef, name: str = "out", pact=None, **options) -> None:
    inputs = [InputSpec(up, Pipeline() if pact is None else pact)]
    up.builder.add_operator(name, "sink", inputs=inputs, num_outputs=0, **options)


def first_byte(line: str) -> int:
    return ord(line[0])


def word_count(num_shards: int | None = 4) -> Graph:
    builder = GraphBuilder("words", num_shards)
    words = unary(source(builder), "split", kind="flat_map")
    counts = unary(
        words, "count", Exchange.by_key(first_byte), kind="fold", states=("state",)
    )
    sink(counts)
    return builder.build()


def loop_graph(num_shards: int | None = 4) -> Graph:
    """A loop with a way in and a way out: lines -> (merge <-> step) -> out."""
    builder = GraphBuilder("rank", num_shards)
    scope = builder.scope("loop")
    loop = builder.feedback(scope, name="round")
    entered = builder.enter(source(builder), scope)
    merged = binary(entered, loop.stream, "merge")
    step = unary(merged, "step")
    loop.connect(step)
    sink(builder.leave(step))
    return builder.build()
