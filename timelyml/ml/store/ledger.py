"""Device memory as a ledger: who may start, who waits, and what is spilled for whom.

A program is admitted by its peak, on all of its devices at once, and takes nothing more
while it runs. So programs cannot block each other: those that run come to their end, and
what is left behind is results that nobody is using, which go to host memory when a
program needs room and come back when they are used (the paper's section 4.6). What is
larger than the memory fails at once; all else waits, in the order in which it came.

Host memory is finite too. Where nothing runs that could leave room, and what lies idle
has no room on the host, the program at the head of the line fails: only the clients
could free anything, and they may be waiting for just that program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from timelyml.errors import InvariantError, MemoryLimitError
from timelyml.ml.store.gauges import Label
from timelyml.ml.store.live import LiveBuffers
from timelyml.ml.store.refusals import no_room_on_hosts, too_large
from timelyml.ml.store.room import make_room
from timelyml.ml.store.values import (
    Admit,
    Buffer,
    Claim,
    LedgerEffect,
    Refuse,
    Spill,
    Vacant,
)
from timelyml.progress import new_tuple


class _Placed(NamedTuple):
    """A claim, and all placements that it has to do with."""

    claim: Claim
    placements: frozenset[str]


class Ledger:
    """Bytes used and free on every device and host, and the programs that wait for some.

    Sizes are per device, or host: of a sharded buffer, the largest part.

    Args:
        describe: Says for people which buffer this is, and whose.
    """

    def __init__(self, describe: Callable[[Buffer], str] = str) -> None:
        self._describe = describe
        self._live = LiveBuffers()
        self._running: dict[str, _Placed] = {}
        self._waiting: dict[str, _Placed] = {}
        self._scratch: dict[str, int] = {}  # of all that runs, by placement
        self._held: dict[str, bool] = {}  # whether that it is vacant is said
        self._reserved: dict[str, int] = {}  # of each device, by placement

    def add_devices(self, devices: Iterable[str], memory_bytes: int) -> None:
        """Make devices known that all have this much memory."""
        self._live.devices.add_devices(devices, memory_bytes)

    def add_hosts(self, hosts: Iterable[str], memory_bytes: int | None) -> None:
        """Make hosts known that have so much memory for what is spilled; None: any."""
        self._live.add_hosts(hosts, memory_bytes)

    def place(
        self,
        placement: str,
        devices: Iterable[str],
        hosts: Iterable[str],
        *,
        reserved_bytes: int = 0,
    ) -> None:
        """Name a set of devices, usually a virtual slice, and the hosts that have them.

        What it reserves of each device, others cannot have, whether it is used or not.
        """
        self._live.devices.place(placement, devices)
        self._live.hosts.place(placement, hosts)
        if reserved_bytes:
            self._reserved[placement] = reserved_bytes
            self._live.devices.reserve(placement, reserved_bytes)

    def unplace(self, placement: str) -> list[LedgerEffect]:
        """Forget a set of devices on which nothing lives; what it reserved is free.

        Raises:
            InvariantError: Buffers are there.
        """
        holders = [str(live.buffer) for live in self._live.on(placement)]
        if holders:
            raise InvariantError(
                f"placement {placement!r} cannot be forgotten; got buffers "
                f"{holders[:5]} on it; expected none"
            )
        self._held.pop(placement, None)
        self._scratch.pop(placement, None)
        self._live.devices.unplace(placement)
        self._live.hosts.unplace(placement)
        return [] if self._reserved.pop(placement, None) is None else self._serve()

    def hold(self, placement: str) -> list[LedgerEffect]:
        """Admit nothing more on a placement and spill what is there, before it moves.

        `Vacant` follows when nothing runs or is left there. What hosts may keep does not
        count here, or a move would wait for memory that nobody has to free. Nothing is
        reserved for it here any more.
        """
        self._held[placement] = False
        if placement not in self._reserved:
            return self._evict()
        self._live.devices.reserve(placement, 0)
        return self._serve()

    def move(
        self,
        placement: str,
        devices: Iterable[str],
        hosts: Iterable[str],
        buffers: Iterable[Buffer] = (),
        arriving: Collection[int] = (),
    ) -> list[LedgerEffect]:
        """Put a placement on other devices, with nothing of it on any.

        What its hosts have of it counts at the new ones, where it is `buffers`; those
        `arriving` are on their way, and there once they are `spilled`.
        """
        if not self._is_vacant(placement):
            raise InvariantError(
                f"placement {placement!r} cannot move; got buffers or programs on its "
                f"devices; expected none; hold it and wait until it is vacant"
            )
        self._live.put_elsewhere(placement, devices, hosts)
        for buffer in buffers:
            self._live.replace(buffer, is_arriving=buffer.number in arriving)
        self._held.pop(placement, None)
        if placement in self._reserved:
            self._live.devices.reserve(placement, self._reserved[placement])
        return self._serve()

    def lose(self, placement: str, kept: Collection[int] = ()) -> list[int]:
        """Take note that hosts of a placement died; return what went with them.

        Programs have nothing there any more, and it is held until it moves; what is
        `kept` is in the memory of others of its hosts.
        """
        self._held[placement] = True
        if placement in self._reserved:
            self._live.devices.reserve(placement, 0)
        for program, (claim, placements) in list(self._running.items()):
            if placement in placements:
                self._count_scratch(claim, -1)
                left = claim.without(placement)
                self._count_scratch(left, 1)
                self._running[program] = _Placed(left, placements - {placement})
        lost = [
            live.buffer.number
            for live in self._live.on(placement)
            if live.is_on_device or live.is_on_host
        ]
        for number in lost:
            self._live.lose(number, is_kept=number in kept)
        return lost

    def request(self, claim: Claim) -> list[LedgerEffect]:
        """Ask for the memory of a program: it is admitted, waits, or is refused.

        What it makes is known from now on to programs that come after it.
        """
        needs = self._live.needs_of(claim)
        fits = not (self._waiting or self._held or self._live.devices.shortage(needs))
        fits = fits and self._live.are_settled(claim.arguments)
        if not fits and (error := self._impossible(claim)):
            return [Refuse(claim.program, error)]
        self._live.promise(claim.outputs)
        if fits:
            return self._admit(claim, frozenset(needs))
        self._waiting[claim.program] = _Placed(claim, frozenset(needs))
        self._count_waiting(claim, 1)
        return self._serve()

    def withdraw(self, program: str) -> list[LedgerEffect]:
        """Forget a program that still waits, with what it would have made."""
        if program not in self._waiting:
            return []
        self._drop(program)
        return self._serve()

    def finished(self, program: str, *, has_failed: bool = False) -> list[LedgerEffect]:
        """Take note that a program is over; what it made is idle from now on.

        What a failed one should have made is not there.
        """
        self._end(program, has_failed)
        return self._serve()

    def spilled(self, number: int) -> list[LedgerEffect]:
        """Take note that a buffer is in host memory, and no longer on its devices."""
        live = self._live.get(number)
        if live is None or not live.is_spilling:
            return []
        self._live.spilled(live)
        return self._serve()

    def free(self, numbers: Iterable[int]) -> list[LedgerEffect]:
        """Let buffers go that nobody can ask for any more, once no program uses them."""
        self._live.forget(self._live.free(numbers))
        return self._serve()

    def count(self, number: int, label: Label) -> None:
        """Have a gauge count a buffer while it is on devices, until it is freed."""
        self._live.count(number, label)

    def where(self, number: int) -> tuple[bool, bool]:
        """Return whether a buffer takes memory on devices, and on hosts."""
        live = self._live.get(number)
        return (False, False) if live is None else (live.is_on_device, live.is_on_host)

    def used_bytes(self) -> dict[str, int]:
        """Return what is taken on each device."""
        return self._live.devices.used_bytes()

    def host_bytes(self) -> dict[str, int]:
        """Return what is taken on each host by what is spilled."""
        return self._live.hosts.used_bytes()

    def waiting(self) -> dict[str, str]:
        """Say of each program that waits what for."""
        return {
            program: f"memory on {', '.join(sorted(placed.placements))}"
            for program, placed in self._waiting.items()
        }

    def waiting_on(self, placement: str) -> list[str]:
        """Return the programs that wait and have to do with a placement."""
        return [x for x, of in self._waiting.items() if placement in of.placements]

    def _serve(self) -> list[LedgerEffect]:
        """Admit what fits, first come first served on every device."""
        effects = self._evict() if self._held else []
        if not self._waiting:
            return effects
        devices = self._live.devices
        blocked: set[int] = set()  # groups that an earlier program waits for
        passed: set[str] = set()  # placements of earlier programs that wait
        for program, (claim, placements) in list(self._waiting.items()):
            if len(blocked) == len(devices) and not devices.has_reserved:
                break
            groups = self._groups(placements)
            needs = self._live.needs_of(claim) if devices.has_reserved else {}
            # What is reserved is kept from those before, too: they lose nothing by it.
            may_pass = passed.isdisjoint(placements) and devices.is_reserved(needs)
            is_blocked = not (may_pass or blocked.isdisjoint(groups))
            if is_blocked or self._held.keys() & placements:
                blocked.update(groups)
                passed |= placements
                continue
            short = devices.shortage(needs or self._live.needs_of(claim))
            if not short and self._live.are_settled(claim.arguments):
                del self._waiting[program]
                self._count_waiting(claim, -1)
                effects += self._admit(claim, placements)
                continue
            error = self._impossible(claim) if devices.has_reserved else None
            if short and error is None:
                more, error = self._make_room(claim, short)
                effects += more
            if error is not None:
                self._drop(program)
                effects.append(Refuse(program, error))
                continue
            blocked.update(groups)
            passed |= placements
        return effects

    def _make_room(
        self, claim: Claim, short: dict[int, int]
    ) -> tuple[Sequence[LedgerEffect], MemoryLimitError | None]:
        """Spill for a claim; return what, and why it has to fail if nothing helps it."""
        running = [each.placements for each in self._running.values()]
        effects, may_wait = make_room(self._live, claim, short, self._scratch, running)
        if may_wait:
            return effects, None
        named = [self._describe(each) for each in self._live.keepers(short)]
        return effects, no_room_on_hosts(claim, max(short.values()), named)

    def _groups(self, placements: Iterable[str]) -> set[int]:
        return {x for each in placements for x in self._live.devices.groups_of(each)}

    def _admit(self, claim: Claim, placements: frozenset[str]) -> list[LedgerEffect]:
        returns = self._live.take(claim)
        self._live.forget(claim.donated)
        self._live.make(claim)
        self._count_scratch(claim, 1)
        self._running[claim.program] = new_tuple(_Placed, (claim, placements))
        return [new_tuple(Admit, (claim.program, tuple(returns)))]

    def _end(self, program: str, has_failed: bool) -> None:
        placed = self._running.pop(program, None)
        if placed is None:
            return
        claim = placed.claim
        self._count_scratch(claim, -1)
        self._live.forget(self._live.leave(claim.arguments))
        made = [each.number for each in claim.outputs]
        # Of what failed, whoever waits to read it will hear.
        self._live.forget(made if has_failed else self._live.made(made))

    def _drop(self, program: str) -> None:
        claim = self._waiting.pop(program).claim
        self._count_waiting(claim, -1)
        self._live.forget([each.number for each in claim.outputs])
        self._live.forget(self._live.over(claim.arguments))

    def _evict(self) -> list[LedgerEffect]:
        """Spill what is idle on placements that are held."""
        effects: list[LedgerEffect] = []
        for placement, is_said in sorted(self._held.items()):
            effects += [
                Spill(live.buffer)
                for live in self._live.on(placement)
                if live.is_idle and self._live.spill(live, is_forced=True)
            ]
            if not is_said and self._is_vacant(placement):
                self._held[placement] = True
                effects.append(Vacant(placement))
        return effects

    def _is_vacant(self, placement: str) -> bool:
        is_used = any(placement in each.placements for each in self._running.values())
        there = self._live.on(placement)
        return not is_used and not any(x.is_on_device or x.is_spilling for x in there)

    def _impossible(self, claim: Claim) -> MemoryLimitError | None:
        """Say why a program could not even run alone, if so."""
        kept = self._live.kept_by(claim)
        whole = dict(claim.scratch_bytes)
        for each in (*kept, *claim.outputs):
            whole[each.placement] = whole.get(each.placement, 0) + each.size_bytes
        for placement in whole:
            needed, room = self._live.devices.tightest(placement, whole)
            if needed > room:
                named = [self._describe(e) for e in kept if e.placement == placement]
                return too_large(
                    claim,
                    placement,
                    needed,
                    room,
                    arguments=named,
                    reserved=self._live.devices.reserved_beside(placement),
                )
        return None

    def _count_scratch(self, claim: Claim, sign: int) -> None:
        for placement, size in claim.scratch_bytes.items():
            if size:
                self._live.devices.add(placement, sign * size)
                self._scratch[placement] = self._scratch.get(placement, 0) + sign * size

    def _count_waiting(self, claim: Claim, change: int) -> None:
        for number in (*claim.arguments, *(each.number for each in claim.outputs)):
            if live := self._live.get(number):
                live.num_waiting += change
