"""Building a graph step by step from plain stream references.

Every call checks what it is given; `build` checks what only the whole graph shows:
open loops, cycles that do not advance, dense edges. Entering, leaving and feedback
compose summaries onto the stream reference, hence onto the channels that use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from timelyml.errors import ForeignStreamError, LoopError, ScopeError
from timelyml.graph.model import Graph
from timelyml.graph.names import NameTable, check_name
from timelyml.graph.pact import Pact, Pipeline
from timelyml.graph.placement import Placement
from timelyml.graph.shards import check_edge, check_operator, check_shard_count
from timelyml.graph.spec import ChannelSpec, OperatorSpec, PortRef, ScopeSpec
from timelyml.graph.summaries import compose, inner_summaries, loop_summary
from timelyml.graph.validate import finished
from timelyml.progress import Summary

PER_WORKER: Final = 0
"""As `num_shards`: one shard per worker, whatever the first input has."""


@dataclass(frozen=True, slots=True)
class StreamRef:
    """An output of an operator, or a loop variable, as seen from one scope.

    `summary` takes a time at the output to the time in `scope`. A loop variable has
    `loop` set and no operator (-1) until its loop is connected. `label` is for errors:
    `stream 'lines'`, `loop 'rank'`.
    """

    builder: GraphBuilder = field(repr=False)
    operator: int
    port: int
    scope: tuple[int, ...]
    summary: Summary
    num_shards: int | None
    label: str
    loop: int | None = None

    @property
    def depth(self) -> int:
        """Number of scopes around the stream, hence of loop coordinates."""
        return len(self.scope)


@dataclass(frozen=True, slots=True)
class ScopeRef:
    """A scope of a builder; `path` holds the indices of scopes, outermost first."""

    builder: GraphBuilder = field(repr=False)
    index: int
    path: tuple[int, ...]
    name: str


@dataclass(frozen=True, slots=True)
class LoopRef:
    """A feedback loop: use `stream` first, `connect` its end later, once."""

    builder: GraphBuilder = field(repr=False)
    index: int
    name: str
    stream: StreamRef

    def connect(self, end: StreamRef) -> None:
        """Feed `end` back into the loop's stream; see `GraphBuilder.connect`."""
        self.builder.connect(self, end)


@dataclass(frozen=True, slots=True)
class InputSpec:
    """An input of an operator to be added: which stream, and how it gets there."""

    stream: StreamRef
    pact: Pact = field(default_factory=Pipeline)


class GraphBuilder:
    """Builds the graph of one dataflow.

    Args:
        name: Of the dataflow, for traces and errors.
        num_shards: Of operators without inputs; None: one per worker.
    """

    def __init__(self, name: str, num_shards: int | None = None) -> None:
        check_shard_count(num_shards, who=f"dataflow {name!r}")
        check_name(name, "dataflow")
        self.name = name
        self.num_shards = num_shards
        # What operator functions know of an output, by (operator, port): not looked at.
        self.notes: dict[tuple[int, int], object] = {}
        self._operators: list[OperatorSpec] = []
        self._wires: list[tuple[InputSpec, PortRef]] = []
        self._scopes: list[ScopeSpec] = []
        self._loops: list[LoopRef] = []
        self._ends: dict[int, StreamRef] = {}
        self._operator_names = NameTable(name, "operator")
        self._scope_names = NameTable(name, "scope")
        self._loop_names = NameTable(name, "loop")

    def add_operator(
        self,
        name: str | None,
        kind: str,
        *,
        inputs: Sequence[InputSpec] = (),
        num_outputs: int = 1,
        summaries: Sequence[Sequence[Iterable[Summary]]] | None = None,
        logic: object = None,
        states: Sequence[str] = (),
        num_shards: int | None = None,
        regular: bool = False,
        is_source: bool = False,
        placement: Placement | None = None,
        scope: ScopeRef | None = None,
    ) -> tuple[StreamRef, ...]:
        """Add an operator and return its output streams.

        Args:
            name: Unique in the dataflow; None or equal to `kind`: chosen from it.
            kind: What the operator does, e.g. `map`.
            inputs: One channel each, in order of the ports.
            num_outputs: Number of output ports. A sink, with 0, gets one of its own.
            summaries: By input and output, the effects on time of which every path
                through the operator does at least one; empty where the input never
                causes output. Default: none on any.
            logic: What runs; not looked at here.
            states: Names of its declared states.
            num_shards: Default: that of the first input, or of the builder;
                `PER_WORKER`: one per worker.
            regular: The author's promise that every shard fires exactly once for
                each time that it is told of by a dense input (as a source: for each
                epoch), even with nothing to send, and with sparse inputs beside,
                holds its capability until their frontiers pass.
            is_source: Whether it produces records that no input caused.
            placement: Of its shards on workers; None: of what it is pipelined after.
            scope: Of an operator without inputs; others stand where they listen.

        Raises:
            GraphError: Something does not fit; see its subclasses.
        """
        name = self._operator_names.choose(name, kind)
        path = self._path_of(name, inputs, scope)
        # A sink gets an output that nobody reads: what it still has to do at a time
        # holds that time open there, so that the run does not end before it is done.
        ports = max(1, num_outputs)
        shape = len(inputs), ports
        summaries = summaries if num_outputs else None
        spec = OperatorSpec(
            index=len(self._operators),
            name=name,
            kind=kind,
            scope=path,
            num_shards=self._shards_of(f"operator {name!r}", inputs, num_shards),
            num_inputs=len(inputs),
            num_outputs=ports,
            summaries=inner_summaries(name, summaries, shape, len(path)),
            logic=logic,
            states=tuple(states),
            regular=regular,
            is_source=is_source,
            placement=placement or self._inherited_placement(inputs),
        )
        self._add(spec, inputs)
        return tuple(self._output(spec, port) for port in range(num_outputs))

    def _add(self, spec: OperatorSpec, inputs: Sequence[InputSpec]) -> None:
        check_operator(spec)
        for each in inputs:
            if each.stream.loop is None:  # else once it is connected
                check_edge(each.pact, self._operators[each.stream.operator], spec)
        self._operator_names.add(spec.name, spec.kind)
        self._operators.append(spec)
        self._wires += [
            (each, PortRef(spec.index, port)) for port, each in enumerate(inputs)
        ]

    def scope(
        self, name: str | None = None, *, parent: ScopeRef | None = None
    ) -> ScopeRef:
        """Open a scope under `parent`, or under the top level."""
        if parent is not None:
            self._check_own(parent.builder, f"scope {parent.name!r}")
        name = self._scope_names.choose(name, "scope")
        self._scope_names.add(name, "scope")
        index = len(self._scopes)
        path = (*(parent.path if parent else ()), index)
        self._scopes.append(ScopeSpec(index, parent.index if parent else None, name))
        return ScopeRef(self, index, path, name)

    def enter(self, stream: StreamRef, scope: ScopeRef) -> StreamRef:
        """Return the stream inside `scope`, which must stand where the stream does."""
        who = stream.label
        self._check_own(stream.builder, who)
        self._check_own(scope.builder, f"scope {scope.name!r}")
        if scope.path[:-1] != stream.scope:
            raise ScopeError(
                f"{who} cannot enter scope {scope.name!r} from where it is; got "
                f"{self.place(stream.scope)}; expected {self.place(scope.path[:-1])}; "
                f"enter or leave one scope at a time",
                stream=who,
                scope=scope.name,
            )
        summary = compose(who, stream.summary, Summary.enter(stream.depth))
        return replace(stream, scope=scope.path, summary=summary)

    def leave(self, stream: StreamRef) -> StreamRef:
        """Return the stream one scope further out; inner times of an epoch merge."""
        self._check_own(stream.builder, who := stream.label)
        if not stream.scope:
            raise ScopeError(
                f"{who} cannot leave a scope; got a stream at the top level; expected "
                f"one inside a scope; enter a scope first, or use the stream as it is",
                stream=who,
            )
        outer = compose(who, stream.summary, Summary.leave(stream.depth))
        return replace(stream, scope=stream.scope[:-1], summary=outer)

    def feedback(
        self,
        scope: ScopeRef | None = None,
        *,
        by: int = 1,
        summary: Summary | None = None,
        name: str | None = None,
        num_shards: int | None = None,
    ) -> LoopRef:
        """Open a loop, whose stream can be used before it is connected.

        Args:
            scope: Where the loop runs; None: at the top level, over epochs.
            by: How far a round advances the innermost coordinate.
            summary: Instead of `by`, any effect on time that stays in the scope.
            name: For errors.
            num_shards: Of the stream to be connected; default: the builder's.
        """
        if scope is not None:
            self._check_own(scope.builder, f"scope {scope.name!r}")
        name = self._loop_names.choose(name, "loop")
        index = len(self._loops)
        path = scope.path if scope else ()
        effect = loop_summary(name, len(path), by, summary)
        label = f"loop {name!r}"
        shards = self._shards_of(label, (), num_shards)
        stream = StreamRef(self, -1, 0, path, effect, shards, label, loop=index)
        loop = LoopRef(self, index, name, stream)
        self._loop_names.add(name, "loop")
        self._loops.append(loop)
        return loop

    def connect(self, loop: LoopRef, end: StreamRef) -> None:
        """Feed `end` back into the stream of `loop`, once, in the loop's own scope."""
        self._check_own(loop.builder, f"loop {loop.name!r}")
        self._check_own(end.builder, who := end.label)
        if loop.index in self._ends:
            raise LoopError(
                f"loop {loop.name!r} is connected twice; got {who} after "
                f"{self._ends[loop.index].label}; expected one end; concatenate the "
                "streams, and connect the result",
                loop=loop.name,
            )
        if end.scope != loop.stream.scope:
            raise ScopeError(
                f"{who} cannot be fed back into loop {loop.name!r}; got "
                f"{self.place(end.scope)}; expected {self.place(loop.stream.scope)}; "
                f"enter or leave a scope first",
                stream=who,
                loop=loop.name,
            )
        self._ends[loop.index] = end

    def build(self) -> Graph:
        """Return the graph of everything added so far.

        Raises:
            LoopError: A loop is not connected, or holds no operator.
            CycleError: A cycle does not advance time.
            ShardCountError: A loop is pipelined between different shard counts.
            DenseEdgeError: A dense edge leaves an operator that is not regular.
        """
        return finished(self.draft())

    def draft(self) -> Graph:
        """Return the graph without the checks of cycles and dense edges."""
        for loop in self._loops:
            if loop.index not in self._ends:
                raise LoopError(
                    f"loop {loop.name!r} is never connected; got a loop without an end; "
                    f"expected one; call connect with the stream to feed back",
                    loop=loop.name,
                )
        channels = tuple(
            self._channel(index, each, target)
            for index, (each, target) in enumerate(self._wires)
        )
        return Graph(self.name, tuple(self._operators), channels, tuple(self._scopes))

    def _channel(self, index: int, each: InputSpec, target: PortRef) -> ChannelSpec:
        source = self._resolved(each.stream)
        producer = self._operators[source.operator]
        check_edge(each.pact, producer, self._operators[target.operator])
        return ChannelSpec(
            index=index,
            source=PortRef(source.operator, source.port),
            target=target,
            pact=each.pact,
            summary=source.summary,
            keeps_time=source.summary == Summary.identity(producer.depth),
        )

    def _output(self, spec: OperatorSpec, port: int) -> StreamRef:
        label = f"stream {spec.name!r}"
        if spec.num_outputs > 1:
            label = f"output {port} of {spec.name!r}"
        here = Summary.identity(spec.depth)
        return StreamRef(
            self, spec.index, port, spec.scope, here, spec.num_shards, label
        )

    def _resolved(self, stream: StreamRef) -> StreamRef:
        """Follow loops back to the operator whose output a stream is."""
        passed: list[int] = []
        while stream.loop is not None:
            if stream.loop in passed:
                raise LoopError(
                    f"{stream.label} feeds itself; got a loop without operators; "
                    f"expected at least one; connect the output of an operator",
                    loop=self._loops[stream.loop].name,
                )
            passed.append(stream.loop)
            end = self._ends[stream.loop]
            summary = compose(stream.label, end.summary, stream.summary)
            stream = replace(end, scope=stream.scope, summary=summary)
        return stream

    def _path_of(
        self, operator: str, inputs: Sequence[InputSpec], scope: ScopeRef | None
    ) -> tuple[int, ...]:
        """The scope in which all inputs are, or the given one."""
        if scope is not None:
            self._check_own(scope.builder, f"scope {scope.name!r}")
        for each in inputs:
            self._check_own(each.stream.builder, each.stream.label)
        if scope is None and not inputs:
            return ()
        path = scope.path if scope is not None else inputs[0].stream.scope
        for each in inputs:
            if each.stream.scope != path:
                raise ScopeError(
                    f"operator {operator!r} takes a stream of another scope; got "
                    f"{each.stream.label} in {self.place(each.stream.scope)}; "
                    f"expected {self.place(path)}; enter or leave a scope first",
                    operator=operator,
                    stream=each.stream.label,
                )
        return path

    def _shards_of(
        self, who: str, inputs: Sequence[InputSpec], num_shards: int | None
    ) -> int | None:
        if num_shards is None:
            return inputs[0].stream.num_shards if inputs else self.num_shards
        if num_shards == PER_WORKER:
            return None
        check_shard_count(num_shards, who=who)
        return num_shards

    def _inherited_placement(self, inputs: Sequence[InputSpec]) -> Placement | None:
        if not inputs or not isinstance(inputs[0].pact, Pipeline):
            return None
        producer = inputs[0].stream.operator
        return self._operators[producer].placement if producer >= 0 else None

    def _check_own(self, builder: GraphBuilder, who: str) -> None:
        if builder is not self:
            raise ForeignStreamError(
                f"{who} belongs to another dataflow; got one of {builder.name!r}; "
                f"expected one of {self.name!r}; build both in one dataflow",
                who=who,
                dataflow=self.name,
                other=builder.name,
            )

    def is_regular(self, stream: StreamRef) -> bool:
        """Return whether the operator of a stream promises to fire at every time."""
        return stream.loop is None and self._operators[stream.operator].regular

    def place(self, path: Sequence[int]) -> str:
        """Return a scope for people: `the top level`, `scope 'outer/inner'`."""
        if not path:
            return "the top level"
        return f"scope {'/'.join(self._scopes[index].name for index in path)!r}"
