"""`Dataflow`, `Stream` and `Loop`: each made of its families of methods.

They refer to each other, so they stand together; what a method does stands with its
family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self, Unpack

from timelyml import operators
from timelyml.errors import GraphError
from timelyml.fluent.base import ref_of
from timelyml.fluent.by_key import KeyMethods
from timelyml.fluent.by_time import TimeMethods
from timelyml.fluent.computing import ComputeMethods
from timelyml.fluent.endings import EndMethods
from timelyml.fluent.files import FileMethods
from timelyml.fluent.generic import GenericMethods
from timelyml.fluent.loops import LoopMethods
from timelyml.fluent.records import RecordMethods
from timelyml.fluent.routing import RoutingMethods
from timelyml.fluent.running import RunMethods
from timelyml.fluent.sources import SourceMethods
from timelyml.graph import GraphBuilder, LoopRef, Pact, ScopeRef
from timelyml.operators import OperatorBuilder, OperatorOptions, StreamLike
from timelyml.operators.operator_builder import Effects
from timelyml.progress import Summary
from timelyml.runtime.operator import Logic


class Dataflow(SourceMethods["Stream"], FileMethods["Stream"], RunMethods["Stream"]):
    """A dataflow to be built, then run any number of times.

    Args:
        name: For traces and errors.
        num_shards: Shards of sources and inputs that do not say; operators have as
            many as what they read. Default: one per worker.
    """

    def __init__(
        self, name: str = "dataflow", *, num_shards: int | None = None
    ) -> None:
        self.builder = GraphBuilder(name, num_shards)

    @property
    def name(self) -> str:
        """The name for traces and errors."""
        return self.builder.name

    def operator(
        self,
        logic: Logic,
        *,
        inputs: Sequence[Stream] = (),
        outputs: int | Sequence[Mapping[int, Effects] | None] = 1,
        pacts: Sequence[Pact | None] = (),
        kind: str = "operator",
        name: str | None = None,
        is_source: bool = False,
        scope: ScopeRef | None = None,
        **options: Unpack[OperatorOptions],
    ) -> tuple[Stream, ...]:
        """Add an operator with any number of ports; returns its outputs.

        Args:
            logic: Its callbacks.
            inputs: The streams that it reads, by port.
            outputs: How many; or for each, by input port, what the way from there does
                to time, with ports left out that never cause output there. Default:
                each input may cause output at its own time.
            pacts: How records of each input find their shard; default: as it is routed.
            kind: What it does, in a word.
            name: For traces, errors and its state; default: chosen from `kind`.
            is_source: Whether it produces records that no input caused.
            scope: Of an operator without inputs.
            options: See `OperatorOptions`.

        >>> def part(shard, delivery):
        ...     for number in delivery.payload:
        ...         shard.output(number % 2).send(delivery.time, [number])
        >>> flow = Dataflow()
        >>> logic = Logic(on_batch=part)
        >>> even, odd = flow.operator(logic, inputs=[flow.source(range(5))], outputs=2)
        >>> _, _ = even.collect("even"), odd.collect("odd")
        >>> dict(flow.run())
        {'even': [0, 2, 4], 'odd': [1, 3]}
        """
        builder = OperatorBuilder(
            self.builder,
            kind,
            name=name,
            is_source=is_source,
            scope=scope,
            **options,
        )
        if pacts and len(pacts) != len(inputs):
            raise GraphError(
                f"operator {name or kind!r} has pacts for other inputs; got "
                f"{len(pacts)}; expected {len(inputs)}; give one each, or none at all"
            )
        for port, stream in enumerate(inputs):
            builder.add_input(ref_of(stream), pacts[port] if pacts else None)
        each = [None] * outputs if isinstance(outputs, int) else outputs
        for effects in each:
            builder.add_output(effects)
        return tuple(self._stream(ref) for ref in builder.build(logic))

    def scope(
        self, name: str | None = None, *, parent: ScopeRef | None = None
    ) -> ScopeRef:
        """Open a nested scope, for `Stream.enter` and `feedback`.

        Args:
            name: For traces and errors.
            parent: The scope around it; default: the top level.

        >>> flow = Dataflow()
        >>> scope = flow.scope("rounds")
        >>> _ = flow.source([1]).enter(scope).leave().collect()
        >>> flow.run()["out"]
        [1]
        """
        return self.builder.scope(name, parent=parent)

    def feedback(
        self,
        scope: ScopeRef | None = None,
        *,
        by: int = 1,
        summary: Summary | None = None,
        num_shards: int | None = None,
        name: str | None = None,
    ) -> Loop:
        """Open a loop: use its `stream` first, `connect` its end later.

        Args:
            scope: Where it runs; default: at the top level, where a round is an epoch.
            by: How far a round advances the innermost coordinate.
            summary: Instead of `by`, any effect on time.
            num_shards: Of the stream to be connected; default: the dataflow's.
            name: For errors.

        >>> flow = Dataflow()
        >>> scope = flow.scope("rounds")
        >>> loop = flow.feedback(scope)
        >>> numbers = flow.source([3]).enter(scope).concat(loop.stream)
        >>> loop.connect(numbers.map(lambda n: n - 1).filter(lambda n: n > 0))
        >>> _ = numbers.leave().collect()
        >>> flow.run()["out"]
        [3, 2, 1]
        """
        return Loop(
            self,
            self.builder.feedback(
                scope, by=by, summary=summary, name=name, num_shards=num_shards
            ),
        )

    def __repr__(self) -> str:
        return f"<Dataflow {self.name!r}>"

    def _stream(self, ref: StreamLike) -> Stream:
        return Stream(self, ref)


class Loop:
    """A feedback loop of a dataflow; made by `Dataflow.feedback`."""

    def __init__(self, flow: Dataflow, ref: LoopRef) -> None:
        self._ref = ref
        self.stream = Stream(flow, ref.stream)

    def connect(self, end: Stream) -> None:
        """Feed `end` back into `stream`, once.

        Raises:
            GraphError: It is connected already, or `end` is in another scope.
        """
        operators.connect(self._ref, ref_of(end))


class Stream(
    RecordMethods,
    RoutingMethods,
    TimeMethods,
    KeyMethods,
    LoopMethods,
    GenericMethods,
    ComputeMethods,
    EndMethods,
):
    """A stream of timestamped records; made by `Dataflow` and by its own methods.

    Functions that work on records get one item of a list, or one row of columns.
    `name=` names the operator in traces and errors, and the key of its state; the
    default is chosen from what it does.
    """

    def __init__(self, flow: Dataflow, ref: StreamLike) -> None:
        self.flow = flow
        self.ref = ref

    def __repr__(self) -> str:
        return f"<Stream of {self.flow.name!r}: {self.ref!r}>"

    def _with(self, ref: StreamLike) -> Self:
        return type(self)(self.flow, ref)
