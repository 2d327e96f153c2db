"""Gauges that clients have open on the ledger of memory."""

from __future__ import annotations

from timelyml.errors import AdmissionError
from timelyml.ml.controller.buffers import Buffers
from timelyml.ml.controller.gauged import CountBuffers, Gauged, OpenGauge, ReadGauge
from timelyml.ml.controller.messages import Acknowledged, Refused
from timelyml.ml.controller.outbox import Outbox
from timelyml.ml.store import BufferState, Gauge, Label
from timelyml.runtime.failure import pack_error

MAX_GAUGES = 16
"""Of one client at a time; one more takes the place of the first."""


class Gauges:
    """Opens gauges, has the ledger count for them, and reads them.

    Args:
        buffers: Those that clients have, with the ledger.
        outbox: Takes the answers.
    """

    def __init__(self, buffers: Buffers, outbox: Outbox) -> None:
        self._buffers = buffers
        self._outbox = outbox
        self._gauges: dict[tuple[int, int], Gauge] = {}  # by client and first request

    def handle(self, client: int, message: object) -> bool:
        """Take what a client says, if it is about a gauge."""
        match message:
            case CountBuffers():
                self._count(client, message)
            case OpenGauge():
                own = [each for each in self._gauges if each[0] == client]
                if len(own) == MAX_GAUGES:
                    del self._gauges[own[0]]
                self._gauges[client, message.request] = Gauge()
                self._outbox.tell(client, Acknowledged(message.request))
            case ReadGauge():
                self._read(client, message)
            case _:
                return False
        return True

    def leave(self, client: int) -> None:
        """Forget what a client has open."""
        for key in [each for each in self._gauges if each[0] == client]:
            del self._gauges[key]

    def _count(self, client: int, message: CountBuffers) -> None:
        gauge = self._gauges.get((client, message.gauge))
        if gauge is None:
            return  # newer ones took its place, as who reads it will hear
        label = Label(gauge, message.group, message.item)
        for number in message.buffers:
            entry = self._buffers.directory.get(number)
            if entry is not None and entry.state is not BufferState.FAILED:
                self._buffers.memory.ledger.count(number, label)

    def _read(self, client: int, message: ReadGauge) -> None:
        gauge = self._gauges.get((client, message.gauge))
        if gauge is None:
            error = AdmissionError(
                f"client {client} has no such gauge any more; got a look at it after "
                f"{MAX_GAUGES} newer ones were opened; expected fewer at a time; read "
                f"one before the next"
            )
            self._outbox.tell(client, Refused(message.request, pack_error(error)))
            return
        if message.ends:
            del self._gauges[client, message.gauge]
        peaks = tuple((group, *peak) for group, peak in gauge.peaks().items())
        self._outbox.tell(client, Gauged(message.request, peaks))
