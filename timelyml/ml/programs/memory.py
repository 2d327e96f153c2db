"""The memory that a program takes at its peak, on each device of its slices."""

from __future__ import annotations

import math
from collections.abc import Callable

from timelyml.ml.functions import Computation, MemoryNeeds
from timelyml.ml.programs.lowered import (
    Launch,
    LoweredProgram,
    Put,
    Receive,
    Release,
    Slot,
)


def scratch_bytes(
    lowered: LoweredProgram, needs_of: Callable[[Computation], MemoryNeeds]
) -> dict[str, int]:
    """Return what a program takes beyond its results, by slice, on each device.

    Donated arguments are the program's own from the start, those that it leaves alone
    are not counted. Instructions are taken one after the other: a value is there from
    the instruction that makes it to the one that releases it.

    Args:
        lowered: The program.
        needs_of: What XLA says of each computation once it is compiled.
    """
    peaks = _Peaks(lowered)
    for instruction in lowered.instructions:
        match instruction:
            case Put():
                peaks.make(instruction.target)
            case Receive():
                peaks.make(lowered.moves[instruction.move].target)
            case Launch():
                computation = lowered.computations[instruction.computation]
                peaks.launch(instruction, needs_of(computation))
            case Release():
                peaks.drop(instruction.slots)
    return peaks.beyond_results()


class _Peaks:
    """Bytes on each device of every slice, now and at most."""

    def __init__(self, lowered: LoweredProgram) -> None:
        self._lowered = lowered
        self._sizes = dict(enumerate(map(self._size, range(len(lowered.values)))))
        self._now = dict.fromkeys(lowered.places, 0)
        self._peak = dict(self._now)
        for position in lowered.donated_args:
            self.make(lowered.args[position])

    def make(self, slot: Slot) -> None:
        """Count a value that is there from now on."""
        slice_name = str(self._lowered.values[slot].slice)
        self._now[slice_name] += self._sizes[slot]
        self._reach(slice_name, 0)

    def launch(self, instruction: Launch, needs: MemoryNeeds) -> None:
        """Count a computation while it runs, and what it leaves."""
        self._reach(instruction.slice, needs.new_bytes)
        donated, outputs = instruction.donated, instruction.outputs
        change = sum(map(self._sizes.__getitem__, outputs))
        change -= sum(map(self._sizes.__getitem__, donated))
        self._now[instruction.slice] += change
        self._reach(instruction.slice, 0)

    def drop(self, slots: tuple[Slot, ...]) -> None:
        """Count values no longer."""
        for slot in slots:
            self._now[str(self._lowered.values[slot].slice)] -= self._sizes[slot]

    def beyond_results(self) -> dict[str, int]:
        """Return the peaks without the results, which are counted for themselves."""
        found = dict(self._peak)
        for slot in set(self._lowered.results) - set(self._lowered.args):
            slice_name = self._lowered.values[slot].slice
            if slice_name is not None:
                found[slice_name] = max(0, found[slice_name] - self._sizes[slot])
        return found

    def _reach(self, slice_name: str, more: int) -> None:
        reached = self._now[slice_name] + more
        self._peak[slice_name] = max(self._peak[slice_name], reached)

    def _size(self, slot: Slot) -> int:
        value = self._lowered.values[slot]
        if value.slice is None:
            return 0
        return value.type.size_bytes // math.prod(self._lowered.layout(slot).counts)
