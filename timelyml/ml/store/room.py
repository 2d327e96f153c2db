"""Room for a program: what is spilled for it, and whether waiting will help at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from timelyml.ml.store.accounts import MemoryAccounts
from timelyml.ml.store.live import LiveBuffers
from timelyml.ml.store.values import Claim, Spill


def make_room(
    live_buffers: LiveBuffers,
    claim: Claim,
    short: dict[int, int],
    scratch: Mapping[str, int],
    running: Iterable[frozenset[str]],
) -> tuple[list[Spill], bool]:
    """Spill idle buffers, those least recently used first, until a claim would fit.

    What those that run take only while they run need not be spilled for: it comes by
    itself.

    Args:
        live_buffers: All of them; what is spilled is counted so.
        claim: For whom.
        short: What is missing by group of devices; what will be there is taken off.
        scratch: What all that runs takes while it runs, by placement.
        running: The placements of each program that runs.

    Returns:
        What to spill, and whether what is missing then may come by itself.
    """
    freed = _FreedMemory(live_buffers.devices, live_buffers.needs_of(claim), short)
    for placement, size in scratch.items():
        freed.take(placement, size)
    others = [
        live
        for live in live_buffers
        if live.buffer.number not in claim.arguments
        and (live.is_idle or live.is_spilling)
    ]
    for live in others:
        if live.is_spilling:
            freed.take(live.buffer.placement, live.buffer.size_bytes)
    spills: list[Spill] = []
    for live in others:
        helps = live.is_idle and freed.helps(live.buffer.placement)
        if helps and live_buffers.spill(live):
            freed.take(live.buffer.placement, live.buffer.size_bytes)
            spills.append(Spill(live.buffer))
    may_wait = not short or any(freed.helps(x) for each in running for x in each)
    return spills, may_wait


class _FreedMemory:
    """Counts what will be free for a claim.

    What a placement has within what it reserves is its own, also when it is empty: only
    a claim within a reservation of its own, which lacks but memory itself, has it then.
    """

    def __init__(
        self, devices: MemoryAccounts, needs: Mapping[str, int], short: dict[int, int]
    ) -> None:
        self._devices = devices
        self._short = short
        is_reserved = devices.is_reserved(needs)
        self._beyond = {} if is_reserved else devices.beyond_reserved(needs)

    def helps(self, placement: str) -> bool:
        """Whether memory that is freed on a placement helps."""
        groups = self._devices.groups_of(placement)
        return self._beyond.get(placement, 1) > 0 and not self._short.keys().isdisjoint(
            groups
        )

    def take(self, placement: str, size_bytes: int) -> None:
        """Count what will be free, where something is missing."""
        if placement in self._beyond:
            size_bytes = min(size_bytes, self._beyond[placement])
            self._beyond[placement] -= size_bytes
        for group in self._devices.groups_of(placement):
            if group in self._short:
                self._short[group] -= size_bytes
                if self._short[group] <= 0:
                    del self._short[group]
