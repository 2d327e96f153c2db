"""How far a program has come: which of its gangs could be ordered next."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

from timelyml.errors import ProgramError
from timelyml.ml.scheduling.values import Outcome, Submission


class _Phase(IntEnum):
    """Where a gang stands in the iteration under way."""

    WAITING = 0
    READY = 1
    ORDERED = 2


class ProgramRun:
    """One submission under way.

    A gang is ready once all gangs that it needs are *ordered*: it need not wait until
    they have run, because devices work in the order they are given. An input from
    elsewhere is opened once for each iteration, perhaps several ahead.

    The next iteration starts once every gang of the one before is ordered. Its gangs
    get a new ticket, so that a loop without end stands in line anew each time.
    """

    __slots__ = (
        "_needs_left",
        "_num_ordered",
        "_opened",
        "_phases",
        "iteration",
        "iterations",
        "num_unfinished",
        "outcome",
        "parked",
        "passed_at_ns",
        "submission",
        "ticket",
    )

    def __init__(self, submission: Submission, ticket: int, passed_at_ns: int) -> None:
        self.submission = submission
        self.iterations = submission.iterations
        self.iteration = 0
        self._num_ordered = 0
        self.num_unfinished = 0
        self.outcome: Outcome | None = None
        """How it will end, once that is no longer open."""
        self.parked: list[int] = []
        """Ready gangs that are out of line while the program is held back."""
        self._opened = [[0] * gang.num_external for gang in submission.graph.gangs]
        self._begin(ticket, passed_at_ns)

    @property
    def has_started(self) -> bool:
        """Whether any gang of it was ordered."""
        return self.iteration > 0 or self._num_ordered > 0

    @property
    def is_all_ordered(self) -> bool:
        """Whether no gang of it will be ordered any more."""
        return self.outcome is not None or self.iteration == self.iterations

    def ready(self) -> Iterator[int]:
        """Mark gangs ready that need nothing; return them. For a new iteration."""
        for gang in range(len(self._phases)):
            if self._becomes_ready(gang):
                yield gang

    def open(self, gang: int, slot: int) -> bool:
        """Count an input from elsewhere; return whether the gang is ready now.

        Raises:
            ProgramError: The gang has no such input.
        """
        gangs = self.submission.graph.gangs
        if not 0 <= gang < len(gangs) or not 0 <= slot < gangs[gang].num_external:
            raise ProgramError(
                f"program {self.submission.program!r} has no such outside input; got "
                f"input {slot} of gang {gang}; expected one that its graph declares",
                program=self.submission.program,
                gang=gang,
            )
        self._opened[gang][slot] += 1
        return self._becomes_ready(gang)

    def ordered(self, gang: int) -> Iterator[int]:
        """Count a gang as ordered; return the gangs of the iteration now ready."""
        self._phases[gang] = _Phase.ORDERED
        self._num_ordered += 1
        self.num_unfinished += 1
        for successor in self.submission.graph.successors[gang]:
            self._needs_left[successor] -= 1
            if self._becomes_ready(successor):
                yield successor

    def finish_iteration(self) -> bool:
        """Go on if all gangs are ordered; return whether another iteration begins."""
        if self._num_ordered < len(self._phases):
            return False
        self.iteration += 1
        self._num_ordered = 0
        return not self.is_all_ordered

    def begin_iteration(self, ticket: int, passed_at_ns: int) -> None:
        """Stand in line anew."""
        self._begin(ticket, passed_at_ns)

    def stop(self, iterations: int | None) -> None:
        """End after so many iterations, if that is sooner, or after the one under way."""
        if self.is_all_ordered:
            return
        least = self.iteration + 1
        wanted = least if iterations is None else max(least, iterations)
        if self.iterations is None or wanted < self.iterations:
            self.iterations = wanted

    def uses(self, placement: str) -> bool:
        """Whether a gang runs there."""
        return placement in self.submission.graph.placements

    def blockers(self, gang: int) -> str:
        """Say what a gang that is not ready still needs."""
        spec = self.submission.graph.gangs[gang]
        needs = [each for each in spec.needs if self._phases[each] < _Phase.ORDERED]
        missing = self._opened[gang].count(0)
        parts = [f"gang {each} of its program" for each in needs]
        parts += [f"{missing} inputs from elsewhere"] if missing else []
        return " and ".join(parts)

    def waiting(self) -> Iterator[int]:
        """Return the gangs that are not ready."""
        for gang, phase in enumerate(self._phases):
            if phase == _Phase.WAITING:
                yield gang

    def _begin(self, ticket: int, passed_at_ns: int) -> None:
        self.ticket = ticket
        self.passed_at_ns = passed_at_ns
        graph = self.submission.graph
        self._needs_left = list(graph.num_needs)
        self._phases = [_Phase.WAITING] * len(graph.gangs)
        self._num_ordered = 0

    def _becomes_ready(self, gang: int) -> bool:
        opened = self._opened[gang]
        if (
            self._phases[gang] != _Phase.WAITING
            or self._needs_left[gang]
            or 0 in opened
        ):
            return False
        for slot in range(len(opened)):
            opened[slot] -= 1
        self._phases[gang] = _Phase.READY
        return True
