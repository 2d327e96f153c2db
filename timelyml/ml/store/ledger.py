"""Device memory as a ledger: who may start, who waits, and what is spilled for whom.

A program is admitted by its peak, on all of its devices at once, and takes nothing more
while it runs. So programs cannot block each other: those that run come to their end, and
what is left behind is results that nobody is using, which go to host memory when a
program needs room and come back when they are used (the paper's section 4.6). What is
larger than the memory fails at once; all else waits, in the order in which it came.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from timelyml.errors import InvariantError, MemoryLimitError
from timelyml.ml.store.accounts import MemoryAccounts
from timelyml.ml.store.values import (
    Admit,
    Buffer,
    Claim,
    Handle,
    Refuse,
    Spill,
    StoreEffect,
    Vacant,
)


@dataclass(slots=True)
class _Live:
    """A buffer that is promised or there.

    Attributes:
        num_users: Admitted programs that read it or make it.
        num_waiting: Programs that wait for memory and will read it or make it.
        is_on_device: Its bytes are counted on its placement.
        is_spilling: Its bytes are about to be freed there.
        has_host_copy: It can be brought back, whatever becomes of the devices.
        is_freed: Nobody can ask for it any more.
    """

    buffer: Buffer
    num_users: int = 0
    num_waiting: int = 0
    is_on_device: bool = False
    is_spilling: bool = False
    has_host_copy: bool = False
    is_freed: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether it could be spilled now."""
        return self.is_on_device and not self.num_users and not self.is_spilling


class Ledger:
    """Bytes used and free on every device, and the programs that wait for some.

    Sizes are per device: of a sharded buffer, the largest shard.
    """

    def __init__(self) -> None:
        self._accounts = MemoryAccounts()
        self._live: dict[Handle, _Live] = {}  # those least recently used come first
        self._running: dict[str, tuple[Claim, frozenset[str]]] = {}  # where it runs
        self._waiting: dict[str, Claim] = {}
        self._held: dict[
            str, bool
        ] = {}  # placements; whether that they are vacant is said

    def add_devices(self, devices: Iterable[str], memory_bytes: int) -> None:
        """Make devices known that all have this much memory."""
        self._accounts.add_devices(devices, memory_bytes)

    def remove_devices(self, devices: Iterable[str]) -> None:
        """Forget devices on which no placement stands any more."""
        self._accounts.remove_devices(devices)

    def place(self, placement: str, devices: Iterable[str]) -> None:
        """Name a set of devices, usually a virtual slice."""
        self._accounts.place(placement, devices)

    def unplace(self, placement: str) -> None:
        """Forget a set of devices on which nothing lives.

        Raises:
            InvariantError: Buffers are there.
        """
        holders = [live.buffer.name for live in self._of(placement)]
        if holders:
            raise InvariantError(
                f"placement {placement!r} cannot be forgotten; got buffers "
                f"{holders[:5]} on it; expected none"
            )
        self._held.pop(placement, None)
        self._accounts.unplace(placement)

    def hold(self, placement: str) -> list[StoreEffect]:
        """Admit nothing more on a placement and spill what is there, before it moves.

        `Vacant` follows when nothing runs or is left there.
        """
        self._held[placement] = False
        return self._evict()

    def move(self, placement: str, devices: Iterable[str]) -> list[StoreEffect]:
        """Put a placement elsewhere, of which nothing is on devices, and go on there.

        Raises:
            InvariantError: Something is left on its devices.
        """
        if not self._is_vacant(placement):
            raise InvariantError(
                f"placement {placement!r} cannot move; got buffers or programs on its "
                f"devices; expected none; hold it and wait until it is vacant"
            )
        self._accounts.unplace(placement)
        self._accounts.place(placement, devices)
        self._held.pop(placement, None)
        return self._serve()

    def lose(self, placement: str) -> list[Handle]:
        """Take note that the devices of a placement died; return what went with them.

        Programs on it are over as if they had failed, and it is held until it moves.
        """
        self._held[placement] = True
        for program, (_, placements) in list(self._running.items()):
            if placement in placements:
                self._end(program, has_failed=True)
        lost = []
        for live in self._of(placement):
            live.is_spilling = False
            if live.is_on_device:
                self._leave_devices(live)
                if not live.has_host_copy:
                    lost.append(live.buffer.handle)
                    del self._live[live.buffer.handle]
        return lost

    def request(self, claim: Claim) -> list[StoreEffect]:
        """Ask for the memory of a program: it is admitted, waits, or is refused.

        What it makes is known from now on to programs that come after it.
        """
        if error := self._impossible(claim):
            return [Refuse(claim.client, claim.program, error)]
        self._waiting[claim.program] = claim
        for output in claim.outputs:
            self._live[output.handle] = _Live(output)
        self._count_waiting(claim, 1)
        return self._serve()

    def withdraw(self, program: str) -> list[StoreEffect]:
        """Forget a program that still waits, with what it would have made."""
        claim = self._waiting.pop(program, None)
        if claim is None:
            return []
        self._count_waiting(claim, -1)
        for output in claim.outputs:
            self._forget(output.handle)
        for handle in claim.arguments:
            self._forget_if_over(handle)
        return self._serve()

    def finished(self, program: str, *, has_failed: bool = False) -> list[StoreEffect]:
        """Take note that a program is over; what it made is idle from now on.

        What a failed one should have made is not there.
        """
        self._end(program, has_failed)
        return self._serve()

    def spilled(self, handle: Handle) -> list[StoreEffect]:
        """Take note that a buffer is in host memory, and no longer on its devices."""
        live = self._live.get(handle)
        if live is None or not live.is_spilling:
            return []
        live.is_spilling, live.has_host_copy = False, True
        self._leave_devices(live)
        return self._serve()

    def free(self, handle: Handle) -> list[StoreEffect]:
        """Let a buffer go that nobody can ask for any more, once no program uses it."""
        live = self._live.get(handle)
        if live is None:
            return []
        live.is_freed = True
        self._forget_if_over(handle)
        return self._serve()

    def used_bytes(self) -> dict[str, int]:
        """Return what is taken on each device."""
        return self._accounts.used_bytes()

    def waiting(self) -> dict[str, str]:
        """Say of each program that waits what for."""
        return {
            program: f"memory on {', '.join(sorted(self._needs(claim)))}"
            for program, claim in self._waiting.items()
        }

    def _serve(self) -> list[StoreEffect]:
        """Admit what fits, first come first served on every device."""
        effects = self._evict() if self._held else []
        blocked: set[int] = set()  # groups that an earlier program waits for
        for program, claim in list(self._waiting.items()):
            if len(blocked) == len(self._accounts):
                break
            by_placement = self._needs(claim)
            needs = self._accounts.by_group(by_placement)
            is_first = (
                blocked.isdisjoint(needs) and not self._held.keys() & by_placement
            )
            is_settled = not any(self._is_spilling(each) for each in claim.arguments)
            if is_first and is_settled and not self._accounts.shortage(needs):
                del self._waiting[program]
                effects.append(self._admit(claim))
                continue
            if is_first:
                effects += self._make_room(claim, self._accounts.shortage(needs))
            blocked.update(needs)
        return effects

    def _needs(self, claim: Claim) -> dict[str, int]:
        """Return by placement what a program takes beyond what is there already."""
        needs = dict(claim.scratch_bytes)
        for output in claim.outputs:
            needs[output.placement] = needs.get(output.placement, 0) + output.size_bytes
        for handle in claim.arguments:
            live = self._live.get(handle)
            if live is None:
                continue  # it was lost or never came, and the program will hear of it
            size = live.buffer.size_bytes
            is_taken_over = handle in claim.donated
            missing = (0 if live.is_on_device else size) - (
                size if is_taken_over else 0
            )
            placement = live.buffer.placement
            needs[placement] = needs.get(placement, 0) + missing
        return needs

    def _admit(self, claim: Claim) -> Admit:
        placements = frozenset(self._needs(claim))
        self._count_waiting(claim, -1)
        returns = []
        for handle in claim.arguments:
            live = self._live.pop(handle, None)
            if live is None:
                continue
            self._live[handle] = live  # the most recently used one
            live.num_users += 1
            if not live.is_on_device:
                returns.append(handle)
                self._enter_devices(live)
        for handle in claim.donated:
            if handle in self._live:
                self._forget(handle)
        for output in claim.outputs:
            live = self._live[output.handle]
            live.num_users += 1
            self._enter_devices(live)
        for placement, size in claim.scratch_bytes.items():
            self._accounts.add(placement, size)
        self._running[claim.program] = claim, placements
        return Admit(claim.client, claim.program, tuple(returns))

    def _end(self, program: str, has_failed: bool) -> None:
        claim, _ = self._running.pop(program, (None, None))
        if claim is None:
            return
        for placement, size in claim.scratch_bytes.items():
            self._accounts.add(placement, -size)
        made = [output.handle for output in claim.outputs]
        for handle in (*claim.arguments, *made):
            live = self._live.get(handle)
            if live is not None:
                live.num_users -= 1
                live.is_freed = live.is_freed or (has_failed and handle in made)
                self._forget_if_over(handle)

    def _make_room(self, claim: Claim, short: dict[int, int]) -> list[StoreEffect]:
        """Spill idle buffers, those least recently used first, until a claim would fit."""
        others = [
            live
            for handle, live in self._live.items()
            if handle not in claim.arguments and (live.is_idle or live.is_spilling)
        ]
        for live in others:
            if live.is_spilling:
                self._cover(short, live)
        effects: list[StoreEffect] = []
        for live in others:
            if short and live.is_idle and self._cover(short, live):
                live.is_spilling = True
                effects.append(Spill(live.buffer.handle, live.buffer.placement))
        return effects

    def _cover(self, short: dict[int, int], live: _Live) -> bool:
        """Count what a buffer will leave behind; False if nothing where it is short."""
        groups = self._accounts.groups_of(live.buffer.placement)
        helped = [group for group in groups if group in short]
        for group in helped:
            short[group] -= live.buffer.size_bytes
            if short[group] <= 0:
                del short[group]
        return bool(helped)

    def _evict(self) -> list[StoreEffect]:
        """Spill what is idle on placements that are held."""
        effects: list[StoreEffect] = []
        for placement, is_said in sorted(self._held.items()):
            for live in self._of(placement):
                if live.is_idle:
                    live.is_spilling = True
                    effects.append(Spill(live.buffer.handle, placement))
            if not is_said and self._is_vacant(placement):
                self._held[placement] = True
                effects.append(Vacant(placement))
        return effects

    def _is_vacant(self, placement: str) -> bool:
        is_bare = not any(live.is_on_device for live in self._of(placement))
        return is_bare and not any(
            placement in placements for _, placements in self._running.values()
        )

    def _impossible(self, claim: Claim) -> MemoryLimitError | None:
        """Say why a program could not even run alone, if so."""
        kept = [
            self._live[handle].buffer
            for handle in claim.arguments
            if handle not in claim.donated and handle in self._live
        ]
        whole: Mapping[str, int] = dict(claim.scratch_bytes)
        for each in (*kept, *claim.outputs):
            whole = {
                **whole,
                each.placement: whole.get(each.placement, 0) + each.size_bytes,
            }
        for placement in whole:
            needed, room = self._accounts.tightest(placement, whole)
            if needed > room:
                holders = [each.name for each in kept if each.placement == placement]
                return _too_large(claim, placement, needed, room, holders)
        return None

    def _of(self, placement: str) -> list[_Live]:
        return [
            live for live in self._live.values() if live.buffer.placement == placement
        ]

    def _count_waiting(self, claim: Claim, change: int) -> None:
        for handle in (*claim.arguments, *(each.handle for each in claim.outputs)):
            if live := self._live.get(handle):
                live.num_waiting += change

    def _is_spilling(self, handle: Handle) -> bool:
        live = self._live.get(handle)
        return live is not None and live.is_spilling

    def _forget_if_over(self, handle: Handle) -> None:
        live = self._live.get(handle)
        if live and live.is_freed and not live.num_users and not live.num_waiting:
            self._forget(handle)

    def _forget(self, handle: Handle) -> None:
        live = self._live.pop(handle, None)
        if live is not None:
            self._leave_devices(live)

    def _enter_devices(self, live: _Live) -> None:
        live.is_on_device = True
        self._accounts.add(live.buffer.placement, live.buffer.size_bytes)

    def _leave_devices(self, live: _Live) -> None:
        if live.is_on_device:
            live.is_on_device = False
            self._accounts.add(live.buffer.placement, -live.buffer.size_bytes)


def _too_large(
    claim: Claim, placement: str, needed: int, room: int, holders: list[str]
) -> MemoryLimitError:
    return MemoryLimitError(
        f"program {claim.program!r} can never fit; got {needed:,} bytes per device on "
        f"{placement!r}, of which arguments are {holders[:5]}; expected at most "
        f"{room:,}; use more devices, smaller shards, or donate arguments",
        program=claim.program,
        placement=placement,
        needed_bytes=needed,
        limit_bytes=room,
        holders=holders,
    )
