"""The log of what one worker does for one run: a tape, to be replayed as a stream.

Events are kept in memory and written a block at a time. Its epochs are seconds since
the log was opened. A run without a log pays for one test in each turn of an operator
and for each part that arrives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

from timelyml.errors import TapeError
from timelyml.exchange import Lane, TransportMetrics
from timelyml.graph import Graph
from timelyml.progress import ProgressBatch
from timelyml.runtime.events import (
    Batches,
    Channels,
    Closes,
    LoggedEvent,
    Messages,
    Operates,
    Park,
    Schedule,
)
from timelyml.runtime.messages import DataMessage, Part
from timelyml.runtime.metering import channel_name
from timelyml.runtime.recording import tape_path
from timelyml.runtime.tape import (
    PREAMBLE,
    Data,
    Label,
    Progress,
    pack,
    tape_codec,
)

EVENTS_PER_BLOCK = 1024


class EventLog:
    """Writes what one worker does for one run.

    Args:
        directory: It gets a tape for each worker.
        graph: The resolved graph of the run.
        worker_index: Whose it is.
        num_workers: How many write one.
        transport: Of the worker; the run sends by `sender` in its place.
        clock: Of the worker, in seconds.
    """

    def __init__(
        self,
        directory: Path,
        graph: Graph,
        *,
        worker_index: int,
        num_workers: int,
        transport: Sender,
        clock: Callable[[], float],
    ) -> None:
        self.sender = LoggedSender(transport, self)
        self._path = tape_path(directory, worker_index)
        self._part = self._path.with_suffix(self._path.suffix + ".part")
        self._file: IO[bytes] | None = None  # until the run begins here
        self._label = Label(worker_index, num_workers, 1)
        self._codec = tape_codec(allow_pickle=False)
        self._worker = worker_index
        self._clock = clock
        self._opened = clock()
        self._epoch = 0
        self._events: list[LoggedEvent] = []
        self._parked_ns: int | None = None
        self._operators = [spec.name for spec in graph.operators]
        self._channels = [channel_name(graph, spec) for spec in graph.channels]

    def begin(self, graph: Graph, num_shards: list[int]) -> None:
        """Begin the tape with what was built; `num_shards` are those here.

        Raises:
            TapeError: There is a tape of this worker already.
        """
        if self._path.exists():
            raise TapeError(
                f"a log of events is there already; got {str(self._path)!r}; expected a "
                f"directory without it; choose another for event_log",
                tape=str(self._path),
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._part.open("wb")
        self._file.write(PREAMBLE)
        self._put(self._label)
        now, worker = self._now(), self._worker
        for spec, number in zip(graph.operators, num_shards, strict=True):
            self._add(Operates(now, worker, spec.name, spec.kind, number))
        for name, channel in zip(self._channels, graph.channels, strict=True):
            source = self._operators[channel.source.operator]
            target = self._operators[channel.target.operator]
            self._add(Channels(now, worker, name, source, target))

    def had_turn(self, operator: int, began: float, stopped: float) -> None:
        """Note a turn of an operator, in seconds of the clock."""
        name = self._operators[operator]
        self._add(Schedule(_ns(began), self._worker, name, _ns(stopped)))

    def delivered(self, channel: int, peer: int, part: Part) -> None:
        """Note a part that came here; what a worker sends itself left here too."""
        if peer == self._worker:
            self._note_part(channel, peer, part, is_sent=True)
        self._note_part(channel, peer, part, is_sent=False)

    def sent(self, peer: int, message: object) -> None:
        """Note what leaves in a message."""
        match message:
            case DataMessage(blocks=blocks, progress=batch):
                for block in blocks:
                    for part in block.parts:
                        self._note_part(block.channel, peer, part, is_sent=True)
                if batch is not None:
                    self._note_batch(peer, batch, is_sent=True)
            case ProgressBatch():
                self._note_batch(peer, message, is_sent=True)

    def heard(self, peer: int, batch: ProgressBatch | None) -> None:
        """Note a batch that came, if there is one."""
        if batch is not None:
            self._note_batch(peer, batch, is_sent=False)

    def turned(self, has_work: bool) -> None:
        """Note whether the worker's turn for the run left anything to do.

        If not, it waits: there need not be another turn, which finds nothing, before.
        """
        if not has_work and self._parked_ns is None:
            self._parked_ns = self._now()
            if self._seconds() > self._epoch:
                self._write()

    def close(self) -> None:
        """End the tape, if it was begun, and give it its name.

        One that cannot be written to its end keeps the name of an incomplete one.
        """
        if self._file is None:
            return
        with contextlib.suppress(OSError), self._file:
            self._end()
        self._file = None

    def _end(self) -> None:
        for name in self._operators:
            self._add(Closes(self._now(), self._worker, name))
        self._write()
        self._put(Progress(((self._epoch, -1),)))
        self._part.replace(self._path)

    def _note_part(self, channel: int, peer: int, part: Part, *, is_sent: bool) -> None:
        name, now = self._channels[channel], self._now()
        self._add(Messages(now, self._worker, name, peer, is_sent, part.weight))

    def _note_batch(self, peer: int, batch: ProgressBatch, *, is_sent: bool) -> None:
        changes = len(batch.changes)
        self._add(Batches(self._now(), self._worker, peer, is_sent, changes))

    def _add(self, event: LoggedEvent) -> None:
        if self._parked_ns is not None:
            stopped = max(self._parked_ns, event.time_ns)  # a turn is noted afterwards
            self._events.append(Park(self._parked_ns, self._worker, stopped))
            self._parked_ns = None
        self._events.append(event)
        if len(self._events) >= EVENTS_PER_BLOCK:
            self._write()

    def _write(self) -> None:
        """Write what there is, in the present epoch."""
        if self._file is None:
            return
        epoch = self._seconds()
        if epoch > self._epoch:
            self._put(Progress(((self._epoch, -1), (epoch, 1))))
            self._epoch = epoch
        if self._events:
            self._put(Data(epoch, self._events))
            self._events = []

    def _put(self, event: Label | Data | Progress) -> None:
        assert self._file is not None  # noqa: S101  for the type checker
        self._file.writelines(pack(self._codec, event))
        self._file.flush()  # and a killed worker leaves what it wrote

    def _seconds(self) -> int:
        return int(self._clock() - self._opened)

    def _now(self) -> int:
        return _ns(self._clock())


class Sender(Protocol):
    """A transport, as far as a run needs it."""

    metrics: TransportMetrics

    def send(self, peer: int, message: object, lane: Lane = Lane.CONTROL) -> None:
        """Hand over a message."""

    def shared_memory(self, size_bytes: int) -> Any:
        """Return memory, as bytes, that peers get to see without a copy, or None."""

    def wake(self) -> None:
        """End a wait; from any thread."""


class LoggedSender:
    """A sender that notes what leaves."""

    def __init__(self, sender: Sender, log: EventLog) -> None:
        self._sender = sender
        self._log = log
        self.metrics = sender.metrics
        self.wake = sender.wake
        self.shared_memory = sender.shared_memory

    def send(self, peer: int, message: object, lane: Lane = Lane.CONTROL) -> None:
        """Send a message, and note it."""
        self._sender.send(peer, message, lane)
        self._log.sent(peer, message)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
