"""Calls that a client collected and sent as one program: each can be cancelled alone."""

from __future__ import annotations

from collections.abc import Callable, Collection

from timelyml.ml.controller.buffers import Buffers
from timelyml.ml.controller.cuts import Ancestry
from timelyml.ml.controller.messages import Failed
from timelyml.ml.controller.outbox import Outbox
from timelyml.ml.controller.program_calls import ProgramRecord
from timelyml.ml.controller.work import Work
from timelyml.ml.store import BufferState, Entry


class Collected:
    """Programs under way that stand for calls which have nothing else in common.

    Args:
        buffers: Knows what they make.
        outbox: Takes what clients are told.
        find: Returns the work of a name that is not over.
    """

    def __init__(
        self,
        buffers: Buffers,
        outbox: Outbox,
        find: Callable[[str | None], Work | None],
    ) -> None:
        self._buffers = buffers
        self._outbox = outbox
        self._find = find

    def cancel(self, client: int, entries: Collection[Entry], error: bytes) -> set[str]:
        """Fail these buffers and what depends on them; return who goes on for others.

        A program of whose results none is left is for others to cancel. What is ordered
        runs, as a call does that was sent alone; of what is not, a few milliseconds of
        computing are not worth more than to be forgotten.
        """
        going_on = set()
        for name in {each.producer for each in entries}:
            work = self._find(name)
            if not isinstance(work, ProgramRecord) or not work.known.is_collected:
                continue
            if work.is_ordered or work.client != client:
                continue
            failed = _dependent(work, [x for x in entries if x.producer == name])
            if len(failed) == sum(x.state is BufferState.PENDING for x in work.results):
                continue
            going_on.add(work.program)
            for entry in failed:
                self._buffers.fail(entry, error)
            outs = tuple(entry.buffer.number for entry in failed)
            self._outbox.tell(work.client, Failed(0, outs, error))
        return going_on


def _dependent(work: ProgramRecord, meant: Collection[Entry]) -> list[Entry]:
    """Return the results that need launches which make these and are not ordered."""
    ancestry = Ancestry(work.lowered)
    ordered = {x for block in work.ordered for x in work.cut.blocks[block].gangs}
    numbers = {each.buffer.number for each in meant}
    makers = {
        ancestry.maker(position)
        for position, out in enumerate(work.outs)
        if out in numbers
    }
    makers -= ordered
    return [
        entry
        for position, entry in enumerate(work.results)
        if entry.state is BufferState.PENDING
        and not makers.isdisjoint(ancestry.of(position)[1])
    ]
