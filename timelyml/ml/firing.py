"""Operators that compute once per timestamp, when chosen inputs are complete.

A `Rule` says which input ports must be complete at a time for a function to run
on all of their blocks, ordered by producer shard, so that nothing depends on the
order of arrival. One operator may have several rules over one state, such as the
forward and the backward pass of one set of parameters. Rules of a shard fire in
time order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from timelyml.errors import ConfigError
from timelyml.exchange import concat, num_records
from timelyml.graph import GraphBuilder, InputSpec, Placement, StreamRef
from timelyml.progress import Summary, Timestamp
from timelyml.runtime.operator import Delivery, Logic
from timelyml.runtime.shard import Shard

_INBOX = "inbox"
_STATE = "state"
_WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class Blocks:
    """What one port of one shard received at one time, by producer shard."""

    payloads: tuple[Any, ...]
    sources: tuple[int, ...]
    """The producer shard of each payload, ascending."""

    def __bool__(self) -> bool:
        """Whether anything arrived at all."""
        return bool(self.payloads)

    @property
    def rows(self) -> Any:
        """All rows as one payload, in the order of producer shards."""
        return concat(self.payloads)

    @property
    def counts(self) -> NDArray[np.int64]:
        """How many rows each payload has."""
        sizes = [num_records(payload) for payload in self.payloads]
        return np.array(sizes, np.int64)


@dataclass(frozen=True, slots=True)
class Firing:
    """One run of a rule: the shard, the time, the inputs, and the right to send."""

    shard: Shard
    time: Timestamp
    inputs: dict[int, Blocks]
    """By port of the rule; empty blocks where nothing arrived."""

    @property
    def state(self) -> dict[Any, Any]:
        """The shard's state, kept by the runtime under the name "state"."""
        return self.shard.state_of(_STATE)

    def send(self, output: int, payload: Any) -> None:
        """Send a payload at the time of the firing."""
        self.shard.output(output).send(self.time, payload)

    def send_to(self, output: int, shard: int, payload: Any) -> None:
        """Send to one shard, over an edge with a `Direct` pact."""
        self.shard.output(output).send_to(self.time, shard, payload)


@dataclass(frozen=True, slots=True)
class Rule:
    """When something is computed, and where the result may go.

    Attributes:
        ports: Input ports that must be complete at a time.
        run: Called once for each time at which any of `asked_by` got a block.
        outputs: Outputs that `run` sends to, at the time it fires.
        later: Outputs of other rules that see what `run` changed in the state,
            from the next time on. Such a rule fires at a time once the ports of
            this one are complete at the time before, and progress tracking knows
            that a cycle through here advances.
        asked_by: Ports whose blocks make the rule fire; all of `ports` by default.
    """

    ports: tuple[int, ...]
    run: Callable[[Firing], None]
    outputs: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    asked_by: tuple[int, ...] = ()
    triggers: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "triggers", self.asked_by or self.ports)


def add_firing_operator(
    builder: GraphBuilder,
    name: str,
    inputs: Sequence[InputSpec],
    rules: Sequence[Rule],
    *,
    num_outputs: int,
    kind: str = "compute",
    num_shards: int | None = None,
    regular: bool = False,
    placement: Placement | None = None,
    states: Sequence[str] = (),
    on_start: Callable[[Shard], None] | None = None,
) -> tuple[StreamRef, ...]:
    """Add an operator that computes by rules; give its output streams.

    Args:
        builder: Of the dataflow.
        name: Of the operator, unique in the dataflow.
        inputs: One per port.
        rules: No two with the same ports.
        num_outputs: Number of output ports.
        kind: Shown in drawings of the graph.
        num_shards: By default that of the first input.
        regular: The author's promise that every shard sends exactly one block on
            each dense output at each time that its dense inputs tell it of.
        placement: Of shards on workers.
        states: Names of further states, beside "state".
        on_start: Called once per shard, to put its initial state in place.

    Raises:
        ConfigError: Rules name ports or outputs that are not there.
    """
    by_ports = _checked(name, rules, len(inputs), num_outputs)
    depth = inputs[0].stream.depth
    fire = _Fire(by_ports, _predecessors(rules))
    logic = Logic(
        on_start=on_start,
        on_batch=_Collect(tuple(rules)),
        on_notify=fire,
        on_frontier=fire.release if any(rule.later for rule in rules) else None,
        in_order=True,
    )
    return builder.add_operator(
        name,
        kind,
        inputs=inputs,
        num_outputs=num_outputs,
        summaries=_summaries(rules, len(inputs), num_outputs, depth),
        logic=logic,
        states=(_STATE, _INBOX, _WAITING, *states),
        num_shards=num_shards,
        regular=regular,
        placement=placement,
    )


@dataclass(frozen=True, slots=True)
class _Collect:
    """Keeps each block until its rules fire."""

    rules: tuple[Rule, ...]

    def __call__(self, shard: Shard, delivery: Delivery) -> None:
        inbox = shard.state_of(_INBOX)
        key = (delivery.port, delivery.time)
        block = (delivery.source_shard, delivery.payload)
        inbox.setdefault(key, []).append(block)
        for rule in self.rules:
            if delivery.port in rule.triggers:
                shard.notify_at(delivery.time, ports=rule.ports, outputs=rule.outputs)


@dataclass(frozen=True, slots=True)
class _Fire:
    """Runs the rule whose ports have become complete, after all that it must see."""

    by_ports: dict[tuple[int, ...], Rule]
    predecessors: dict[tuple[int, ...], tuple[int, ...]]
    """By the ports of a rule: ports that must be complete at the time before."""

    def __call__(self, shard: Shard, time: Timestamp) -> None:
        self.release(shard)
        rule = self.by_ports[shard.notified_ports]
        if self._must_wait(shard, rule, time):
            held = [shard.retain(time, output) for output in rule.outputs]
            shard.state_of(_WAITING)[time, rule.ports] = held
            return
        self._run(shard, rule, time)

    def release(self, shard: Shard) -> None:
        """Fire what waited for the time before, as far as that is complete now."""
        waiting = shard.state_of(_WAITING)
        for time, ports in sorted(waiting):
            rule = self.by_ports[ports]
            if self._must_wait(shard, rule, time):
                return
            held = waiting.pop((time, ports))
            self._run(shard, rule, time)
            for capability in held:
                capability.release()

    def _must_wait(self, shard: Shard, rule: Rule, time: Timestamp) -> bool:
        ports = self.predecessors[rule.ports]
        before = _time_before(time) if ports else None
        return before is not None and not all(
            shard.is_complete(port, before) for port in ports
        )

    def _run(self, shard: Shard, rule: Rule, time: Timestamp) -> None:
        inbox = shard.state_of(_INBOX)
        inputs = {}
        for port in rule.ports:
            found = inbox.pop((port, time), [])
            found.sort(key=_by_source)  # stable: blocks of one producer keep theirs
            inputs[port] = Blocks(
                tuple(payload for _, payload in found),
                tuple(source for source, _ in found),
            )
        rule.run(Firing(shard, time, inputs))


def _time_before(time: Timestamp) -> Timestamp | None:
    """The time that the innermost coordinate advances to `time`; None at its start."""
    if isinstance(time, int):
        return time - 1 if time else None
    return (*time[:-1], time[-1] - 1) if time[-1] else None


def _predecessors(rules: Sequence[Rule]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """By the ports of each rule: the ports of rules whose changes it must see."""
    return {
        rule.ports: tuple(
            port
            for other in rules
            if set(other.later) & set(rule.outputs)
            for port in other.ports
        )
        for rule in rules
    }


def _by_source(block: tuple[int, Any]) -> int:
    return block[0]


def _checked(
    name: str, rules: Sequence[Rule], num_inputs: int, num_outputs: int
) -> dict[tuple[int, ...], Rule]:
    by_ports: dict[tuple[int, ...], Rule] = {}
    for rule in rules:
        ports = set(rule.ports) | set(rule.triggers)
        outputs = set(rule.outputs) | set(rule.later)
        if (
            not rule.ports
            or rule.ports in by_ports
            or not ports <= set(range(num_inputs))
            or not outputs <= set(range(num_outputs))
        ):
            raise ConfigError(
                f"operator {name!r} has a rule that does not fit; got ports "
                f"{rule.ports} and outputs {sorted(outputs)}; expected each set of "
                f"ports once, below {num_inputs}, and outputs below {num_outputs}; "
                "correct the rule",
                operator=name,
                ports=rule.ports,
            )
        by_ports[rule.ports] = rule
    return by_ports


def _summaries(
    rules: Sequence[Rule], num_inputs: int, num_outputs: int, depth: int
) -> list[list[list[Summary]]]:
    """Connect the ports of each rule to its outputs, now and from the next time on."""
    table: list[list[list[Summary]]] = [
        [[] for _ in range(num_outputs)] for _ in range(num_inputs)
    ]
    for rule in rules:
        for port in rule.triggers:
            for output in rule.outputs:
                table[port][output].append(Summary.identity(depth))
            for output in rule.later:
                table[port][output].append(Summary.advance(depth))
    return table
