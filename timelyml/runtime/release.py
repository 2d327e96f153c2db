"""Collected results, held until their time is complete, then released whole.

A cancelled or failed run thus delivers whole epochs only, never part of one.
"""

from __future__ import annotations

from typing import Any

from timelyml.graph import Graph
from timelyml.progress import Timestamp, Tracker
from timelyml.runtime.effects import Released

Items = list[tuple[int, Any]]


class Collector:
    """What operators emitted to be collected, by operator and time."""

    def __init__(self, graph: Graph, tracker: Tracker) -> None:
        self._graph = graph
        self._tracker = tracker
        self._pending: dict[int, dict[Timestamp, Items]] = {}

    def add(self, operator: int, shard: int, body: tuple[Timestamp, Any]) -> None:
        """Keep one collected batch `(time, payload)`."""
        time, payload = body
        times = self._pending.setdefault(operator, {})
        times.setdefault(time, []).append((shard, payload))

    def release(self) -> list[Released]:
        """Return what is complete by now, in order of time, and forget it.

        Within a time the order is that of shards, then of arrival from each, so it
        does not depend on which worker was faster.
        """
        released: list[Released] = []
        for operator, times in list(self._pending.items()):
            location = self._graph.location_of_output(operator)
            name = self._graph.operators[operator].name
            passed = [t for t in times if self._tracker.has_passed(location, t)]
            for time in sorted(passed):
                items = sorted(times.pop(time), key=lambda item: item[0])
                released.append(Released(name, time, tuple(items)))
            if not times:
                del self._pending[operator]
        return released
