"""Who holds the frontier back: the explanation of a run that makes no progress.

Pure: combines the controller's counts (which pointstamps could still result in
the time that a frontier stands at) with the workers' reports (who holds the
capability there, and where it was created).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from timelyml.errors import DeadlineError
from timelyml.graph import Graph, OperatorSpec
from timelyml.progress import Timestamp, Tracker
from timelyml.runtime.config import INPUT_KIND

MAX_ROWS = 64

Holdings = Sequence[tuple[Any, ...]]
"""As in a `Report`: (location, time, count, sites where they were created)."""


@dataclass(frozen=True, slots=True)
class StallRow:
    """One reason why a frontier does not move.

    Attributes:
        location: The port that holds it back, e.g. `output 0 of 'window'`.
        operator: Name of the operator of that port.
        time: The time that is held.
        count: Capabilities held there, or unread weight.
        worker: Who holds it; None if no worker that answered said so.
        sites: Where the capabilities were created.
        what: Why it holds, in words.
    """

    location: str
    operator: str
    time: Timestamp
    count: int
    worker: int | None
    sites: tuple[str, ...]
    what: str

    def __str__(self) -> str:
        where = "" if self.worker is None else f" on worker {self.worker}"
        created = f", created at {'; '.join(self.sites)}" if self.sites else ""
        return f"time {self.time!r} at {self.location}: {self.what}{where}{created}"


@dataclass(frozen=True, slots=True)
class StallReport:
    """What holds a run back, as rows for programs and as text for people."""

    headline: str
    rows: tuple[StallRow, ...] = ()
    unanswered: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [self.headline, *(f"  {row}" for row in self.rows)]
        lines += [f"  no answer from {who}" for who in self.unanswered]
        return "\n".join(lines)


def explained(message: str, explanation: StallReport, **values: Any) -> DeadlineError:
    """Return the error of a time-out, with what holds the run back."""
    text = str(explanation)
    error = DeadlineError(message, explanation=text, **values)
    error.add_note(text)
    return error


def late(what: str, timeout_s: float | None, explanation: StallReport) -> DeadlineError:
    """Return the error of somebody who waited for `what` as long as he was allowed."""
    return explained(
        f"{what} in time; got {timeout_s or 0:g} s; expected it by then; see what holds "
        "it back below, or allow more time",
        explanation,
    )


def explain(
    graph: Graph,
    tracker: Tracker,
    holdings: Mapping[int, Holdings],
    *,
    who: str,
    unanswered: Iterable[str] = (),
) -> StallReport:
    """Say who holds the frontiers at the graph's ends back.

    Args:
        graph: The resolved graph of the run.
        tracker: The controller's view of its counts.
        holdings: What each worker that answered holds.
        who: The run, for the headline.
        unanswered: Workers that did not answer, with what they are doing.
    """
    late = tuple(unanswered)
    if tracker.is_empty():
        return StallReport(f"{who}: nothing is held; it is complete", (), late)
    stands, blockers = _standing(graph, tracker)
    rows = [
        row
        for location, time, count in blockers[:MAX_ROWS]
        for row in _rows(graph, location, time, count, holdings)
    ]
    places = "; ".join(
        f"{graph.describe_location(location)} stands at {list(times)!r}"
        for location, times in list(stands.items())[:8]
    )
    return StallReport(f"{who}: {places or 'data is on its way'}", tuple(rows), late)


def _standing(
    graph: Graph, tracker: Tracker
) -> tuple[dict[int, tuple[Timestamp, ...]], list[tuple[int, Timestamp, int]]]:
    """Frontiers at the graph's ends, and the pointstamps that hold them there."""
    stands: dict[int, tuple[Timestamp, ...]] = {}
    blockers: dict[tuple[int, Timestamp], int] = {}
    for location in graph.terminal_inputs():
        elements = tuple(tracker.frontier(location).elements)
        if elements:
            stands[location] = elements
        for time in elements:
            for place, held, count in tracker.blockers(location, time):
                blockers[place, held] = count
    if not blockers:
        blockers = {
            (place, held): count for place, held, count in tracker.pointstamps()
        }
    return stands, [(place, held, count) for (place, held), count in blockers.items()]


def _rows(
    graph: Graph,
    location: int,
    time: Timestamp,
    count: int,
    holdings: Mapping[int, Holdings],
) -> list[StallRow]:
    place = graph.describe_location(location)
    spec = graph.operators[graph.port_of(location).operator]
    operator = spec.name
    held = [
        StallRow(
            place,
            operator,
            time,
            entry[2],
            worker,
            _sites(entry[3]),
            _holds(spec, entry[2]),
        )
        for worker, entries in sorted(holdings.items())
        for entry in entries
        if entry[0] == location and entry[1] == time
    ]
    if held:
        return held
    if graph.is_input(location):
        what = f"{count} unread records, on their way or in its queue"
    else:
        what = _holds(spec, count)
    return [StallRow(place, operator, time, count, None, (), what)]


def _holds(spec: OperatorSpec, count: int) -> str:
    held = "a capability" if count == 1 else f"{count} capabilities"
    if spec.kind == INPUT_KIND:
        return f"{held} of an input that the driver has not advanced or closed"
    return held


def _sites(sites: Any) -> tuple[str, ...]:
    given = [sites] if isinstance(sites, str) else list(sites)
    return tuple(dict.fromkeys(str(site) for site in given))
