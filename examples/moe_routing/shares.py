"""Where the time of training goes, from the events that workers logged."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from timelyml import Dataflow
from timelyml.runtime.events import Park, Schedule

_SKIPPED = 0.25
"""Of the run, at its beginning: compiling is no part of a step."""
_ROUTES = ("route", "combine", "router loss")
_COMPUTES = ("attend", "experts", "head")


def of_time(trace: Path) -> dict[str, float]:
    """Give shares of the workers' time, added over workers; together they are 1.

    `model` is the turns of attention, experts and head, with what these do to receive
    and send; `routing` those of routers and of the sums of what experts gave back;
    `other operators` the rest of the turns; `progress` all that workers do between turns:
    progress tracking, frames, looking for messages that are there; `waiting` is when a
    worker had nothing to do. Results must not be computed asynchronously, or whoever reads
    one first pays for it.
    """
    flow = Dataflow("events")
    flow.replay(trace).collect()
    events = [event for _, batch in flow.run().batches("out") for event in batch]
    spent: dict[str, float] = defaultdict(float)
    for worker in {event.worker for event in events}:
        _add_worker([each for each in events if each.worker == worker], spent)
    total = sum(spent.values())
    return {what: round(value / total, 4) for what, value in sorted(spent.items())}


def _add_worker(events: list[Any], spent: dict[str, float]) -> None:
    turns = [each for each in events if isinstance(each, Schedule)]
    begun, ended = turns[0].time_ns, turns[-1].stop_ns
    begun += int((ended - begun) * _SKIPPED)
    inside = [
        each
        for each in events
        if isinstance(each, Schedule | Park) and each.time_ns >= begun
    ]
    left = ended - begun
    for each in inside:
        length = min(each.stop_ns, ended) - each.time_ns
        if length > 0:
            spent[_kind(each)] += length
            left -= length
    spent["progress"] += left


def _kind(event: Schedule | Park) -> str:
    if isinstance(event, Park):
        return "waiting"
    name = event.operator.removeprefix("model ")
    if name.startswith(_ROUTES):
        return "routing"
    return "model" if name.startswith(_COMPUTES) else "other operators"
