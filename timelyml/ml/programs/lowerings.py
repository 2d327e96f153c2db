"""Lowered programs, kept by the places of their slices, and by what they have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from timelyml.ml.programs.ir import Program
from timelyml.ml.programs.lowered import LoweredProgram
from timelyml.ml.programs.lowering import identity_of, lower
from timelyml.ml.programs.passes import place
from timelyml.ml.programs.places import Place
from timelyml.ml.programs.relabelling import relabelled
from timelyml.ml.scheduling import Dispatch


class Lower(Protocol):
    """Lowers a program, as `lower` does."""

    def __call__(
        self, program: Program, places: Mapping[str, Place], /, *, dispatch: Dispatch
    ) -> LoweredProgram:
        """Lower a program for the places of its slices."""


class Lowerings:
    """Lowered programs, kept while their slices stay where they are.

    The oldest goes when there are too many. One that was lowered before on any slices of
    the same meshes, or elsewhere, as for a program traced for another slice or one that
    moved, gets other names and places; what is compiled is found by its logical mesh.

    Args:
        make: Lowers a program that is not kept.
    """

    def __init__(self, max_kept: int = 1024, make: Lower = lower) -> None:
        self._max_kept = max_kept
        self._make = make
        self._kept: dict[Any, LoweredProgram] = {}
        self._patterns: dict[Any, LoweredProgram] = {}
        self.num_lowered = 0
        """How often a program was lowered of which there was no like."""

    def __len__(self) -> int:
        return len(self._kept)

    def lower(
        self,
        program: Program,
        places: Mapping[str, Place],
        dispatch: Dispatch = Dispatch.PARALLEL,
    ) -> LoweredProgram:
        """Lower a program, unless that was done for the same places.

        Raises:
            PlacementError: As `lower`.
        """
        names = [each.name for each in program.slices if each.name in places]
        key = program.identity, dispatch, tuple(places[name] for name in names)
        found = self._kept.pop(key, None)
        if found is None:
            found = self._anew(program, places, dispatch)
        self._kept[key] = found
        if len(self._kept) > self._max_kept:
            del self._kept[next(iter(self._kept))]
        return found

    def _anew(
        self, program: Program, places: Mapping[str, Place], dispatch: Dispatch
    ) -> LoweredProgram:
        """Lower a program, or have one of the same pattern stand on its slices."""
        placed = place(program, places)
        islands = [
            each.place.island for each in placed.slices if each.place is not None
        ]
        # Which of its slices share an island is all that passes ask of places.
        key = program.pattern, dispatch, tuple(map(islands.index, islands))
        like = self._patterns.pop(key, None)
        if like is None:
            self.num_lowered += 1
            found = like = self._make(program, places, dispatch=dispatch)
        else:
            identity = identity_of(program.identity, placed.slices, dispatch)
            found = relabelled(
                like, placed.slices, identity=identity, dispatch=dispatch
            )
        self._patterns[key] = like
        if len(self._patterns) > self._max_kept:
            del self._patterns[next(iter(self._patterns))]
        return found

    def forget(self, slice_name: str) -> None:
        """Drop the programs that use a slice which is gone."""
        self._kept = {
            key: found
            for key, found in self._kept.items()
            if slice_name not in found.places
        }
