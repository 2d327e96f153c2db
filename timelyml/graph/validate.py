"""What only a whole graph shows: cycles that do not advance, and dense edges.

A dense edge is complete by counting blocks, so its producer must fire exactly once
per time and shard. That is so for a source that promises it, and for an operator
that promises it provided it is told of every time, and is: by a dense input whose
producer is itself regular. An operator that only has sparse inputs never knows that
a time was without records for one of its shards.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from timelyml.errors import CycleError, DenseEdgeError
from timelyml.graph.model import Graph
from timelyml.graph.pact import Gather
from timelyml.graph.spec import ChannelSpec, OperatorSpec


def finished(graph: Graph) -> Graph:
    """Return the graph with what follows from its structure, or refuse it.

    Sets `is_cyclic` of channels, and `regular` of operators to whether they are and
    not merely promise to be.

    Raises:
        CycleError: A cycle does not advance time.
        DenseEdgeError: A dense edge leaves an operator that is not regular, or a
            scope.
    """
    reachability = graph.reachability()
    stuck = reachability.stuck_cycle()
    if stuck is not None:
        _refuse_cycle(graph, stuck)
    cyclic = reachability.cyclic_edges()
    regular = regular_operators(graph)
    _check_dense_edges(graph, regular)
    return replace(
        graph,
        operators=tuple(
            replace(spec, regular=spec.index in regular) for spec in graph.operators
        ),
        channels=tuple(
            replace(channel, is_cyclic=channel.index in cyclic)
            for channel in graph.channels
        ),
    )


def regular_operators(graph: Graph) -> set[int]:
    """Return the operators that fire once per time and shard, as a least fixpoint.

    A least one, since operators that only tell each other of times hear of none.
    """
    regular = {
        spec.index for spec in graph.operators if spec.regular and spec.is_source
    }
    waiting = deque(sorted(regular))
    while waiting:
        producer = waiting.popleft()
        for port in range(graph.operators[producer].num_outputs):
            for channel in graph.channels_from(producer, port):
                consumer = graph.operators[channel.target.operator]
                told = _tells_all_shards(graph, channel)
                if told and consumer.regular and consumer.index not in regular:
                    regular.add(consumer.index)
                    waiting.append(consumer.index)
    return regular


def _check_dense_edges(graph: Graph, regular: set[int]) -> None:
    for channel in graph.channels:
        if not channel.pact.dense:
            continue
        producer = graph.operators[channel.source.operator]
        consumer = graph.operators[channel.target.operator]
        if producer.index not in regular:
            _refuse_dense(producer, consumer, _why_irregular(producer))
        if not _keeps_times_apart(graph, channel):
            _refuse_dense(
                producer, consumer, "an edge out of a scope, where many times merge"
            )


def _tells_all_shards(graph: Graph, channel: ChannelSpec) -> bool:
    """Whether every shard of the consumer hears of every time of the producer."""
    pact, consumer = channel.pact, graph.operators[channel.target.operator]
    reaches_all = not isinstance(pact, Gather) or consumer.num_shards == 1
    return pact.dense and reaches_all and _keeps_times_apart(graph, channel)


def _keeps_times_apart(graph: Graph, channel: ChannelSpec) -> bool:
    """Whether different times at the source stay different at the target."""
    depth = graph.operators[channel.source.operator].depth
    return channel.summary.keep == depth + 1


def _why_irregular(producer: OperatorSpec) -> str:
    if not producer.regular:
        return f"a {producer.kind}, which need not fire once per time"
    return "a producer that no dense input tells of every time on every shard"


def _refuse_dense(producer: OperatorSpec, consumer: OperatorSpec, why: str) -> None:
    raise DenseEdgeError(
        f"edge from {producer.name!r} to {consumer.name!r} cannot be dense; got {why}; "
        f"expected a producer that fires exactly once per time and shard, in the same "
        f"scope or further out; make the edge sparse, or the edges before it dense",
        producer=producer.name,
        consumer=consumer.name,
    )


def _refuse_cycle(graph: Graph, locations: list[int]) -> None:
    names = [graph.operators[graph.port_of(loc).operator].name for loc in locations]
    path = [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    if len(path) == 1 or path[0] != path[-1]:
        path.append(path[0])
    raise CycleError(
        f"dataflow {graph.name!r} has a cycle that does not advance time; got "
        f"{' -> '.join(path)}; expected every round to advance a coordinate; feed back "
        f"with by=1 or more, in the scope that the whole cycle stays in",
        dataflow=graph.name,
        path=tuple(path),
    )
