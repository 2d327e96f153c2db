"""The sequential reference: a whole graph, evaluated by one loop with one queue.

It knows no workers, batches in flight, frontiers or capabilities. Deliver every
record there is; then answer the requests for a time that nothing pending can reach
any more; repeat.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from timelyml.graph import Graph
from timelyml.runtime.simulation.behaviour import Behaviour, Style
from timelyml.runtime.simulation.closure import Closure, Time, moved
from timelyml.runtime.simulation.routes import parts_of
from timelyml.runtime.simulation.rules import Emission, carried, dues, react
from timelyml.runtime.simulation.sources import Source
from timelyml.runtime.simulation.trace import Sent

Place = tuple[int, int, int, Time]
"""Operator, input port, shard and time."""
Message = tuple[Place, tuple[int, ...]]
Ask = tuple[int, Time, tuple[int, ...]]
"""Operator, time and ports: for all shards at once."""


class TooMuchError(Exception):
    """The graph makes more records than a simulation should move."""


class Reference:
    """Evaluates one graph from what its sources sent.

    After `run`, `delivered` counts the records at every place.
    """

    def __init__(
        self,
        graph: Graph,
        operators: Sequence[Behaviour | Source],
        *,
        max_records: int = 10**9,
    ) -> None:
        self.delivered: dict[Place, Counter[int]] = {}
        self.num_records = 0
        self._graph = graph
        self._operators = operators
        self._max_records = max_records
        self._closure = Closure(graph)
        self._messages: deque[Message] = deque()
        self._stash: dict[tuple[int, int, Time], dict[int, list[tuple[Time, int]]]] = {}
        self._asks: dict[Ask, set[int]] = {}

    def run(self, sources: Iterable[Sent]) -> None:
        """Evaluate everything that follows from what sources sent.

        Raises:
            TooMuchError: It is more than `max_records`.
        """
        for sent in sources:
            self._route(sent)
        while self._messages or self._asks:
            while self._messages:
                self._deliver(*self._messages.popleft())
            ready = self._first_ready()
            if ready is not None:
                operator, time, ports = ready
                for shard in sorted(self._asks.pop(ready)):
                    self._answer(operator, shard, time, ports)

    def records_at(self, operator: int) -> dict[Time, Counter[int]]:
        """Return, by time, what reached the first input of an operator."""
        found: dict[Time, Counter[int]] = {}
        for (place, port, _, time), records in self.delivered.items():
            if place == operator and port == 0:
                found.setdefault(time, Counter()).update(records)
        return found

    def _route(self, sent: Sent) -> None:
        for channel in self._graph.channels_from(sent.operator, sent.output):
            at = moved(sent.time, channel.summary)
            if at is None:
                continue
            parts = parts_of(
                self._graph, channel, sent.shard, sent.records, sent.target
            )
            for shard, rows in parts.items():
                place = (channel.target.operator, channel.target.port, shard, at)
                self._messages.append((place, tuple(rows)))

    def _deliver(self, place: Place, records: tuple[int, ...]) -> None:
        operator, port, shard, time = place
        self.num_records += max(1, len(records))
        if self.num_records > self._max_records:
            raise TooMuchError
        self.delivered.setdefault(place, Counter()).update(records)
        behaviour = self._operators[operator]
        if isinstance(behaviour, Source):
            return
        rule = behaviour.rule
        if not rule.is_folding and behaviour.style is not Style.NOTIFY:
            emissions = [e for r in records for e in react(rule, port, time, r)]
            self._emit(behaviour, shard, emissions)
            return
        for at in dues(rule, time):
            self._keep(behaviour, shard, port, at, [(time, r) for r in records])

    def _keep(
        self,
        behaviour: Behaviour,
        shard: int,
        port: int,
        at: Time,
        items: list[tuple[Time, int]],
    ) -> None:
        operator = behaviour.operator
        stash = self._stash.setdefault((operator, shard, at), {})
        stash.setdefault(port, []).extend(items)
        if port in behaviour.told_ports:
            every = tuple(range(behaviour.rule.num_inputs))
            ports = every if behaviour.all_ports else (port,)
            self._asks.setdefault((operator, at, ports), set()).add(shard)

    def _answer(
        self, operator: int, shard: int, time: Time, ports: tuple[int, ...]
    ) -> None:
        behaviour = self._operators[operator]
        if isinstance(behaviour, Source):
            return
        stash = self._stash.get((operator, shard, time), {})
        taken = {port: stash.pop(port) for port in ports if port in stash}
        emissions = behaviour.answers(time, taken)
        more = carried(behaviour.rule, time, emissions)
        if more is not None:
            at, carry = more
            self._keep(behaviour, shard, 0, at, [(time, row) for row in carry])
        if behaviour.is_regular:
            outputs = range(behaviour.rule.num_outputs)
            for output in outputs:
                rows = tuple(record for o, _, record in emissions if o == output)
                named = behaviour.named(rows)
                self._route(Sent(operator, shard, output, time, rows, True, named))
        else:
            self._emit(behaviour, shard, emissions)

    def _emit(
        self, behaviour: Behaviour, shard: int, emissions: Iterable[Emission]
    ) -> None:
        for output, time, record in emissions:
            target = behaviour.named((record,))
            operator = behaviour.operator
            self._route(Sent(operator, shard, output, time, (record,), True, target))

    def _first_ready(self) -> Ask | None:
        """A request that no other one can still send something to."""
        if not self._asks:
            return None
        for ask in sorted(self._asks):
            if not any(self._may_reach(other, ask) for other in self._asks):
                return ask
        msg = f"requests wait for each other: {sorted(self._asks)}"
        raise AssertionError(msg)

    def _may_reach(self, other: Ask, ask: Ask) -> bool:
        operator, time, ports = ask
        if other == ask:
            return False
        source, at, _ = other
        behaviour = self._operators[source]
        if isinstance(behaviour, Source):
            return False
        sends_at = behaviour.rule.stamped(at)
        targets = [self._graph.location_of_input(operator, port) for port in ports]
        return any(
            self._closure.leads_to(
                self._graph.location_of_output(source, output), sends_at, target, time
            )
            for output in range(behaviour.rule.num_outputs)
            for target in targets
        )
