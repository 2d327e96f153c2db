"""How the operators of random graphs do what their rules say, and when.

The same rule may answer at once, in small steps, after a while, when its input has
passed a time, or when notified of it: what comes out is the same, the schedule and
the capabilities held meanwhile are not. Every callback leaves its trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from timelyml.progress import Timestamp
from timelyml.runtime.operator import Delivery, Logic
from timelyml.runtime.run_state import COLLECT_TAG
from timelyml.runtime.simulation.closure import Time, as_time, as_timestamp
from timelyml.runtime.simulation.routes import DirectBy, Target
from timelyml.runtime.simulation.rules import (
    Emission,
    Kind,
    Rule,
    carried,
    complete,
    dues,
    react,
)
from timelyml.runtime.simulation.trace import (
    Asked,
    Done,
    Got,
    Held,
    Sent,
    Told,
    trace_of,
)


class Style(Enum):
    """When a rule that need not wait answers all the same."""

    NOW = "at once"
    STEPS = "in small steps"
    TIMER = "after a while, holding capabilities"
    HELD = "when its inputs have passed the time, holding capabilities"
    NOTIFY = "when notified of the time"


class Moves(Enum):
    """How a right to send gets from where it arises to where it is needed."""

    NOT = "it arises there"
    DELAYED = "another one is made for later, and the first released"
    CLONED = "it is cloned, and used for later"
    DOWNGRADED = "it is given up for one later"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """One operator of a random graph: a rule and a way to follow it.

    Attributes:
        operator: Its index in the graph.
        rule: What it does.
        style: When.
        is_columns: Whether it sends arrays, not lists.
        is_regular: Whether it sends one logical block per time and output.
        told_ports: Ports whose blocks ask for notifications.
        all_ports: Whether it asks for all ports at once, not for the one alone.
        chunk: Records a send; 0: all of a time at once.
        lag: HELD waits until this many more epochs are complete.
        delay_s: Of TIMER.
        lingers: Whether TIMER releases a capability only later than it sends.
        moves: Of TIMER and HELD: what becomes of their capabilities.
        direct: Whom it sends to, where it names shards itself.
        in_order: As of `Logic`.
        is_failing: Whether it raises on its first record.
    """

    operator: int
    rule: Rule
    style: Style = Style.NOW
    is_columns: bool = False
    is_regular: bool = False
    told_ports: tuple[int, ...] = ()
    all_ports: bool = True
    chunk: int = 0
    lag: int = 0
    delay_s: float = 0.001
    lingers: bool = False
    moves: Moves = Moves.NOT
    direct: DirectBy | None = None
    in_order: bool = False
    is_failing: bool = False

    def logic(self) -> Logic:
        """Return the callbacks; what is not needed is left out."""
        waits = self.rule.is_folding or self.style is Style.NOTIFY
        return Logic(
            on_batch=self.on_batch,
            on_notify=self.on_notify if waits else None,
            on_frontier=self.on_frontier if self.style is Style.HELD else None,
            on_activate=self.on_activate if self.style is Style.TIMER else None,
            in_order=self.in_order,
        )

    def on_batch(self, shard: Any, delivery: Delivery) -> Iterator[None] | None:
        """Take a block."""
        steps = self._receive(shard, delivery)
        if self.style is Style.STEPS:
            return steps
        for _ in steps:
            pass
        return None

    def on_notify(self, shard: Any, time: Timestamp) -> Iterator[None] | None:
        """Answer for a complete time."""
        steps = self._answer(shard, as_time(time))
        if self.style is Style.STEPS:
            return steps
        for _ in steps:
            pass
        return None

    def on_frontier(self, shard: Any) -> None:
        """Send what was held for times that are complete by now."""
        kept = []
        for capability, limit, records in shard.state.get("held", ()):
            ports = range(self.rule.num_inputs)
            if any(shard.frontier(port).less_equal(limit) for port in ports):
                kept.append((capability, limit, records))
            else:
                self._send_held(shard, capability, records)
        shard.state["held"] = kept

    def on_activate(self, shard: Any) -> None:
        """Send the oldest of what was put off."""
        held = shard.state.get("held")
        if not held:
            return
        (output, capability, at), limit, records = held[0]
        if self.lingers and records:  # the right to send outlives what it was for
            self.send(shard, output, at, records, True)
            held[0] = ((output, capability, at), limit, [])
        else:
            held.pop(0)
            self._send_held(shard, (output, capability, at), records)
        if held:
            shard.activate_after(self.delay_s)

    def _receive(self, shard: Any, delivery: Delivery) -> Iterator[None]:
        trace = trace_of(shard)
        records = tuple(int(record) for record in delivery.payload)
        time, port = as_time(delivery.time), delivery.port
        trace.append(
            Got(self.operator, shard.index, port, time, delivery.source_shard, records)
        )
        if self.is_failing and records:
            msg = f"this operator fails by design on {records[0]}"
            raise ValueError(msg)
        if self.rule.is_folding or self.style is Style.NOTIFY:
            self._stash(shard, port, time, records)
        elif self.rule.kind is Kind.SINK:
            shard.emit(COLLECT_TAG, (delivery.time, delivery.payload))
        else:
            emissions = [
                emission
                for record in records
                for emission in react(self.rule, port, time, record)
            ]
            if self.style in (Style.TIMER, Style.HELD):
                self._hold(shard, time, emissions)
            else:
                yield from self._send(shard, emissions)
        trace.append(Done(self.operator, shard.index, port, time, len(records)))

    def _stash(
        self, shard: Any, port: int, time: Time, records: tuple[int, ...]
    ) -> None:
        stash = shard.state.setdefault("stash", {})
        for at in dues(self.rule, time):
            known = stash.setdefault(at, {}).setdefault(port, [])
            known.extend((time, record) for record in records)
            if port in self.told_ports:
                self._ask(shard, port, at)

    def _ask(self, shard: Any, port: int, at: Time) -> None:
        ports = None if self.all_ports else (port,)
        wanted = ports or tuple(range(self.rule.num_inputs))
        asked = shard.state.setdefault("asked", {})
        holds = asked.setdefault((at, wanted), {})
        if port in holds:
            return
        shard.notify_at(as_timestamp(at), ports=ports)
        trace = trace_of(shard)
        if not holds:
            trace.append(Asked(self.operator, shard.index, at, wanted))
        effects = self.rule.summaries()[port]
        holds[port] = [output for output, effect in enumerate(effects) if effect]
        if not effects:  # the output that a sink has of its own
            holds[port] = [0]
        for output in holds[port]:
            trace.append(Held(self.operator, output, self.rule.stamped(at), 1))

    def _answer(self, shard: Any, time: Time) -> Iterator[None]:
        trace = trace_of(shard)
        ports = tuple(shard.notified_ports)
        trace.append(Told(self.operator, shard.index, time, ports))
        by_port = shard.state.get("stash", {}).get(time, {})
        stash = {port: by_port.pop(port) for port in ports if port in by_port}
        emissions = self.answers(time, stash)
        yield from self._send(shard, emissions, at=time)
        more = carried(self.rule, time, emissions)
        if more is not None:
            at, rows = more
            known = shard.state["stash"].setdefault(at, {}).setdefault(0, [])
            known.extend((time, row) for row in rows)
            self._ask(shard, 0, at)
        if self.rule.kind is Kind.SINK:
            records = [record for port in stash for _, record in stash[port]]
            if records:
                shard.emit(COLLECT_TAG, (as_timestamp(time), self._payload(records)))
        for outputs in shard.state["asked"].pop((time, ports)).values():
            for output in outputs:
                trace.append(Held(self.operator, output, self.rule.stamped(time), -1))

    def answers(
        self, time: Time, stash: dict[int, list[tuple[Time, int]]]
    ) -> list[Emission]:
        """Return what is sent for a complete time, from (time, record) by port."""
        if self.rule.is_folding:
            records = {port: [r for _, r in items] for port, items in stash.items()}
            return complete(self.rule, time, records)
        return [
            emission
            for port, items in stash.items()
            for at, record in items
            for emission in react(self.rule, port, at, record)
        ]

    def _send(
        self, shard: Any, emissions: Iterable[Emission], at: Time | None = None
    ) -> Iterator[None]:
        groups: dict[tuple[int, Time], list[int]] = {}
        if self.is_regular and at is not None:
            for output in range(self.rule.num_outputs):
                groups[output, self.rule.stamped(at)] = []
        for output, time, record in emissions:
            groups.setdefault((output, time), []).append(record)
        for (output, time), records in groups.items():
            size = self.chunk or max(1, len(records))
            for start in range(0, max(1, len(records)), size):
                is_last = start + size >= len(records)
                self.send(shard, output, time, records[start : start + size], is_last)
                yield

    def named(self, records: Iterable[int]) -> tuple[int, ...] | None:
        """Return a shard for each record, if the operator names them."""
        if self.direct is None:
            return None
        return tuple(self.direct.destination(record) for record in records)

    def send(
        self, shard: Any, output: int, time: Time, records: list[int], is_last: bool
    ) -> None:
        """Send records at once, to the shards that the operator names, if it does."""
        port, stamp, direct = shard.output(output), as_timestamp(time), self.direct
        parts: list[tuple[list[int], Target]] = [(records, None)]
        if direct is None:
            port.send(stamp, self._payload(records), is_last=is_last)
        elif direct.by_rows:
            named = self.named(records)
            shards = np.array(named, np.int64)
            port.send_rows(stamp, self._payload(records), shards, is_last=is_last)
            parts = [(records, named)]
        else:
            parts = [
                ([r for r in records if direct.destination(r) == target], target)
                for target in range(direct.num_targets)
            ]
            parts = [(rows, target) for rows, target in parts if rows]
            for rows, target in parts:
                port.send_to(stamp, target, self._payload(rows))
        for rows, target in parts:
            sent = (shard.index, output, time, tuple(rows), is_last, target)
            trace_of(shard).append(Sent(self.operator, *sent))

    def _hold(self, shard: Any, time: Time, emissions: list[Emission]) -> None:
        groups: dict[tuple[int, Time], list[int]] = {}
        for output, at, record in emissions:
            groups.setdefault((output, at), []).append(record)
        limit = as_timestamp((time[0] + self.lag, *time[1:]))
        for (output, at), records in groups.items():
            capability = shard.retain(as_timestamp(self._held_at(time, at)), output)
            if self.moves is Moves.DELAYED:
                with capability:
                    capability = capability.delayed(as_timestamp(at))
            elif self.moves is Moves.CLONED:
                with capability:
                    capability = capability.clone()
            held_at = as_time(capability.time)
            trace_of(shard).append(Held(self.operator, output, held_at, 1))
            entry = ((output, capability, at), limit, records)
            shard.state.setdefault("held", []).append(entry)
        if groups and self.style is Style.TIMER:
            shard.activate_after(self.delay_s)

    def _held_at(self, time: Time, at: Time) -> Time:
        """At what time to hold the right to send at `at`, after `time` came in."""
        return at if self.moves is Moves.NOT else self.rule.stamped(time)

    def _send_held(
        self, shard: Any, held: tuple[int, Any, Time], records: list[int]
    ) -> None:
        output, capability, at = held
        trace, held_at = trace_of(shard), as_time(capability.time)
        if self.moves is Moves.DOWNGRADED:
            capability.downgrade(as_timestamp(at))
        if records:
            self.send(shard, output, at, records, True)
        capability.release()
        trace.append(Held(self.operator, output, held_at, -1))

    def _payload(self, records: list[int]) -> Any:
        return np.array(records, np.int64) if self.is_columns else records
