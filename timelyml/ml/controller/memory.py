"""Memory of devices and hosts: what may begin, what is spilled for it and brought back.

The ledger decides; this carries its word to hosts and to those who asked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from timelyml.ml.controller.outbox import Outbox
from timelyml.ml.controller.records import SliceRecord
from timelyml.ml.controller.turns import InTurn
from timelyml.ml.store import (
    Admit,
    Buffer,
    Claim,
    Ledger,
    LedgerEffect,
    Refuse,
    Spill,
    Vacant,
)
from timelyml.progress import new_tuple
from timelyml.runtime.failure import pack_error


class _Asked(NamedTuple):
    """Somebody who waits for memory."""

    claim: Claim
    begin: Callable[[], None]
    refuse: Callable[[bytes], None]


class Memory:
    """Admits calls by what they take at their peak.

    Args:
        slices: All slices; their names are the placements of claims.
        outbox: Takes orders for hosts.
        describe: Says for people which buffer this is, and whose.

    Attributes:
        on_vacant: Called with the name of a slice that is to move, once nothing is left
            on its devices.
    """

    def __init__(
        self,
        slices: Mapping[str, SliceRecord],
        outbox: Outbox,
        describe: Callable[[Buffer], str],
    ) -> None:
        self.on_vacant: Callable[[str], None] = lambda _: None
        self.ledger = Ledger(describe)
        self._slices = slices
        self._outbox = outbox
        self._asked: dict[str, _Asked] = {}
        self._spilling: dict[int, set[int]] = {}  # hosts that have not said it is done
        self._turns = InTurn()

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._asked)

    def admit(
        self,
        claim: Claim,
        begin: Callable[[], None],
        refuse: Callable[[bytes], None],
    ) -> None:
        """Ask for the memory of a call.

        Args:
            claim: What it takes, on which slices.
            begin: Called once it has all of it, perhaps at once; `release` ends that.
            refuse: Called instead, with a pickled error, if it never can.
        """
        self._asked[claim.program] = new_tuple(_Asked, (claim, begin, refuse))
        self._follow(self.ledger.request(claim))

    def release(self, program: str, *, has_run: bool = True) -> None:
        """Take note that a call that had its memory is over.

        Args:
            program: The call's name.
            has_run: Whether what it was to make is there, be it of any use or not.
        """
        self._follow(self.ledger.finished(program, has_failed=not has_run))

    def hold(self, slice_: SliceRecord) -> None:
        """Bring all that is on a slice to host memory; `on_vacant` follows."""
        self._follow(self.ledger.hold(slice_.name))

    def move(
        self, slice_: SliceRecord, buffers: Iterable[Buffer], arriving: Iterable[int]
    ) -> None:
        """Count what is there of a slice where it stands now, or still on its way."""
        self._spilling.update({number: set(slice_.hosts) for number in arriving})
        where = slice_.device_names, list(map(str, slice_.hosts))
        moved = self.ledger.move(slice_.name, *where, buffers, set(arriving))
        self._follow(moved)

    def unplace(self, slice_: SliceRecord) -> None:
        """Forget a slice on which nothing is; what it reserved is there for others."""
        self._follow(self.ledger.unplace(slice_.name))

    def free(self, numbers: Sequence[int]) -> None:
        """Let buffers go that nobody can ask for."""
        for number in numbers if self._spilling else ():
            self._spilling.pop(number, None)
        self._follow(self.ledger.free(numbers))

    def spilled(self, host: int, numbers: Iterable[int]) -> None:
        """Take a host's word that it has copies of buffers, and nothing on devices."""
        for number in numbers:
            hosts_left = self._spilling.get(number)
            if hosts_left is None:
                continue  # it was let go in the meantime
            hosts_left.discard(host)
            if not hosts_left:
                del self._spilling[number]
                self._follow(self.ledger.spilled(number))

    def leave(self, client: int, error: bytes) -> None:
        """Refuse all that a client that is gone waits for."""
        mine = [p for p, asked in self._asked.items() if asked.claim.client == client]
        self._refuse(mine, error)

    def lose(self, slice_: SliceRecord, kept: Collection[int], error: bytes) -> None:
        """Count nothing on a slice that lost hosts but what is kept; refuse who waits."""
        for number in self.ledger.lose(slice_.name, kept):
            self._spilling.pop(number, None)
        self._refuse(self.ledger.waiting_on(slice_.name), error)

    def _refuse(self, programs: Iterable[str], error: bytes) -> None:
        refused = {program: self._asked.pop(program) for program in programs}
        # One of them may be admitted because another is withdrawn.
        effects = [e for program in refused for e in self.ledger.withdraw(program)]
        for asked in refused.values():
            asked.refuse(error)
        self._follow(effects)

    def _follow(self, effects: Iterable[LedgerEffect]) -> None:
        self._turns.do(self._do, effects)

    def _do(self, effect: LedgerEffect) -> None:
        """Do what the ledger decided."""
        match effect:
            case Admit():
                for buffer in effect.returns:
                    for host in self._slices[buffer.placement].hosts:
                        self._outbox.book(host).returns.append(buffer.number)
                asked = self._asked.pop(effect.program, None)
                if asked is not None:
                    asked.begin()
                else:  # refused in the meantime
                    self.release(effect.program, has_run=False)
            case Refuse():
                asked = self._asked.pop(effect.program, None)
                if asked is not None:
                    asked.refuse(pack_error(effect.error))
            case Vacant():
                self.on_vacant(effect.placement)
            case Spill():
                number = effect.buffer.number
                if not self.ledger.where(number)[0]:
                    return  # let go or lost in the meantime, perhaps with its slice
                hosts = self._slices[effect.buffer.placement].hosts
                self._spilling[number] = set(hosts)
                for host in hosts:
                    self._outbox.book(host).spills.append(number)
