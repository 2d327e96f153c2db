"""Passes that put a program into places: placement, dead calls, transfers.

Each takes a program and returns another; what one prints shows what it did.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from timelyml.errors import PlacementError
from timelyml.ml.functions import (
    ArrayType,
    Computation,
    LogicalMesh,
    Options,
    Settings,
    Spec,
    partition_spec,
    trace,
)
from timelyml.ml.functions.specs import axes_of
from timelyml.ml.functions.types import abstract_array
from timelyml.ml.programs.ir import Program
from timelyml.ml.programs.nodes import Call, Place, Ref, Route, Transfer, Value
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
        if not isinstance(node, Call | Transfer):
            kept.append(index)  # arguments have positions, used or not
        elif index in used or (isinstance(node, Call) and node.has_effects):
            kept.append(index)
            used |= {ref.node for ref in node.operands}
    rebuilder = Rebuilder(program)
    for index in reversed(kept):
        rebuilder.keep(index)
    return rebuilder.program()


def insert_transfers(program: Program) -> Program:
    """Move each value to where it is used, in the sharding that is needed there.

    On the devices of its own slice a value is sharded anew by a computation, which XLA
    does with collectives. To another slice it is moved: within an island from device to
    device, between islands over the network. Users that need the same share a move,
    unless one of them destroys what it gets.

    Args:
        program: One that is placed.
    """
    inserter = _Inserter(program)
    for index, node in enumerate(program.nodes):
        if isinstance(node, Call):
            inserter.call(index, node)
        else:
            inserter.rebuilder.keep(index)
    return inserter.rebuilder.program()


def same_cut(mesh: LogicalMesh, one: Spec, other: Spec) -> bool:
    """Whether two specs cut alike: axes of one device cut nothing."""
    return _cut(mesh, one) == _cut(mesh, other)


@functools.lru_cache(maxsize=1024)
def resharding(
    array_type: ArrayType,
    mesh: LogicalMesh,
    specs: tuple[Spec, Spec],
    settings: Settings,
    platform: str,
) -> Computation:
    """Return a computation that only shards its argument anew."""

    def reshard(x: object) -> object:
        return x

    before, after = map(partition_spec, specs)
    with_type = Options(in_shardings=(before,), out_shardings=after)
    return trace(
        reshard,
        (abstract_array(array_type),),
        mesh=mesh,
        settings=settings,
        options=with_type,
        platform=platform,
    ).computation


class _Inserter:
    def __init__(self, program: Program) -> None:
        self.rebuilder = Rebuilder(program)
        self._program = program
        self._shared: dict[tuple[Ref, Value], Ref] = {}

    def call(self, index: int, node: Call) -> None:
        """Take over a call, with what its operands need put before it."""
        computation = node.computation
        operands = []
        for position, ref in enumerate(node.operands):
            wanted = Value(
                computation.in_types[position],
                computation.in_specs[position],
                node.slice,
            )
            is_destroyed = position in computation.donated
            operands.append(self._moved(ref, wanted, computation, is_destroyed))
        added = self.rebuilder.add(replace(node, operands=tuple(operands)))
        for output in range(len(node.outputs)):
            self.rebuilder.move(Ref(index, output), Ref(added, output))

    def _moved(
        self, ref: Ref, wanted: Value, user: Computation, is_destroyed: bool
    ) -> Ref:
        value = self._program.value(ref)
        is_there = value.slice == wanted.slice
        if is_there and same_cut(user.mesh, value.spec or (), wanted.spec or ()):
            return self.rebuilder.now(ref)
        key = ref, wanted
        if not is_destroyed and key in self._shared:
            return self._shared[key]
        moved = self._resharded(ref, value, wanted, user) if is_there else None
        found = moved or self._transferred(ref, value, wanted)
        if not is_destroyed:
            self._shared[key] = found
        return found

    def _resharded(
        self, ref: Ref, value: Value, wanted: Value, user: Computation
    ) -> Ref:
        computation = resharding(
            wanted.type,
            user.mesh,
            (value.spec or (), wanted.spec or ()),
            user.settings,
            user.platform,
        )
        node = Call(computation, str(wanted.slice), (self.rebuilder.now(ref),))
        return Ref(self.rebuilder.add(node))

    def _transferred(self, ref: Ref, value: Value, wanted: Value) -> Ref:
        route = Route.PUT
        if value.slice is not None:
            ends = [
                self._program.slice_named(str(each.slice)).place
                for each in (value, wanted)
            ]
            islands = {each.island for each in ends if each is not None}
            route = Route.WITHIN if len(islands) == 1 else Route.BETWEEN
        return Ref(self.rebuilder.add(Transfer(self.rebuilder.now(ref), wanted, route)))


def _cut(mesh: LogicalMesh, spec: Spec) -> tuple[tuple[str, ...], ...]:
    sizes = mesh.sizes
    cut = [tuple(axis for axis in axes_of(each) if sizes[axis] > 1) for each in spec]
    while cut and not cut[-1]:
        cut.pop()
    return tuple(cut)
