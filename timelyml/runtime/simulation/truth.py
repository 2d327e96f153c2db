"""The true state of one run, from what its operators did, on all workers at once.

Live are records that were sent and whose callback has not ended, and rights to send
that operators hold. Both are known from the operators' own trace, so nothing here
depends on what the runtime believes or counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from timelyml.graph import ChannelSpec, Graph
from timelyml.runtime.simulation.closure import Time, moved
from timelyml.runtime.simulation.routes import parts_of
from timelyml.runtime.simulation.trace import Done, Event, Got, Held, Sent
from timelyml.runtime.simulation.violation import Violation

Pointstamp = tuple[int, Time]
Edge = tuple[int, int, Time]
"""A channel, a receiving shard and a time."""


class Truth:
    """Live pointstamps of one run, and every record that was sent and delivered."""

    def __init__(self, graph: Graph, num_workers: int) -> None:
        self.live: Counter[Pointstamp] = Counter()
        self.sent: dict[Edge, Counter[int]] = {}
        self.got: dict[Edge, Counter[int]] = {}
        self._graph = graph
        self._initial = [
            (graph.location_of_output(spec.index, port), (0,) * (spec.depth + 1))
            for spec in graph.operators
            for port in range(spec.num_outputs)
        ]
        for pointstamp in self._initial:
            self.live[pointstamp] = num_workers

    def start_worker(self) -> None:
        """A worker has started every operator: what they did not keep is gone."""
        for pointstamp in self._initial:
            self._add(pointstamp, -1)

    def note(self, events: Iterable[Event]) -> set[Pointstamp]:
        """Take what happened in one step; return the pointstamps that became live.

        Raises:
            Violation: Something was delivered that nobody sent.
        """
        touched: dict[Pointstamp, int] = {}
        for event in events:
            match event:
                case Sent():
                    for pointstamp, weight in self._on_sent(event):
                        touched.setdefault(pointstamp, self.live[pointstamp])
                        self._add(pointstamp, weight)
                case Got():
                    self._on_got(event)
                case Done():
                    place = self._graph.location_of_input(event.operator, event.port)
                    self._add((place, event.time), -max(1, event.num_records))
                case Held():
                    place = self._graph.location_of_output(event.operator, event.output)
                    pointstamp = (place, event.time)
                    touched.setdefault(pointstamp, self.live[pointstamp])
                    self._add(pointstamp, event.change)
        return {p for p, before in touched.items() if before <= 0 < self.live[p]}

    def check_all_delivered(self) -> None:
        """Check that every record sent was delivered, where and as often as it should.

        Raises:
            Violation: It was not, or something is left.
        """
        for edge in sorted({*self.sent, *self.got}):
            sent, got = self.sent.get(edge, Counter()), self.got.get(edge, Counter())
            if sent != got:
                channel, shard, time = edge
                raise Violation(
                    "delivery",
                    f"{self._name(self._graph.channels[channel])} shard {shard} at "
                    f"{time}: lost {dict(sent - got)}, got extra {dict(got - sent)}",
                )
        left = [pointstamp for pointstamp, count in self.live.items() if count]
        if left:
            names = [(self._graph.describe_location(p), t) for p, t in sorted(left)]
            raise Violation("delivery", f"the run is over, but live are {names}")

    def _add(self, pointstamp: Pointstamp, count: int) -> None:
        after = self.live[pointstamp] + count
        if after:
            self.live[pointstamp] = after
        else:
            del self.live[pointstamp]

    def _on_sent(self, sent: Sent) -> Iterable[tuple[Pointstamp, int]]:
        for channel in self._graph.channels_from(sent.operator, sent.output):
            at = moved(sent.time, channel.summary)
            if at is None:
                continue
            parts = parts_of(
                self._graph, channel, sent.shard, sent.records, sent.target
            )
            place = self._graph.location_of_input(*channel.target)
            for shard, records in parts.items():
                known = self.sent.setdefault((channel.index, shard, at), Counter())
                known.update(records)
                yield (place, at), max(1, len(records))

    def _on_got(self, got: Got) -> None:
        (channel,) = self._graph.channels_into(got.operator, got.port)
        edge = (channel.index, got.shard, got.time)
        known = self.got.setdefault(edge, Counter())
        known.update(got.records)
        extra = known - self.sent.get(edge, Counter())
        if extra or edge not in self.sent:
            raise Violation(
                "delivery",
                f"{self._name(channel)} shard {got.shard} got at {got.time} what was "
                f"not sent to it: {dict(extra)}",
            )

    def _name(self, channel: ChannelSpec) -> str:
        operators = self._graph.operators
        source = operators[channel.source.operator].name
        target = operators[channel.target.operator].name
        return f"channel {channel.index} from {source!r} to {target!r}"
