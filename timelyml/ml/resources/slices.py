"""One virtual slice: where it stands, where it goes, and what is awaited on the way.

A move has a fixed order: the target is chosen and reserved, prepared while the slice
runs on, and only then is the source vacated. So a slice stands still for as long as its
buffers take, never for a compilation (the paper's section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from timelyml.ml.resources.requests import SliceRequest, SliceState


@dataclass(slots=True)
class VirtualSlice:
    """A slice that was asked for and not released.

    Attributes:
        devices: Where it stands; empty before its first grant, while it is suspended,
            and after its devices died.
        target: Devices reserved for it to move to; empty if it does not move.
        is_wanted: Whether it is to have devices: not if suspended.
        is_prepared: Whether its functions are compiled for the target.
        is_vacating: Whether its buffers are on their way to host memory.
        prepare_ticket: Of the answer that its target awaits; older ones are late.
        vacate_ticket: Of the answer that its devices await.
        before: Where it stood last.
    """

    request: SliceRequest
    deadline_s: float | None = None
    devices: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    is_granted: bool = False
    is_wanted: bool = True
    is_prepared: bool = False
    is_vacating: bool = False
    prepare_ticket: int = 0
    vacate_ticket: int = 0
    before: tuple[str, ...] = ()

    @property
    def state(self) -> SliceState:
        """Where the slice stands, in a word."""
        if not self.is_granted:
            return SliceState.WAITING
        if self.target or self.is_vacating:
            return SliceState.MOVING
        if self.devices:
            return SliceState.ACTIVE
        return SliceState.DISPLACED if self.is_wanted else SliceState.SUSPENDED

    def stands_on(self, names: set[str]) -> bool:
        """Whether one of these devices is the slice's."""
        return not names.isdisjoint(self.devices)

    def goes_to(self, names: set[str]) -> bool:
        """Whether one of these devices is reserved for it."""
        return not names.isdisjoint(self.target)


class SliceQueue:
    """The slices that want devices, in the order in which they came to want them."""

    def __init__(self) -> None:
        self._slices: list[VirtualSlice] = []

    def __iter__(self) -> Iterator[VirtualSlice]:
        return iter(self._slices)

    def add(self, each: VirtualSlice) -> None:
        """Let a slice wait, if it is to have devices and does not wait already."""
        if each.is_wanted and not self._has(each):
            self._slices.append(each)

    def drop(self, each: VirtualSlice) -> None:
        """Let a slice wait no longer."""
        self._slices = [other for other in self._slices if other is not each]

    def late(self, now_s: float) -> list[VirtualSlice]:
        """Return those that wait for their first devices past their deadline."""
        return [
            each
            for each in self._slices
            if not each.is_granted
            and each.deadline_s is not None
            and each.deadline_s <= now_s
        ]

    def next_deadline(self) -> float | None:
        """When the next one is late, if ever."""
        deadlines = (each.deadline_s for each in self._slices if not each.is_granted)
        return min((due for due in deadlines if due is not None), default=None)

    def _has(self, each: VirtualSlice) -> bool:
        return any(other is each for other in self._slices)
