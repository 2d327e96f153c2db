"""Moving slices: what is prepared where they go, what is drained and copied where they are.

A slice stands still from when its source is vacated until it is on its target. What
clients ask of it meanwhile waits; what was computed goes with it, by way of the memory of
hosts. The resource manager decides where slices go (the paper's section 4.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from timelyml.ml.controller.buffers import Buffers
from timelyml.ml.controller.code import Code
from timelyml.ml.controller.dispatching import Dispatch
from timelyml.ml.controller.outbox import Outbox
from timelyml.ml.controller.records import SliceRecord
from timelyml.ml.controller.resource_messages import Moved
from timelyml.ml.hosts import (
    AbandonSlices,
    Expect,
    Export,
    Leave,
    RemapSlice,
    SliceMade,
    cover,
)
from timelyml.ml.resources import Remapped, ResourceEffect, ResourceManager, Vacate
from timelyml.ml.store import Buffer, BufferState, Entry


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a slice will stand, and the ticket under which that is prepared."""

    record: SliceRecord
    ticket: int


@dataclass(slots=True)
class _Transfers:
    """What of a slice goes from host to host."""

    exports: dict[int, list[Export]] = field(default_factory=dict)
    forgotten: dict[int, list[int]] = field(default_factory=dict)
    expects: dict[int, list[Expect]] = field(default_factory=dict)


class Moves:
    """Slices that are on their way from some devices to others, or to none.

    Args:
        manager: Hears when targets are ready and sources are empty.
        slices: All slices.
        buffers: What lies on them.
        dispatch: Lets nothing begin on those that move.
        code: Compiles for targets.
        outbox: Takes what follows.
        follow: Takes what the manager says to that.
        living: Says of hosts which can still be told something.
    """

    def __init__(
        self,
        manager: ResourceManager,
        *,
        slices: dict[str, SliceRecord],
        buffers: Buffers,
        dispatch: Dispatch,
        code: Code,
        outbox: Outbox,
        follow: Callable[[Iterable[ResourceEffect]], None],
        living: Callable[[Iterable[int]], list[int]],
    ) -> None:
        self._manager = manager
        self._slices = slices
        self._buffers = buffers
        self._dispatch = dispatch
        self._code = code
        self._outbox = outbox
        self._follow = follow
        self._living = living
        self._targets: dict[str, _Target] = {}
        self._draining: dict[str, int] = {}  # tickets, by slice
        self._emptying: dict[str, int] = {}
        self._vacant: list[str] = []
        self._leaving: dict[int, int] = {}  # slices whose values a host still sends
        buffers.memory.on_vacant = self._vacant.append

    def prepare(
        self, slice_: SliceRecord, target: SliceRecord, made: SliceMade, ticket: int
    ) -> None:
        """Have what runs on a slice compiled for where it will stand."""
        self.forget(slice_.name)
        self._targets[slice_.name] = _Target(target, ticket)
        for host in target.hosts:
            self._outbox.order(host, made)
        self._code.aim(slice_, target)

    def vacate(self, effect: Vacate) -> None:
        """Let what has its memory come to its end, and nothing else begin."""
        slice_ = self._slices[effect.slice]
        if slice_.is_abandoned:
            self._emptying[slice_.name] = effect.ticket
            self._vacant.append(slice_.name)
            return
        slice_.is_closed = slice_.is_leaving = True
        is_suspended = not self._manager.is_wanted(effect.slice)
        self._dispatch.close(slice_, is_in_turn=is_suspended)
        self._draining[slice_.name] = effect.ticket

    def step(self) -> None:
        """Go on with what became possible."""
        while self._draining or self._vacant or self._targets:
            if not (self._drain() or self._tell_vacant() or self._tell_prepared()):
                return

    def arrive(self, effect: Remapped) -> None:
        """Let a slice stand on its target, with what lay on it."""
        slice_ = self._slices[effect.slice]
        target = self._targets.pop(slice_.name).record
        self._code.remapped(slice_)
        entries = self._buffers.directory.on(slice_.name)
        transfers = self._transfers_of(slice_, target, entries)
        before = self._living(slice_.hosts)
        for host in before:
            exports = tuple(transfers.exports.get(host, ()))
            forgotten = tuple(transfers.forgotten.get(host, ()))
            if exports or forgotten:
                self._leaving[host] = self._leaving.get(host, 0) + 1
                self._outbox.order(host, Leave(slice_.name, exports, forgotten))
            if host not in target.hosts:
                self._outbox.book(host).dropped.append(slice_.name)
        for host in target.hosts:
            expects = tuple(transfers.expects.get(host, ()))
            self._outbox.order(host, RemapSlice(slice_.name, target.name, expects))
        schedulers = self._dispatch.islands.schedulers
        if slice_.order in schedulers:
            schedulers[slice_.order].unplace(slice_.name)
        self._dispatch.num_moves += 1  # or work might begin where the slice was
        slice_.remap(target)
        schedulers[slice_.order].place(slice_.name, slice_.devices_by_host)
        expected = {x.buffer for each in transfers.expects.values() for x in each}
        self._buffers.memory.move(slice_, self._resize(slice_, entries), expected)
        # What was to be put comes first, or work would take what is not counted yet.
        self._buffers.reopen(slice_)
        self._dispatch.reopen(slice_)
        where = slice_.island, slice_.platform, slice_.devices
        self._outbox.tell(slice_.client, Moved(slice_.name, *where))
        self._code.arrived(slice_)

    def abandon(self, slice_: SliceRecord) -> None:
        """Give up on what runs on a slice, of which hosts died or must die."""
        self._draining.pop(slice_.name, None)
        self._emptying.pop(slice_.name, None)
        slice_.is_closed, slice_.is_leaving, slice_.is_abandoned = True, False, True
        self._dispatch.close(slice_, is_in_turn=False)
        for host in self._living(slice_.hosts):
            self._outbox.order(host, AbandonSlices((slice_.name,)))

    def left(self, host: int) -> None:
        """Take a host's word that it has sent all it had of a slice."""
        self._leaving[host] -= 1
        if not self._leaving[host]:
            del self._leaving[host]

    def is_sending(self, host: int) -> bool:
        """Whether values are still on their way from a host."""
        return host in self._leaving

    def lose(self, host: int) -> None:
        """Expect nothing from a host any more."""
        self._leaving.pop(host, None)

    def forget(self, name: str) -> None:
        """Give up a target, as the slice goes elsewhere or is gone."""
        found = self._targets.pop(name, None)
        if found is not None:
            self._code.unaim(self._slices[name])
            for host in self._living(found.record.hosts):
                self._outbox.book(host).dropped.append(found.record.name)

    def stop(self, name: str) -> None:
        """Forget a slice that is gone."""
        self.forget(name)
        self._code.forget(name)
        self._draining.pop(name, None)
        self._emptying.pop(name, None)

    def _drain(self) -> bool:
        """Empty the devices of slices on which nothing waits for memory any more."""
        is_drained = self._dispatch.is_drained
        drained = [x for x in self._draining if is_drained(self._slices[x])]
        for name in drained:
            self._emptying[name] = self._draining.pop(name)
            self._buffers.memory.hold(self._slices[name])
        return bool(drained)

    def _tell_vacant(self) -> bool:
        vacant, self._vacant[:] = list(self._vacant), []
        for name in vacant:
            ticket = self._emptying.pop(name, None)
            if ticket is None:
                continue
            self._follow(self._manager.vacated(name, ticket))
            slice_ = self._slices[name]
            if slice_.is_leaving:  # it stays where it is, without devices
                slice_.is_leaving = False
                self._dispatch.reopen(slice_)
        return bool(vacant)

    def _tell_prepared(self) -> bool:
        ready = [
            (name, each.ticket)
            for name, each in self._targets.items()
            if self._code.is_ready(each.record) and not self._is_used(name)
        ]
        effects = [e for each in ready for e in self._manager.prepared(*each)]
        self._follow(effects)
        return bool(effects)

    def _is_used(self, name: str) -> bool:
        """Whether what was cut off still counts in the scheduler, where it ends soon."""
        slice_ = self._slices[name]
        scheduler = self._dispatch.islands.schedulers.get(slice_.order)
        return slice_.is_abandoned and scheduler is not None and scheduler.is_used(name)

    def _transfers_of(
        self, slice_: SliceRecord, target: SliceRecord, entries: Iterable[Entry]
    ) -> _Transfers:
        """Say of each buffer which host sends what of it to which other."""
        transfers = _Transfers()
        living = self._living(slice_.hosts)
        for entry in entries:
            buffer = entry.buffer
            _, is_on_host = self._buffers.memory.ledger.where(buffer.number)
            if entry.state is not BufferState.READY or not is_on_host:
                for host in living:  # and with it what was asked of it
                    transfers.forgotten.setdefault(host, []).append(buffer.number)
                continue
            self._add_transfers(buffer, slice_, target, transfers)
        return transfers

    def _add_transfers(
        self,
        buffer: Buffer,
        slice_: SliceRecord,
        target: SliceRecord,
        transfers: _Transfers,
    ) -> None:
        living = self._living(slice_.hosts)
        held = slice_.held(buffer.spec, buffer.type.shape)
        held = [each for each in held if each.host in living]
        parts = cover(target.held(buffer.spec, buffer.type.shape), held)
        is_there = all(sender == part.host for sender, part in parts)
        is_there = is_there and set(target.hosts) <= set(living)
        # What an abandoned slice has is on devices that it leaves.
        stays = is_there and not slice_.is_abandoned
        for host in living:
            if not (stays and host in target.hosts):
                transfers.forgotten.setdefault(host, []).append(buffer.number)
        if stays:
            return
        boxes: dict[tuple[int, int], list[object]] = {}
        for sender, part in parts:
            boxes.setdefault((sender, part.host), []).append(part.box)
        number = buffer.number
        for (sender, peer), each in boxes.items():
            export = Export(number, buffer.type, peer, number, tuple(each))
            transfers.exports.setdefault(sender, []).append(export)
        for host in target.hosts:
            senders = tuple({sender for sender, peer in boxes if peer == host} - {host})
            expect = Expect(
                number, slice_.name, buffer.type, buffer.spec,
                is_copy=True, senders=senders,
            )  # fmt: skip
            transfers.expects.setdefault(host, []).append(expect)

    def _resize(self, slice_: SliceRecord, entries: Iterable[Entry]) -> list[Buffer]:
        """Say what each buffer takes where its slice stands now."""
        found = []
        for entry in entries:
            of = entry.buffer
            found.append(slice_.new_buffer(of.number, of.type, of.spec, of.label))
            self._buffers.directory.replace(found[-1])
        return found
