"""A lowered program for other slices of the same meshes: new names and places, no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from timelyml.ml.programs.lowered import Launch, LoweredProgram
from timelyml.ml.programs.places import Place, SliceNode
from timelyml.ml.scheduling import Dispatch, SpreadGraph


def relabelled(
    lowered: LoweredProgram,
    slices: Sequence[SliceNode],
    *,
    identity: str,
    dispatch: Dispatch,
) -> LoweredProgram:
    """Return what a program of the same pattern is lowered to on its own slices.

    Args:
        lowered: A program as it was lowered.
        slices: Those of the other one, each with its place, in the order of the first.
        identity: Of the other one and its places.
        dispatch: As of both.
    """
    before = zip(lowered.slices, slices, strict=True)
    name_of = {old.name: new.name for old, new in before}
    places: dict[str, Place] = {x.name: x.place for x in slices if x.place is not None}
    values = tuple(
        each if each.slice is None else replace(each, slice=name_of[each.slice])
        for each in lowered.values
    )
    moves = tuple(
        replace(
            move,
            pieces=replace(
                move.pieces,
                source_place=places[str(values[move.source].slice)],
                target_place=places[str(values[move.target].slice)],
            ),
        )
        for move in lowered.moves
    )
    gangs = tuple(
        replace(
            gang,
            island=places[name_of[gang.placement]].island,
            placement=name_of[gang.placement],
        )
        for gang in lowered.gangs
    )
    return replace(
        lowered,
        identity=identity,
        slices=tuple(slices),
        values=values,
        moves=moves,
        instructions=tuple(
            replace(each, slice=name_of[each.slice])
            if isinstance(each, Launch)
            else each
            for each in lowered.instructions
        ),
        gangs=gangs,
        graph=SpreadGraph(gangs, dispatch),
        stages=(),
    )
