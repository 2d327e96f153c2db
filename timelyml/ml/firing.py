"""Operators that compute once per timestamp, when chosen inputs are complete.

A `Rule` says which input ports must be complete at a time for a function to run
on all of their blocks, ordered by producer shard, so that nothing depends on the
order of arrival. One operator may have several rules over one state, such as the
forward and the backward pass of one set of parameters. Each fires in time order, and
two of them alternate where one is to see the other's changes: at one time, a rule
fires before those whose changes it sees later, and after those whose ports are a part
of its own. Such a rule waits until nothing can come that would go first.
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
from timelyml.runtime.operator import Delivery, Logic, Precedence
from timelyml.runtime.shard import Shard

Ports = tuple[int, ...]

_INBOX = "inbox"
_STATE = "state"


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
        ports: Input ports that must be complete at a time. The blocks of a port go to
            the rule that fires first; another over the same port finds it empty.
        run: Called once for each time at which any of `asked_by` got a block.
        outputs: Outputs that `run` sends to, at the time it fires.
        later: Outputs of other rules that see what `run` changed in the state from
            the next time on, and none of it before.
        asked_by: Ports whose blocks make the rule fire; all of `ports` by default.
    """

    ports: Ports
    run: Callable[[Firing], None]
    outputs: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    asked_by: Ports = ()
    triggers: Ports = field(init=False, repr=False)

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
    in_order: bool = True,
) -> tuple[StreamRef, ...]:
    """Add an operator that computes by rules; give its output streams.

    Args:
        builder: Of the dataflow.
        name: Of the operator, unique in the dataflow.
        inputs: One per port.
        rules: No two with the same ports; none that fires both before and after
            another.
        num_outputs: Number of output ports.
        kind: Shown in drawings of the graph.
        num_shards: By default that of the first input.
        regular: The author's promise that every shard sends exactly one block on
            each dense output at each time that its dense inputs tell it of.
        placement: Of shards on workers.
        states: Names of further states, beside "state".
        on_start: Called once per shard, to put its initial state in place.
        in_order: Whether a shard fires in time order, one epoch of a loop after the
            other. Only rules without state can do without.

    Raises:
        ConfigError: Rules name ports or outputs that are not there, or fire in no
            order.
    """
    by_ports = _checked(name, rules, len(inputs), num_outputs)
    first = _first(name, rules)
    logic = Logic(
        on_start=on_start,
        on_batch=_Collect(tuple(rules)),
        on_notify=_Fire(by_ports),
        in_order=in_order,
        precedence={
            ports: Precedence(others, _ports_after(ports, first))
            for ports, others in first.items()
        },
    )
    return builder.add_operator(
        name,
        kind,
        inputs=inputs,
        num_outputs=num_outputs,
        summaries=_summaries(inputs, by_ports, first, num_outputs),
        logic=logic,
        states=(_STATE, _INBOX, *states),
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
    """Runs the rule whose ports have become complete, on all that they brought."""

    by_ports: dict[Ports, Rule]

    def __call__(self, shard: Shard, time: Timestamp) -> None:
        rule = self.by_ports[shard.notified_ports]
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


def _first(name: str, rules: Sequence[Rule]) -> dict[Ports, tuple[Ports, ...]]:
    """By the ports of each rule: those of all that fire before it at the same time."""
    readers = {
        rule.ports: {
            other.ports
            for other in rules
            if other is not rule and set(rule.later) & set(other.outputs)
        }
        for rule in rules
    }
    parts = {
        rule.ports: {
            other.ports
            for other in rules
            if set(other.ports) < set(rule.ports)
            and rule.ports not in readers[other.ports]
        }
        for rule in rules
    }
    first = _closed({ports: readers[ports] | parts[ports] for ports in readers})
    for ports, others in first.items():
        if ports in others:
            raise ConfigError(
                f"operator {name!r} has rules that wait for each other; got ports "
                f"{ports} both before and after {sorted(others - {ports})}; expected "
                "one to see the other's changes; leave `later` away from the other",
                operator=name,
                ports=ports,
            )
    return {ports: tuple(sorted(others)) for ports, others in first.items()}


def _closed(pairs: dict[Ports, set[Ports]]) -> dict[Ports, set[Ports]]:
    """Return all that can be reached from each."""
    closed = {}
    for start in pairs:
        reached: set[Ports] = set()
        open_ends = [start]
        while open_ends:
            fresh = pairs[open_ends.pop()] - reached
            reached |= fresh
            open_ends += fresh
        closed[start] = reached
    return closed


def _ports_after(ports: Ports, first: dict[Ports, tuple[Ports, ...]]) -> Ports:
    """Return the ports of all rules that a rule fires before at the same time."""
    after = [other for other, others in first.items() if ports in others]
    return tuple(sorted({port for other in after for port in other}))


def _by_source(block: tuple[int, Any]) -> int:
    return block[0]


def _checked(
    name: str, rules: Sequence[Rule], num_inputs: int, num_outputs: int
) -> dict[Ports, Rule]:
    by_ports: dict[Ports, Rule] = {}
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
    inputs: Sequence[InputSpec],
    by_ports: dict[Ports, Rule],
    first: dict[Ports, tuple[Ports, ...]],
    num_outputs: int,
) -> list[list[list[Summary]]]:
    """Connect each output to all that it waits for, now or from the next time on.

    That a rule waits for others is told as well, so that a cycle in which they would
    wait for each other is refused like any that does not advance.
    """
    depth = inputs[0].stream.depth
    table: list[list[list[Summary]]] = [
        [[] for _ in range(num_outputs)] for _ in inputs
    ]
    for ports, rule in by_ports.items():
        now = {*ports}.union(*first[ports])
        later = set(_ports_after(ports, first)) - now
        for output in rule.outputs:
            for port in now:
                table[port][output] = [Summary.identity(depth)]
            for port in later:
                table[port][output] = table[port][output] or [Summary.advance(depth)]
    return table
