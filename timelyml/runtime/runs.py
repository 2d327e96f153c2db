"""The runs of one session that are not over: what happens to them, and who hears of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from timelyml.errors import TimelyError
from timelyml.runtime.effects import Effect, Ended, Send
from timelyml.runtime.failure import own_failure
from timelyml.runtime.run_plan import RunPhase
from timelyml.runtime.run_state import RunState
from timelyml.runtime.whereabouts import Place

Observer = Callable[[Effect], None]
"""Told everything about one run, in order; runs in the controller's thread."""

Event = Callable[[RunState, float], list[Effect]]
"""Lets a run decide something, given the clock's time."""


class Runs:
    """The runs of one controller; owned by the thread that drives it.

    Args:
        clock: Monotonic seconds.
        send: Sends what runs decide to send.
    """

    def __init__(
        self, clock: Callable[[], float], send: Callable[[Send], None]
    ) -> None:
        self._clock = clock
        self._send = send
        self._runs: dict[int, tuple[RunState, Observer]] = {}
        self._touched: set[int] = set()
        self._due: dict[int, float] = {}  # of most runs nothing is ever due

    def __len__(self) -> int:
        return len(self._runs)

    def get(self, generation: int) -> RunState | None:
        """Return a run, if it is not over."""
        found = self._runs.get(generation)
        return None if found is None else found[0]

    def add(self, run: RunState, observer: Observer) -> None:
        """Take a run in; `observer` hears of it until `Ended`."""
        self._runs[run.plan.generation] = (run, observer)
        self._note_due(run)

    def decide(self, generation: int, event: Event) -> None:
        """Let a run decide something; nothing if it is over."""
        found = self._runs.get(generation)
        if found is None:
            return
        run, observer = found
        now = self._clock()
        try:
            effects = event(run, now)
        except Exception as error:  # noqa: BLE001  the run's end, not that of others
            effects = run.fail(own_failure("the controller", error), now)
        if run.phase is RunPhase.ENDED:
            self._runs.pop(generation, None)
        self._note_due(run)
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect)
            else:
                observer(effect)

    def decide_all(self, event: Event) -> None:
        """Let each run decide something."""
        for generation in list(self._runs):
            self.decide(generation, event)

    def lose(self, worker: int, error: TimelyError) -> None:
        """End the runs that a worker takes part in."""
        # Each its own, as whoever raises it lets it hold what is around there.
        self.decide_all(lambda run, now: run.lose(worker, error.anew(), now))

    def told(self, place: Place | None) -> tuple[str, dict[str, Any]]:
        """Say in which callback a worker is, or was as it died; also as values.

        Nothing in words if it is in none, or if that run is over.
        """
        run = None if place is None else self.get(place.generation)
        if place is None or run is None:
            return "", {"operator": None, "shard": None, "time": None}
        where, values = place.told(run.plan.graph)
        return f" in {where}, of {run.who}", values

    def touch(self, generation: int) -> bool:
        """Let a run settle its progress when it is due; False if it is over."""
        if generation not in self._runs:
            return False
        self._touched.add(generation)
        return True

    def settle(self) -> None:
        """Let the runs that were touched say what follows from their progress."""
        touched, self._touched = sorted(self._touched), set()
        for generation in touched:
            self.decide(generation, lambda run, _: run.settle())

    def tick(self, now: float) -> bool:
        """Let runs act whose deadlines have passed; True if there are any."""
        due = [generation for generation, at in self._due.items() if now >= at]
        for generation in due:
            self.decide(generation, RunState.tick)
        return bool(due)

    def deadlines(self) -> list[float]:
        """Return when `tick` has to be called."""
        return list(self._due.values())

    def end_all(self, error: TimelyError) -> None:
        """Tell observers that their runs ended so, not asking workers."""
        for generation, (_, observer) in list(self._runs.items()):
            del self._runs[generation]
            self._due.pop(generation, None)
            observer(Ended(error.anew()))

    def _note_due(self, run: RunState) -> None:
        """Note when something of a run is due: it changes as the run decides only."""
        generation, deadline = run.plan.generation, run.next_deadline()
        if deadline is None or generation not in self._runs:
            self._due.pop(generation, None)
        else:
            self._due[generation] = deadline
