"""An operator with any number of ports, built step by step.

Everything else in this package is made with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict, Unpack

from timelyml.errors import GraphError
from timelyml.graph import (
    GraphBuilder,
    InputSpec,
    Pact,
    Placement,
    ScopeRef,
    StreamRef,
)
from timelyml.operators.checks import check_optional_callable
from timelyml.operators.edges import (
    StreamLike,
    as_input,
    check_stream,
    shards_asked_for,
)
from timelyml.progress import Summary
from timelyml.runtime.operator import CALLBACKS, Logic

Effects = Summary | Iterable[Summary]


class OperatorOptions(TypedDict, total=False):
    """Options that every generic operator takes.

    Attributes:
        states: Names of the states it keeps; `shard.state` is the one called
            "state".
        num_shards: Default: what the first routed input asks for, else that of the
            first input.
        regular: A promise that each shard sends exactly once for every time that a
            dense input tells it of, even with nothing to send. Only such an
            operator may feed a dense edge.
        placement: Which worker holds which shard.
    """

    states: Sequence[str]
    num_shards: int | None
    regular: bool
    placement: Placement | None


class OperatorBuilder:
    """Builds one operator: first its ports, then its callbacks.

    Args:
        flow: The dataflow that the operator belongs to.
        kind: What it does, in a word.
        name: For traces, errors and its state; default: chosen from `kind`.
        is_source: Whether it produces records that no input caused.
        scope: Of an operator without inputs.
        options: See `OperatorOptions`.
    """

    def __init__(
        self,
        flow: GraphBuilder,
        kind: str = "operator",
        *,
        name: str | None = None,
        is_source: bool = False,
        scope: ScopeRef | None = None,
        **options: Unpack[OperatorOptions],
    ) -> None:
        self._flow = flow
        self._kind = kind
        self._name = name
        self._is_source = is_source
        self._scope = scope
        self._options = options
        self._inputs: list[InputSpec] = []
        self._streams: list[StreamLike] = []
        self._outputs: list[Mapping[int, Effects] | None] = []

    def add_input(self, up: StreamLike, pact: Pact | None = None) -> int:
        """Add an input port and return its number.

        Args:
            up: The stream to read.
            pact: How its records find their shard; default: as `up` is routed, else
                each shard reads the same shard of the producer.
        """
        check_stream(self._name or self._kind, up)
        self._inputs.append(as_input(up, pact))
        self._streams.append(up)
        return len(self._inputs) - 1

    def add_output(self, effects: Mapping[int, Effects] | None = None) -> int:
        """Add an output port and return its number.

        Args:
            effects: By input port, what the way from there does to time: one
                summary, or several of which each path does at least one. A port that
                is left out never causes output here, so it holds nothing back.
                Default: every input may cause output at its own time.
        """
        self._outputs.append(effects)
        return len(self._outputs) - 1

    def build(self, logic: Logic) -> tuple[StreamRef, ...]:
        """Add the operator to its dataflow and return its output streams.

        Raises:
            GraphError: An output names an input that does not exist, a callback would
                not do what it says, or something does not fit together.
        """
        for callback in CALLBACKS:
            may_yield = callback in ("on_batch", "on_notify")
            who, value = self._name or self._kind, getattr(logic, callback)
            check_optional_callable(who, callback, value, may_yield=may_yield)
        options = self._options
        num_shards = options.get("num_shards")
        if num_shards is None:
            num_shards = shards_asked_for(self._streams)
        return self._flow.add_operator(
            self._name,
            self._kind,
            inputs=self._inputs,
            num_outputs=len(self._outputs),
            summaries=self._summaries(),
            logic=logic,
            states=tuple(options.get("states", ())),
            num_shards=num_shards,
            regular=options.get("regular", False),
            is_source=self._is_source,
            placement=options.get("placement"),
            scope=self._scope,
        )

    def _summaries(self) -> list[list[list[Summary]]] | None:
        if all(effects is None for effects in self._outputs):
            return None
        for output, effects in enumerate(self._outputs):
            unknown = set(effects or ()) - set(range(len(self._inputs)))
            if unknown:
                raise GraphError(
                    f"operator {self._name or self._kind!r} output {output} depends on "
                    f"inputs that do not exist; got {sorted(unknown)}; expected less "
                    f"than {len(self._inputs)}; use what add_input returned",
                    output=output,
                )
        return [
            [self._effects_of(port, effects) for effects in self._outputs]
            for port in range(len(self._inputs))
        ]

    def _effects_of(
        self, port: int, effects: Mapping[int, Effects] | None
    ) -> list[Summary]:
        if effects is None:
            return [Summary.identity(self._streams[port].depth)]
        found = effects.get(port, ())
        return [found] if isinstance(found, Summary) else list(found)


def add_operator(
    kind: str,
    ups: Sequence[StreamLike],
    logic: Logic,
    *,
    name: str | None = None,
    pacts: Sequence[Pact | None] = (),
    num_outputs: int = 1,
    **options: Unpack[OperatorOptions],
) -> tuple[StreamRef, ...]:
    """Add an operator whose inputs may all cause output at their own times.

    Args:
        kind: What it does, in a word.
        ups: The streams that it reads, at least one.
        logic: Its callbacks.
        name: Default: chosen from `kind`.
        pacts: One per stream, or none for none.
        num_outputs: Number of output ports.
        options: See `OperatorOptions`.
    """
    for up in ups:
        check_stream(name or kind, up)
    builder = OperatorBuilder(ups[0].builder, kind, name=name, **options)
    for index, up in enumerate(ups):
        builder.add_input(up, pacts[index] if pacts else None)
    for _ in range(num_outputs):
        builder.add_output()
    return builder.build(logic)
