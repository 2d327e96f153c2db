"""Passes that put a program into places: placement and dead calls.

Each takes a program and returns another; what one prints shows what it did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from timelyml.errors import PlacementError
from timelyml.ml.programs.ir import Program
from timelyml.ml.programs.nodes import (
    Arg,
    Branch,
    Constant,
    Loop,
    Recalled,
    Region,
    Route,
    Transfer,
    with_regions,
)
from timelyml.ml.programs.places import Place
from timelyml.ml.programs.rebuild import Rebuilder


def place(program: Program, places: Mapping[str, Place]) -> Program:
    """Put slices where they stand.

    Args:
        program: As it was traced.
        places: Of each slice, by its name.

    Raises:
        PlacementError: A slice has none, or one with another number of devices.
    """
    placed = []
    for each in program.slices:
        found = places.get(each.name)
        if found is None or len(found.devices) != each.mesh.size:
            got = "none" if found is None else f"{len(found.devices)} devices"
            raise PlacementError(
                f"program {program.name!r} cannot be placed: slice {each.name!r} has no "
                f"place; got {got}; expected {each.mesh.size} devices for its mesh "
                f"{each.mesh}; place the slice first",
                program=program.name,
                slice=each.name,
            )
        placed.append(replace(each, place=found))
    return replace(program, slices=tuple(placed))


def place_again(program: Program, places: Mapping[str, Place]) -> Program:
    """Put a program that went through all passes where its slices stand now.

    Raises:
        PlacementError: As `place`.
    """
    placed = place(program, places)
    islands = {each.name: places[each.name].island for each in placed.slices}
    nodes = list(placed.nodes)
    for index, node in enumerate(nodes):
        if isinstance(node, Transfer) and node.route is not Route.PUT:
            ends = placed.value(node.operand), node.value
            found = {islands[str(each.slice)] for each in ends}
            route = Route.WITHIN if len(found) == 1 else Route.BETWEEN
            nodes[index] = replace(node, route=route)
    return replace(placed, nodes=tuple(nodes))


def drop_dead_calls(program: Program) -> Program:
    """Leave out calls whose results nobody uses, unless they do more than compute.

    What a call donates was dead for the user, and simply is not overwritten.
    """
    used = {ref.node for ref in program.results}
    kept = []
    for index in reversed(range(len(program.nodes))):
        node = program.nodes[index]
        if isinstance(node, Arg | Constant | Recalled):
            kept.append(index)  # these have positions, used or not
        elif index in used or (not isinstance(node, Transfer) and node.has_effects):
            kept.append(index)
            used |= {ref.node for ref in node.operands}
    rebuilder = Rebuilder(program)
    for index in reversed(kept):
        rebuilder.keep(index)
        node = rebuilder.nodes[-1]
        if isinstance(node, Branch | Loop):
            rebuilder.nodes[-1] = with_regions(node, lambda each: _alive(program, each))
    return rebuilder.program()


def _alive(program: Program, region: Region) -> Region:
    """Return a region without its dead calls."""
    kept = drop_dead_calls(program.inside(region))
    return Region(kept.nodes, kept.results)
