"""The directory of buffers: who needs them, how far they are, how they get elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from timelyml.errors import BufferLostError, HandleError, SliceError
from timelyml.exchange import CONTROLLER, Lane
from timelyml.ml.controller.messages import Failed, Fetched, Put
from timelyml.ml.controller.records import BufferRecord, Outbox, SliceRecord, State
from timelyml.ml.functions import Spec
from timelyml.ml.hosts import Expect, Export, HeldBox, Piece, Pieces, cover
from timelyml.ml.hosts.slices import zeros
from timelyml.runtime.failure import pack_error


@dataclass(slots=True)
class _Fetching:
    """A fetch under way."""

    record: BufferRecord
    client: int
    num_left: int
    pieces: list[Piece] = field(default_factory=list)
    error: bytes | None = None


class Buffers:
    """All logical buffers, and what is under way of them.

    Args:
        slices: All slices, also those that are lost.
        outbox: Takes what follows.
        on_idle: Called with a slice when a buffer on it is gone.
    """

    def __init__(
        self,
        slices: Mapping[str, SliceRecord],
        outbox: Outbox,
        on_idle: Callable[[SliceRecord], None],
    ) -> None:
        self._slices = slices
        self._outbox = outbox
        self._on_idle = on_idle
        self._records: dict[int, BufferRecord] = {}
        self._fetches: dict[int, _Fetching] = {}
        self._sources: dict[int, BufferRecord] = {}  # of transfers, by target
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._records)

    def get(self, buffer: int) -> BufferRecord | None:
        """Return what is known of a buffer."""
        return self._records.get(buffer)

    def add(self, record: BufferRecord) -> None:
        """Make a buffer known."""
        self._records[record.buffer] = record
        slice_ = self._slices.get(record.slice)
        if slice_ is not None:
            slice_.num_buffers += 1

    def put(self, client: int, put: Put) -> None:
        """Bring a host array to the hosts of a slice; tell if that cannot be."""
        slice_ = self._slices.get(put.slice)
        if slice_ is None or slice_.client != client or slice_.is_dropped:
            error = pack_error(no_such_slice(put.slice))
            self._outbox.tell(client, Failed(0, (put.buffer,), error))
            return
        record = BufferRecord(
            put.buffer, client, put.slice, put.type, put.spec, State.READY
        )
        self.add(record)
        if slice_.error is not None:
            self.fail(record, slice_.error)
            self._outbox.tell(client, Failed(0, (put.buffer,), slice_.error))
            return
        self._expect(record, slice_)
        for host, boxes in _by_host(slice_.held(put.spec, put.type.shape)).items():
            pieces = tuple(_cut(put.array, box) for box in boxes)
            self._outbox.send(host, Pieces(put.buffer, pieces), Lane.BULK)

    def transfer(self, source: BufferRecord, slice_: SliceRecord, spec: Spec) -> BufferRecord:  # fmt: skip
        """Have a buffer that is like another, but lies elsewhere or otherwise."""
        target = BufferRecord(
            next(self._numbers), 0, slice_.name, source.type, spec, State.PENDING,
            producer=source.producer, is_held=False,
        )  # fmt: skip
        self.add(target)
        self._expect(target, slice_)
        self._sources[target.buffer] = source
        shape = source.type.shape
        held = self._slices[source.slice].held(source.spec, shape)
        parts: dict[tuple[int, int], list[Any]] = {}
        for sender, part in cover(slice_.held(spec, shape), held):
            parts.setdefault((sender, part.host), []).append(part.box)
        for (sender, peer), boxes in parts.items():
            export = Export(
                source.buffer, source.type, peer, target.buffer, tuple(boxes)
            )
            self._outbox.book(sender).exports.append(export)
        return target

    def fetch(self, client: int, buffer: int) -> None:
        """Bring the elements of a buffer to a client, once they are computed."""
        record = self._records.get(buffer)
        if record is None or record.client != client:
            unknown = HandleError("a buffer is not there; got a fetch of it")
            self._outbox.tell(client, Fetched(buffer, (), pack_error(unknown)))
            return
        if record.state is State.FAILED:
            self._outbox.tell(client, Fetched(buffer, (), record.error))
            return
        slice_ = self._slices[record.slice]
        request = next(self._numbers)
        owners: dict[Any, int] = {}
        for host, box in slice_.held(record.spec, record.type.shape):
            owners.setdefault(box, host)
        self._fetches[request] = _Fetching(record, client, len(owners))
        record.num_uses += 1
        record.num_exports += 1
        held = [HeldBox(host, box) for box, host in owners.items()]
        for host, boxes in _by_host(held).items():
            export = Export(buffer, record.type, CONTROLLER, request, tuple(boxes))
            self._outbox.book(host).exports.append(export)

    def take(self, pieces: Pieces) -> None:
        """Take pieces that were fetched."""
        fetching = self._fetches.get(pieces.target)
        if fetching is None:
            return  # its client is gone, or its island
        fetching.pieces += pieces.pieces
        fetching.error = fetching.error or pieces.error
        fetching.num_left -= len(pieces.pieces)
        if fetching.num_left == 0:
            self._answer(pieces.target)

    def ready(self, record: BufferRecord) -> None:
        """Note that a buffer is computed."""
        record.state = State.READY

    def fail(self, record: BufferRecord, error: bytes) -> None:
        """Note that a buffer will never be; whoever fetches it hears why."""
        record.state, record.error = State.FAILED, error
        for request, fetching in list(self._fetches.items()):
            if fetching.record is record:
                fetching.error = fetching.error or error
                self._answer(request)

    def use(self, record: BufferRecord, *, is_exported: bool = False) -> None:
        """Keep a buffer as long as something uses it."""
        record.num_uses += 1
        record.num_exports += is_exported

    def unuse(self, record: BufferRecord, *, is_exported: bool = False) -> None:
        """Let go of a buffer."""
        record.num_uses -= 1
        record.num_exports -= is_exported
        self.let_go(record)

    def let_go(self, record: BufferRecord) -> None:
        """Release a buffer on its hosts if nobody needs it."""
        if not record.is_unused or self._records.pop(record.buffer, None) is None:
            return
        self._sources.pop(record.buffer, None)
        slice_ = self._slices.get(record.slice)
        if slice_ is None:
            return  # what a call on an unknown slice returned
        if slice_.error is None:
            for host in slice_.hosts:
                self._outbox.book(host).releases.append(record.buffer)
        slice_.num_buffers -= 1
        self._on_idle(slice_)

    def drop(self, client: int, buffers: Iterable[int]) -> None:
        """Take a client's word that it does not need buffers any more."""
        for buffer in buffers:
            record = self._records.get(buffer)
            if record is not None and record.client == client:
                record.is_held = False
                self.let_go(record)

    def leave(self, client: int) -> None:
        """Let go of all that a client has, and of what it asked for."""
        for request, fetching in list(self._fetches.items()):
            if fetching.client == client:
                del self._fetches[request]
                self.unuse(fetching.record, is_exported=True)
        self.drop(client, self.of_client(client))

    def of_client(self, client: int) -> list[int]:
        """Return the buffers of a client."""
        return [b for b, record in self._records.items() if record.client == client]

    def lose(self, slice_: SliceRecord, island: str, reason: str) -> None:
        """Note that everything on a slice is lost; those who wait for it hear it."""
        for record in list(self._records.values()):
            if record.slice != slice_.name or record.state is State.FAILED:
                continue
            error = pack_error(_lost(record, island, reason))
            self.fail(record, error)
            if record.is_held:
                self._outbox.tell(record.client, Failed(0, (record.buffer,), error))
        for target, source in list(self._sources.items()):
            if source.slice == slice_.name and source.error is not None:
                self._stand_in(self._records[target], source.error)

    def _stand_in(self, target: BufferRecord, error: bytes) -> None:
        """Let hosts go on that wait for pieces which cannot come any more."""
        slice_ = self._slices[target.slice]
        if slice_.error is not None:
            return
        for host, boxes in _by_host(
            slice_.held(target.spec, target.type.shape)
        ).items():
            pieces = Pieces(target.buffer, zeros(target.type, boxes), error)
            self._outbox.send(host, pieces, Lane.BULK)

    def _answer(self, request: int) -> None:
        fetching = self._fetches.pop(request)
        record, error = fetching.record, fetching.record.error or fetching.error
        pieces = () if error is not None else tuple(fetching.pieces)
        self._outbox.tell(fetching.client, Fetched(record.buffer, pieces, error))
        self.unuse(record, is_exported=True)

    def _expect(self, record: BufferRecord, slice_: SliceRecord) -> None:
        expect = Expect(record.buffer, slice_.name, record.type, record.spec)
        for host in slice_.hosts:
            self._outbox.book(host).expects.append(expect)


def no_such_slice(name: str) -> SliceError:
    """Return the error of whoever uses a slice that is not, or not any more, its own."""
    return SliceError(
        f"slice {name!r} is not there; got a use of it; expected one of the client's "
        f"own that was not given back; ask for a slice first",
        slice=name,
    )


def _by_host(held: Iterable[HeldBox]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for host, box in dict.fromkeys(held):
        found.setdefault(host, []).append(box)
    return found


def _cut(array: Any, box: Any) -> Piece:
    starts = tuple(start for start, _ in box)
    inner = tuple(slice(start, stop) for start, stop in box)
    return Piece(starts, array[(*inner, ...)])  # an array also without dimensions


def _lost(record: BufferRecord, island: str, reason: str) -> BufferLostError:
    return BufferLostError(
        f"{record.type} on slice {record.slice!r} is lost with island {island!r}; got "
        f"{reason}; expected its devices to stay; compute it again on another slice",
        slice=record.slice,
        island=island,
        reason=reason,
    )
