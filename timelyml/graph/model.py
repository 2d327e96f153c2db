"""The graph of one dataflow: what is deployed, traced, drawn and fingerprinted.

A `Graph` is a frozen value whose size does not depend on the number of shards. It
holds the structure and the logic of the operators; `GraphBuilder` makes it, and
the runtime gives it meaning.

Locations number the ports for progress tracking: for each operator in order, first
its inputs, then its outputs.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from timelyml.errors import GraphError
from timelyml.graph.mermaid import to_mermaid
from timelyml.graph.placement import Placement
from timelyml.graph.shards import check_edge, resolved
from timelyml.graph.spec import ChannelSpec, OperatorSpec, PortRef, ScopeSpec
from timelyml.graph.text import describe, first_difference
from timelyml.progress import ReachabilityGraph, Summary

Edge: TypeAlias = tuple[int, int, Summary]


@dataclass(frozen=True, slots=True)
class Graph:
    """A dataflow graph; operators, channels and scopes stand at their `index`."""

    name: str
    operators: tuple[OperatorSpec, ...]
    channels: tuple[ChannelSpec, ...]
    scopes: tuple[ScopeSpec, ...] = ()
    _first_location: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _from: dict[PortRef, tuple[ChannelSpec, ...]] = field(
        init=False, repr=False, compare=False
    )
    _into: dict[PortRef, tuple[ChannelSpec, ...]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        first = [0]
        for spec in self.operators:
            first.append(first[-1] + spec.num_inputs + spec.num_outputs)
        outgoing: defaultdict[PortRef, list[ChannelSpec]] = defaultdict(list)
        incoming: defaultdict[PortRef, list[ChannelSpec]] = defaultdict(list)
        for channel in self.channels:
            outgoing[channel.source].append(channel)
            incoming[channel.target].append(channel)
        object.__setattr__(self, "_first_location", tuple(first))
        object.__setattr__(self, "_from", _frozen(outgoing))
        object.__setattr__(self, "_into", _frozen(incoming))

    @property
    def num_locations(self) -> int:
        """Number of ports."""
        return self._first_location[-1]

    def location_of_input(self, operator: int, port: int = 0) -> int:
        """Return the location of an input port."""
        self._check_port(operator, port, self.operators[operator].num_inputs, "input")
        return self._first_location[operator] + port

    def location_of_output(self, operator: int, port: int = 0) -> int:
        """Return the location of an output port."""
        spec = self.operators[operator]
        self._check_port(operator, port, spec.num_outputs, "output")
        return self._first_location[operator] + spec.num_inputs + port

    def is_input(self, location: int) -> bool:
        """Return whether a location is an input port."""
        operator, offset = self._find(location)
        return offset < self.operators[operator].num_inputs

    def port_of(self, location: int) -> PortRef:
        """Return the operator and its input or output port at a location."""
        operator, offset = self._find(location)
        num_inputs = self.operators[operator].num_inputs
        return PortRef(
            operator, offset - num_inputs if offset >= num_inputs else offset
        )

    def describe_location(self, location: int) -> str:
        """Return a location for people: `input 0 of 'count'`."""
        operator, port = self.port_of(location)
        side = "input" if self.is_input(location) else "output"
        return f"{side} {port} of {self.operators[operator].name!r}"

    def operator_named(self, name: str) -> OperatorSpec:
        """Return the operator of that name.

        Raises:
            GraphError: There is none.
        """
        for spec in self.operators:
            if spec.name == name:
                return spec
        names = ", ".join(repr(spec.name) for spec in self.operators)
        raise GraphError(
            f"dataflow {self.name!r} has no such operator; got {name!r}; expected one "
            f"of {names or 'none'}; check the name",
            name=name,
        )

    def channels_from(self, operator: int, port: int = 0) -> tuple[ChannelSpec, ...]:
        """Return the channels that leave an output port."""
        return self._from.get(PortRef(operator, port), ())

    def channels_into(self, operator: int, port: int = 0) -> tuple[ChannelSpec, ...]:
        """Return the channels that end in an input port."""
        return self._into.get(PortRef(operator, port), ())

    def reachability(self) -> ReachabilityGraph:
        """Return how pointstamps reach each other.

        Its edges are first the channels, by index, then the insides of operators.
        """
        depths = [
            spec.depth
            for spec in self.operators
            for _ in range(spec.num_inputs + spec.num_outputs)
        ]
        return ReachabilityGraph(depths, [*self._channel_edges(), *self._inner_edges()])

    def terminal_inputs(self) -> tuple[int, ...]:
        """Return the input locations at the graph's ends, ascending.

        From such an input no input is reached but those of its own cycle: once an
        epoch has passed all of them, nothing is left to do in it downstream.
        """
        edges = [*self._channel_edges(), *self._inner_edges()]
        cyclic = self.reachability().cyclic_edges()
        # Cyclic edges never join two cycles that cannot reach each other both ways,
        # so what they connect is strongly connected.
        cycles = _Classes(self.num_locations)
        for index in cyclic:
            cycles.join(edges[index][0], edges[index][1])
        sources = {edge[0] for edge in edges}
        leads_on = {
            cycles.of(source)
            for index, (source, target, _) in enumerate(edges)
            if index not in cyclic and (target in sources or self.is_input(target))
        }
        return tuple(
            location
            for location in range(self.num_locations)
            if self.is_input(location) and cycles.of(location) not in leads_on
        )

    def resolve(self, num_workers: int, *, placement: Placement | None = None) -> Graph:
        """Return the graph with one-per-worker operators fixed to that many shards.

        Args:
            num_workers: Of the cluster.
            placement: The run's, for operators that have none of their own.

        Raises:
            PlacementError: A placement names a worker or shard that does not exist.
            ShardCountError: A gather goes to a shard that does not exist.
        """
        operators = tuple(
            resolved(spec, num_workers, placement) for spec in self.operators
        )
        for channel in self.channels:
            producer = operators[channel.source.operator]
            check_edge(channel.pact, producer, operators[channel.target.operator])
        return replace(self, operators=operators)

    def describe(self) -> str:
        """Return the structure as text, one line an operator."""
        return describe(self.name, self.operators, self.channels, self.scopes)

    def fingerprint(self) -> str:
        """Return a digest of the structure, the same in every process."""
        return hashlib.sha256(self.describe().encode()).hexdigest()

    def first_difference(self, other_description: str) -> str | None:
        """Return the first line that differs from another `describe()`, or None."""
        return first_difference(self.describe(), other_description)

    def to_mermaid(self) -> str:
        """Return the source of a Mermaid flowchart; dense edges are thick."""
        return to_mermaid(self.operators, self.channels, self.scopes)

    def _channel_edges(self) -> Iterator[Edge]:
        for channel in self.channels:
            yield (
                self.location_of_output(*channel.source),
                self.location_of_input(*channel.target),
                channel.summary,
            )

    def _inner_edges(self) -> Iterator[Edge]:
        for spec in self.operators:
            for i, row in enumerate(spec.summaries):
                source = self.location_of_input(spec.index, i)
                for o, summaries in enumerate(row):
                    target = self.location_of_output(spec.index, o)
                    for summary in summaries:
                        yield source, target, summary

    def _find(self, location: int) -> tuple[int, int]:
        """The operator at a location, and how far behind its first port that is."""
        if not 0 <= location < self.num_locations:
            raise GraphError(
                f"dataflow {self.name!r} has no such location; got {location}; expected "
                f"0 or more and less than {self.num_locations}; use location_of_input",
                location=location,
            )
        operator = bisect_right(self._first_location, location) - 1
        return operator, location - self._first_location[operator]

    def _check_port(self, operator: int, port: int, count: int, side: str) -> None:
        if not 0 <= port < count:
            name = self.operators[operator].name
            raise GraphError(
                f"operator {name!r} has no such {side}; got {port}; expected 0 or more "
                f"and less than {count}; check the port",
                operator=name,
                port=port,
            )


class _Classes:
    """Union-find over locations."""

    def __init__(self, size: int) -> None:
        self._parent = list(range(size))

    def of(self, location: int) -> int:
        parent = self._parent
        while parent[location] != location:
            parent[location] = parent[parent[location]]
            location = parent[location]
        return location

    def join(self, a: int, b: int) -> None:
        self._parent[self.of(a)] = self.of(b)


def _frozen(
    channels: Mapping[PortRef, Sequence[ChannelSpec]],
) -> dict[PortRef, tuple[ChannelSpec, ...]]:
    return {port: tuple(found) for port, found in channels.items()}
