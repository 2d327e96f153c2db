"""Slices on which nothing may begin for now, and the work that may pass all the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from timelyml.ml.controller.records import SliceRecord
from timelyml.ml.controller.work import Work


class Barriers:
    """Keeps work from beginning on slices that move or have no devices.

    Args:
        slices: All slices.
        held: Buffers that are to be put on such slices, and are not there yet.
    """

    def __init__(
        self, slices: Mapping[str, SliceRecord], held: Collection[int]
    ) -> None:
        self._slices = slices
        self._held = held
        self._passing: dict[str, set[str]] = {}  # by slice that is closed

    def close(self, slice_: SliceRecord, before: Iterable[Work]) -> None:
        """Close a slice to all but `before`, as far as that waits for no other slice.

        Args:
            slice_: One that moves, or has no devices.
            before: Work that may still begin, in the order in which it came.
        """
        passing = self._passing[slice_.name] = set()
        barred: set[str] = set()
        for work in before:
            if work.is_claimed:
                continue
            names = self.of(work)
            needed = {each.program for each in work.before}
            # Work in parts has no end that could be waited for; its parts are there too.
            is_whole = not work.has_parts
            if is_whole and names <= {slice_.name} and barred.isdisjoint(needed):
                passing.update([work.program] if names else [])
            else:
                barred.add(work.program)

    def reopen(self, slice_: SliceRecord) -> None:
        """Let work begin on a slice, unless it is still closed to all but readers."""
        if not slice_.is_closed:
            self._passing.pop(slice_.name, None)

    def of(self, work: Work) -> set[str]:
        """Return the slices that keep work from beginning."""
        if not self._passing:
            return set()
        found = {name for name in work.slices if self._slices[name].is_closed}
        for entry, is_placed in zip(work.args, work.is_placed, strict=True):
            slice_ = self._slices[entry.buffer.placement]
            is_closed = slice_.is_closed if is_placed else slice_.is_leaving
            if is_closed or entry.buffer.number in self._held:
                found.add(slice_.name)
        return {x for x in found if work.program not in self._passing.get(x, ())}

    def passed(self, work: Work) -> None:
        """Take note that work has begun, or will not."""
        for passing in self._passing.values():
            passing.discard(work.program)

    def is_passing(self, slice_: SliceRecord) -> bool:
        """Whether work that may still begin on a closed slice has not yet."""
        return bool(self._passing.get(slice_.name))
