"""Could-result-in by brute force: where a pointstamp can lead, edge by edge.

Deliberately not the tracker's way: no summaries are composed, nothing is ranked and
nothing is incremental, so that the oracle shares no mistake with what it checks.
Times are tuples here, at the top level too.
"""

from __future__ import annotations

from timelyml.graph import Graph
from timelyml.progress import Summary, Timestamp

Time = tuple[int, ...]
Edge = tuple[int, int, tuple[int, ...], tuple[int, ...]]

LIMIT = 2**63


def as_time(time: Timestamp) -> Time:
    """Return a timestamp as a tuple, whatever its depth."""
    return (time,) if isinstance(time, int) else time


def as_timestamp(time: Time) -> Timestamp:
    """Return the timestamp that operators see for a tuple."""
    return time if len(time) > 1 else time[0]


def is_before(a: Time, b: Time) -> bool:
    """Whether `a` is at or before `b` in every coordinate."""
    return all(x <= y for x, y in zip(a, b, strict=True))


def moved(time: Time, summary: Summary) -> Time | None:
    """Return what a summary makes of a time; None if a coordinate overflows."""
    kept = tuple(x + y for x, y in zip(time, summary.add, strict=False))
    if any(x >= LIMIT for x in kept):
        return None
    return kept + summary.append


class Closure:
    """Answers, for one graph, what every pointstamp could result in."""

    def __init__(self, graph: Graph) -> None:
        self._edges: dict[int, list[tuple[int, Summary]]] = {}
        for channel in graph.channels:
            source = graph.location_of_output(*channel.source)
            target = graph.location_of_input(*channel.target)
            self._edges.setdefault(source, []).append((target, channel.summary))
        for spec in graph.operators:
            for port, row in enumerate(spec.summaries):
                source = graph.location_of_input(spec.index, port)
                for output, summaries in enumerate(row):
                    target = graph.location_of_output(spec.index, output)
                    self._edges.setdefault(source, []).extend(
                        (target, summary) for summary in summaries
                    )
        self._known: dict[tuple[int, Time], dict[int, tuple[Time, ...]]] = {}

    def from_(self, location: int, time: Time) -> dict[int, tuple[Time, ...]]:
        """Return, by location, the minimal times that a pointstamp could result in."""
        key = (location, time)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._search(location, time)
        return found

    def leads_to(self, location: int, time: Time, target: int, limit: Time) -> bool:
        """Whether a pointstamp could result in one at or before `limit` there."""
        times = self.from_(location, time).get(target, ())
        return any(is_before(result, limit) for result in times)

    def _search(self, location: int, time: Time) -> dict[int, tuple[Time, ...]]:
        found: dict[int, list[Time]] = {location: [time]}
        waiting = [(location, time)]
        while waiting:
            place, at = waiting.pop()
            if at not in found[place]:
                continue  # something earlier was found there meanwhile
            for target, summary in self._edges.get(place, ()):
                result = moved(at, summary)
                if result is None:
                    continue
                known = found.setdefault(target, [])
                if any(is_before(other, result) for other in known):
                    continue
                known[:] = [t for t in known if not is_before(result, t)]
                known.append(result)
                waiting.append((target, result))
        return {place: tuple(times) for place, times in found.items()}
