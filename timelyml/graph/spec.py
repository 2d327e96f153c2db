"""The records of a graph: operators, channels, scopes and the ports between them.

One operator record per sharded operator and one channel record per sharded edge,
whatever the number of shards. Entering and leaving a scope and feedback are no
operators: they are summaries on channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from timelyml.graph.pact import Pact
from timelyml.graph.placement import Placement
from timelyml.progress import Summary

Summaries: TypeAlias = tuple[tuple[tuple[Summary, ...], ...], ...]
"""Per input and output, the minimal effects on time on the way; () if none."""


class PortRef(NamedTuple):
    """A port of an operator; whether input or output follows from the context."""

    operator: int
    port: int


@dataclass(frozen=True, slots=True)
class ScopeSpec:
    """A nested scope; `parent` is None directly under the top level."""

    index: int
    parent: int | None
    name: str


@dataclass(frozen=True, slots=True)
class OperatorSpec:
    """One sharded operator.

    Attributes:
        index: Position in the graph's operators.
        name: Unique in the graph; the key of its state and of its results.
        kind: What it does, e.g. `map`.
        scope: Indices of the scopes around it, outermost first.
        num_shards: None until `Graph.resolve`: one shard per worker.
        num_inputs: Number of input ports.
        num_outputs: Number of output ports.
        summaries: By input and output, what the operator does to time at least.
        logic: What runs; opaque to the graph.
        states: Names of its declared states.
        regular: Whether it fires exactly once per time and shard, even when there
            is nothing to send; decided by the builder from what the operator
            promises and from what it is told.
        is_source: Whether it produces records that no input caused.
        placement: None: the runtime's default.
    """

    index: int
    name: str
    kind: str
    scope: tuple[int, ...]
    num_shards: int | None
    num_inputs: int
    num_outputs: int
    summaries: Summaries
    logic: object
    states: tuple[str, ...] = ()
    regular: bool = False
    is_source: bool = False
    placement: Placement | None = None

    @property
    def depth(self) -> int:
        """Number of scopes around the operator, hence of its loop coordinates."""
        return len(self.scope)


@dataclass(frozen=True, slots=True)
class ChannelSpec:
    """One sharded edge from an output port to an input port.

    Attributes:
        index: Position in the graph's channels.
        source: The output port.
        target: The input port.
        pact: How records find their shard.
        summary: From a time at the source port to the time at the target port; what
            it gives None for is dropped.
        is_cyclic: Whether the edge lies on a cycle, where it must never block.
        keeps_time: Whether the summary changes no time at all, so that it need not be
            applied. `summary.is_identity` does not say so: leaving looks the same.
    """

    index: int
    source: PortRef
    target: PortRef
    pact: Pact
    summary: Summary
    is_cyclic: bool = False
    keeps_time: bool = False
