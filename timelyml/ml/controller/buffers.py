"""What happens to buffers: how they come to slices, go elsewhere, and go away."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from timelyml.errors import AdmissionError, HandleError, SliceError
from timelyml.exchange import Lane
from timelyml.ml.controller.admission import Admission, Limits
from timelyml.ml.controller.fetches import Fetches
from timelyml.ml.controller.holdings import by_host, cut, is_whole, lost
from timelyml.ml.controller.memory import Memory
from timelyml.ml.controller.messages import Failed, Finished, Put
from timelyml.ml.controller.outbox import Outbox
from timelyml.ml.controller.records import SliceRecord
from timelyml.ml.functions import Spec
from timelyml.ml.hosts import Expect, Export, HeldBox, Pieces, cover
from timelyml.ml.hosts.slices import zeros
from timelyml.ml.store import (
    NOBODY,
    Buffer,
    BufferState,
    Claim,
    Delete,
    Directory,
    DirectoryEffect,
    Entry,
)
from timelyml.runtime.failure import pack_error


@dataclass(frozen=True, slots=True)
class _Held:
    """A value that is to be put on a slice once something may begin there."""

    client: int
    admit: Callable[[], None]
    refuse: Callable[[bytes], None]


class Buffers:
    """Carries out what becomes of buffers, on their hosts and in their clients' eyes.

    Args:
        slices: All slices, also those that are lost.
        outbox: Takes what follows.
        on_idle: Called with a slice when a buffer on it is gone.
        limits: How much a client may have.

    Attributes:
        admission: Refuses what goes beyond that.
        directory: Who holds which buffer.
        memory: What takes memory where.
        held: What puts a value there that is for a slice on which nothing may begin.
    """

    def __init__(
        self,
        slices: Mapping[str, SliceRecord],
        outbox: Outbox,
        on_idle: Callable[[SliceRecord], None],
        limits: Limits,
    ) -> None:
        self.directory = Directory()
        self.admission = Admission(limits, self.directory)
        self.memory = Memory(slices, outbox, self._describe)
        self._slices = slices
        self._outbox = outbox
        self._on_idle = on_idle
        self.fetches = Fetches(
            self.directory,
            outbox,
            number=lambda: self.numbers(1)[0],
            held=self._held,
            unuse=partial(self.unuse, is_exported=True),
        )
        self._sources: dict[int, Entry] = {}  # of transfers, by target
        self.held: dict[int, _Held] = {}
        self._next_number = 1

    def numbers(self, count: int) -> range:
        """Return so many numbers that no buffer has."""
        first = self._next_number
        self._next_number += count
        return range(first, self._next_number)

    def put(self, client: int, put: Put) -> None:
        """Bring a host array to the hosts of a slice; tell if that cannot be."""
        slice_ = self._slices.get(put.slice)
        if slice_ is None or slice_.client != client or slice_.is_dropped:
            no_slice = pack_error(no_such_slice(put.slice))
            self._outbox.tell(client, Failed(0, (put.buffer,), no_slice))
            return
        buffer = slice_.new_buffer(put.buffer, put.type, put.spec, "put")
        try:
            self.admission.check_bytes(client, [buffer])
        except AdmissionError as error:
            self._outbox.tell(client, Failed(0, (put.buffer,), pack_error(error)))
            return
        (entry,) = self.add(client, [buffer])
        self.directory.use([entry])  # until it is there
        refuse = partial(self._refuse_put, entry)
        if slice_.error is not None:
            refuse(slice_.error)
            return
        label = f"the value {buffer.name} that is put"
        program = f"put {buffer.name}"

        def admit() -> None:
            claim = Claim(client, program, outputs=(entry.buffer,), label=label)
            place = partial(self._place, entry, put, claim)
            self.memory.admit(claim, place, refuse)

        if slice_.is_closed:
            self.held[put.buffer] = _Held(client, admit, refuse)
        else:
            admit()

    def refuse_held(self, slice_: SliceRecord, error: bytes) -> None:
        """Put nothing on a slice that will never stand again."""
        for entry in self.directory.on(slice_.name):
            if held := self.held.pop(entry.buffer.number, None):
                held.refuse(error)

    def reopen(self, slice_: SliceRecord) -> None:
        """Go on with what waited for a slice; what hosts were asked for is forgotten."""
        entries = self.directory.on(slice_.name)
        # Told now, as what was put is there as soon as it is admitted.
        late = [x for x in entries if x.state is BufferState.PENDING]
        for entry in entries:
            if held := self.held.pop(entry.buffer.number, None):
                held.admit()
        for entry in late:
            self.fetches.renew(entry)

    def _place(self, entry: Entry, put: Put, claim: Claim) -> None:
        """Send the parts of a value that there is room for."""
        slice_ = self._slices[put.slice]
        self._expect(entry.buffer, slice_)
        for host, boxes in by_host(slice_.held(put.spec, put.type.shape)).items():
            pieces = tuple(cut(put.array, box) for box in boxes)
            self._outbox.send(host, Pieces(put.buffer, pieces), Lane.BULK)
        self.memory.release(claim.program)
        self.follow(self.directory.ready([put.buffer]))
        self.unuse([entry])

    def _refuse_put(self, entry: Entry, error: bytes) -> None:
        self._outbox.tell(entry.client, Failed(0, (entry.buffer.number,), error))
        self.fail(entry, error)
        self.unuse([entry])

    def add(
        self, client: int, buffers: Iterable[Buffer], producer: str | None = None
    ) -> list[Entry]:
        """Make buffers known that a client will have; of `NOBODY`, that a call will."""
        made = self.directory.promise(client, buffers, producer)
        for entry in made:
            slice_ = self._slices.get(entry.buffer.placement)
            if slice_ is not None:
                slice_.num_buffers += 1
        return made

    def transfer(self, source: Entry, slice_: SliceRecord, spec: Spec) -> Entry:
        """Have a buffer that is like another, but lies elsewhere or otherwise."""
        (number,), array_type = self.numbers(1), source.buffer.type
        buffer = slice_.new_buffer(number, array_type, spec, "moved")
        (target,) = self.add(NOBODY, [buffer], source.producer)
        self._sources[number] = source
        held = self._held(source.buffer)
        parts: dict[tuple[int, int], list[Any]] = {}
        for sender, part in cover(slice_.held(spec, array_type.shape), held):
            parts.setdefault((sender, part.host), []).append(part.box)
        for (sender, peer), boxes in parts.items():
            export = Export(
                source.buffer.number, array_type, peer, number, tuple(boxes)
            )
            self._outbox.book(sender).exports.append(export)
        self._expect(buffer, slice_, parts)
        return target

    def watch(self, client: int, numbers: Iterable[int]) -> None:
        """Tell a client when buffers that others make are there."""
        for number in numbers:
            with contextlib.suppress(HandleError):  # it let go of it in the meantime
                self.follow(self.directory.wait(client, number))

    def fail(self, entry: Entry, error: bytes) -> None:
        """Note that a buffer will never be; whoever fetches it hears why."""
        self.follow(self.directory.fail([entry.buffer.number], error))
        self.fetches.fail(entry, error)

    def refuse(
        self,
        client: int,
        outs: tuple[int, ...],
        outputs: Iterable[Buffer],
        given: Iterable[int],
        error: bytes,
    ) -> None:
        """Fail the results of work that does not even begin."""
        for entry in self.add(client, outputs):
            self.fail(entry, error)
        self.follow(self.directory.give_up(client, given))
        self._outbox.tell(client, Failed(1, outs, error))

    def unuse(self, entries: Iterable[Entry], *, is_exported: bool = False) -> None:
        """Let go of buffers that were used."""
        self.follow(self.directory.unuse(entries, is_exported=is_exported))

    def leave(self, client: int, gone: bytes) -> None:
        """Let go of all that a client has, and of what it asked for; `gone` says why."""
        self.fetches.leave(client)
        for number, held in list(self.held.items()):
            if held.client == client:
                del self.held[number]
                held.refuse(gone)
        self.follow(self.directory.leave(client))

    def lose(
        self,
        slice_: SliceRecord,
        living: Collection[int],
        reason: str,
        is_waiting: Callable[[str | None], bool],
    ) -> list[int]:
        """Note what is lost with hosts of a slice; those who hold it hear it.

        Args:
            slice_: Where it lay.
            living: Those of its hosts that are left.
            reason: What became of the others.
            is_waiting: Whether the work of a name has not begun, so that what it is to
                make is not lost.

        Returns:
            The buffers that are whole on hosts that are left.
        """
        kept: list[int] = []
        for entry in self.directory.on(slice_.name):
            buffer = entry.buffer
            if entry.state is BufferState.PENDING and (
                buffer.number in self.held or is_waiting(entry.producer)
            ):
                continue
            if entry.state is BufferState.READY and is_whole(slice_, buffer, living):
                kept.append(buffer.number)
            error = pack_error(lost(buffer, slice_.island, reason))
            if buffer.number not in kept:
                self.follow(self.directory.lose(buffer.number, error))
            self.fetches.fail(entry, error)
        for target, source in list(self._sources.items()):
            moved = self.directory.get(target)
            if source.buffer.placement == slice_.name and moved is not None:
                error = pack_error(lost(source.buffer, slice_.island, reason))
                self._stand_in(moved.buffer, source.error or error)
        return kept

    def follow(self, effects: Iterable[DirectoryEffect]) -> None:
        """Tell clients what they wait for, and hosts what nobody needs any more."""
        deleted: dict[str, list[int]] = {}  # by placement
        for effect in effects:
            if isinstance(effect, Delete):
                buffer = effect.buffer
                deleted.setdefault(buffer.placement, []).append(buffer.number)
            elif effect.error is None:
                self._outbox.tell(effect.client, Finished(0, (effect.number,), ()))
            else:
                failed = Failed(0, (effect.number,), effect.error)
                self._outbox.tell(effect.client, failed)
        for placement, numbers in deleted.items():
            self._delete(placement, numbers)

    def _delete(self, placement: str, numbers: list[int]) -> None:
        for number in numbers if self.held or self._sources else ():
            self.held.pop(number, None)
            self._sources.pop(number, None)
        slice_ = self._slices.get(placement)
        if slice_ is None:
            return  # what a call on an unknown slice returned
        if slice_.error is None:
            for host in slice_.hosts:
                self._outbox.book(host).releases += numbers
        self.memory.free(numbers)
        slice_.num_buffers -= len(numbers)
        self._on_idle(slice_)

    def _describe(self, buffer: Buffer) -> str:
        """Say which buffer this is, and who keeps it."""
        entry = self.directory.get(buffer.number)
        keepers: list[str] = []
        if entry is not None:
            keepers += [f"client {client}" for client in sorted(entry.holders)]
            keepers += [f"the name {name!r}" for name in sorted(entry.names)]
        return f"{buffer}, kept by {' and '.join(keepers) or 'calls under way'}"

    def _stand_in(self, target: Buffer, error: bytes) -> None:
        """Let hosts go on that wait for pieces which cannot come any more."""
        slice_ = self._slices[target.placement]
        if slice_.error is not None:
            return
        for host, boxes in by_host(slice_.held(target.spec, target.type.shape)).items():
            pieces = Pieces(target.number, zeros(target.type, boxes), error)
            self._outbox.send(host, pieces, Lane.BULK)

    def _held(self, buffer: Buffer) -> list[HeldBox]:
        """Return who has which box of a buffer, of those that can still be asked."""
        held = self._slices[buffer.placement].held(buffer.spec, buffer.type.shape)
        return [each for each in held if not self._outbox.is_muted(each.host)]

    def _expect(
        self,
        buffer: Buffer,
        slice_: SliceRecord,
        sent: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Have hosts expect a buffer; `sent` says who sends to whom, if hosts do."""
        for host in slice_.hosts:
            senders = tuple([x for x, peer in sent if peer == host and x != host])
            expect = Expect(
                buffer.number, slice_.name, buffer.type, buffer.spec, senders=senders
            )
            self._outbox.book(host).expects.append(expect)


def no_such_slice(name: str) -> SliceError:
    """Return the error of whoever uses a slice that is not, or not any more, its own."""
    return SliceError(
        f"slice {name!r} is not there; got a use of it; expected one of the client's "
        f"own that was not given back; ask for a slice first",
        slice=name,
    )
