"""Computations that may take no longer than they state.

The time of one counts from when it alone is in its own way: it is ordered, what it takes
is there, and nothing that was ordered before it on its hosts is still to end. Pure.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from timelyml.errors import DeadlineError
from timelyml.ml.controller.buffers import Buffers
from timelyml.ml.controller.messages import Failed
from timelyml.ml.controller.outbox import Outbox
from timelyml.ml.controller.work import Work
from timelyml.ml.scheduling import Grant, Islands
from timelyml.ml.store import BufferState
from timelyml.runtime.failure import pack_error


@dataclass(slots=True)
class Timed:
    """A gang with a deadline that is ordered.

    Attributes:
        order: The scheduler that ordered it.
        what: The computation, for people.
        due_s: When it is over at the latest; None as long as it waits for others.
    """

    order: str
    sequence: int
    work: Work
    gang: int
    placement: str
    what: str
    limit_s: float
    due_s: float | None = None

    def fail(self, buffers: Buffers, outbox: Outbox) -> DeadlineError:
        """Fail what depends on it; return the error."""
        work, error = self.work, self.error()
        packed = pack_error(error)
        work.owner.overdue(work, self.gang, packed)
        errors = work.owner.output_errors(work)
        late = [x for x in work.results if errors.get(x.buffer.number) == packed]
        for entry in late:
            buffers.fail(entry, packed)
        outs = tuple(entry.buffer.number for entry in late)
        outbox.tell(work.client, Failed(0, outs, packed))
        return error

    def error(self) -> DeadlineError:
        """Return what its results raise."""
        return DeadlineError(
            f"{self.what} of client {self.work.client} ran for longer than it may; got "
            f"no end after {self.limit_s:g} s; expected one by its deadline_s; its worker "
            f"is ended, and the island forms anew; allow more, or mend what does not end",
            timeout_s=self.limit_s,
        )


class Deadlines:
    """All such gangs.

    Args:
        under_way: The gangs that are not over, by order and sequence.
        islands: The schedulers, which know what was ordered before.
    """

    def __init__(self, under_way: Container[tuple[str, int]], islands: Islands) -> None:
        self._under_way = under_way
        self._islands = islands
        self._timed: list[Timed] = []

    def watch(self, order: str, grant: Grant, work: Work) -> None:
        """Watch a gang that is ordered, if it has a deadline."""
        limit = work.owner.limit(work, grant.key.gang)
        if limit is not None:
            key = order, grant.sequence, work, grant.key.gang, grant.placement
            self._timed.append(Timed(*key, what=limit[1], limit_s=limit[0]))

    def step(self, now_s: float) -> None:
        """Begin to count for those that wait for nothing any more."""
        if not self._timed:
            return
        self._timed = [
            x for x in self._timed if (x.order, x.sequence) in self._under_way
        ]
        for each in self._timed:
            if each.due_s is None and self._runs_alone(each):
                each.due_s = now_s + each.limit_s

    def overdue(self, now_s: float) -> list[Timed]:
        """Return those that should be over by now, each once."""
        late = [x for x in self._timed if x.due_s is not None and x.due_s <= now_s]
        self._timed = [each for each in self._timed if each not in late]
        return [x for x in late if (x.order, x.sequence) in self._under_way]

    def next_deadline(self) -> float | None:
        """When the next is overdue, if ever."""
        return min((x.due_s for x in self._timed if x.due_s is not None), default=None)

    def _runs_alone(self, timed: Timed) -> bool:
        work = timed.work
        is_fed = all(entry.state is not BufferState.PENDING for entry in work.args)
        is_alone = work.owner.is_alone(work, timed.gang)
        return (
            is_fed
            and is_alone
            and self._islands.schedulers[timed.order].is_first(timed.sequence)
        )
