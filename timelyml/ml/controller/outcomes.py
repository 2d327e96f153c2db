"""What becomes of results once their work is over, and what its client hears of that."""

from __future__ import annotations

from collections.abc import Mapping

from timelyml.ml.controller.buffers import Buffers
from timelyml.ml.controller.clients import Clients
from timelyml.ml.controller.messages import Failed
from timelyml.ml.controller.outbox import Outbox
from timelyml.ml.controller.records import SliceRecord
from timelyml.ml.controller.work import Work
from timelyml.ml.store import BufferState


class Outcomes:
    """Says of results that they are there, or why they will never be.

    Args:
        slices: All slices, also those that are lost.
        buffers: Those that work makes.
        clients: Know who else is on its devices.
        outbox: Takes what clients are told.
    """

    def __init__(
        self,
        slices: Mapping[str, SliceRecord],
        buffers: Buffers,
        clients: Clients,
        outbox: Outbox,
    ) -> None:
        self._slices = slices
        self._buffers = buffers
        self._clients = clients
        self._outbox = outbox

    def of(self, work: Work) -> tuple[list[int], Mapping[int, bytes]]:
        """Settle what work made; return what of it is there, and the other errors."""
        errors: Mapping[int, bytes] = work.owner.output_errors(work)
        good: list[int] = []
        failed = BufferState.FAILED
        for entry in work.results:
            if entry.state is failed:
                continue  # lost with its island, as its client has heard
            if (out := entry.number) in errors:
                self._buffers.fail(entry, errors[out])
            else:
                good.append(out)
        self._buffers.follow(self._buffers.directory.ready(good))
        return good, errors

    def tell(self, work: Work, good: list[int], errors: Mapping[int, bytes]) -> None:
        """Tell the client of work that it is over."""
        for error in dict.fromkeys(errors.values()) if errors else ():
            outs = tuple(out for out in work.outs if errors.get(out) == error)
            self._outbox.tell(work.client, Failed(0, outs, error))
        news = self._outbox.news(work.client)
        news.num_calls += 1
        news.buffers += good
        news.values += work.values.items()
        news.device_ns += work.device_ns
        if news.is_alone:
            news.is_alone = self._clients.is_alone(work, self._slices)
