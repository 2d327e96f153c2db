"""The pass that moves each value to where it is used, in the sharding that is needed."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from timelyml.ml.programs.nodes import (
    Arg,
    Branch,
    Call,
    Exchange,
    Loop,
    Node,
    Ref,
    Region,
    Route,
    Transfer,
    Value,
    with_regions,
)
from timelyml.ml.programs.rebuild import Rebuilder, with_operands


def insert_transfers(program: Program) -> Program:
    """Move each value to where it is used, in the sharding that is needed there.

    On the devices of its own slice a value is sharded anew by a computation, which XLA
    does with collectives. To another slice it is moved: within an island from device to
    device, between islands over the network. Users that need the same share a move,
    unless one of them destroys what it gets.

    What regions are given and return lies where their branch or loop says. What they
    need of the client is put before it, so that nothing comes from there in between.

    Args:
        program: One that is placed.
    """
    inserter = _Inserter(program)
    inserter.all()
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


@functools.lru_cache(maxsize=1024)
def passing_on(
    name: str,
    types: tuple[ArrayType, ...],
    specs: tuple[Spec, ...],
    mesh: LogicalMesh,
    platform: str,
    *,
    is_taking: bool,
) -> Computation:
    """Return a computation that returns what it is given, or copies of that.

    Args:
        name: What it is for.
        types: Of its arguments.
        specs: How they lie.
        mesh: Of its slice.
        platform: Of its slice.
        is_taking: Whether it takes their memory in place.
    """

    def pass_on(*arrays: object) -> tuple[object, ...]:
        return arrays

    pass_on.__name__ = name
    shardings = tuple(map(partition_spec, specs))
    options = Options(
        in_shardings=shardings,
        out_shardings=shardings,
        donate_argnums=tuple(range(len(types))) if is_taking else (),
    )
    return trace(
        pass_on,
        tuple(map(abstract_array, types)),
        mesh=mesh,
        settings=_ANY_TYPE,
        options=options,
        platform=platform,
    ).computation


_ANY_TYPE = Settings(x64=True)
"""Of computations that pass on what others computed."""


@dataclass(frozen=True, slots=True)
class _User:
    """What a computation that shards anew has in common with who needs it."""

    mesh: LogicalMesh
    settings: Settings
    platform: str


class _Inserter:
    def __init__(self, program: Program) -> None:
        self.rebuilder = Rebuilder(program)
        self._program = program
        self._shared: dict[tuple[Ref, Value], Ref] = {}
        self._landed: dict[Ref, Ref] = {}
        self._num_uses = Counter(ref for each in program.nodes for ref in each.operands)
        self._num_uses.update(program.results)

    def all(self) -> None:
        """Take over all nodes, with what their operands need put before them."""
        for index, node in enumerate(self._program.nodes):
            match node:
                case Call():
                    self._call(index, node)
                case Branch() | Loop():
                    self._control(index, node)
                case Exchange():
                    matrix = tuple(map(self.read, node.matrix))
                    rows = tuple(map(self.rebuilder.now, node.rows))
                    self._put(index, replace(node, operands=(*matrix, *rows)))
                case _:
                    self.rebuilder.keep(index)

    def land(self, ref: Ref, wanted: Value) -> Ref:
        """Return a value where a branch or a loop, or what is around them, wants it.

        What is moved there is the operand of a computation, as everything is that a
        program returns.
        """
        user = self._at(str(wanted.slice))
        found = self._moved(ref, wanted, user, is_destroyed=False)
        node = self.rebuilder.nodes[found.node]
        if not isinstance(node, Transfer) or node.route is Route.PUT:
            return found
        if found not in self._landed:
            self._landed[found] = self._passed_on("arrive", found, wanted)
        return self._landed[found]

    def read(self, ref: Ref) -> Ref:
        """Return a value for the controller to read: a result that nothing else takes.

        Small results ride along with the news that they are there, unless a later
        launch takes them.
        """
        value = self._program.value(ref)
        is_made = isinstance(self._program.nodes[ref.node], Call)
        if is_made and self._num_uses[ref] == 1:
            return self.rebuilder.now(ref)
        if value.slice is None:
            value = replace(value, spec=(), slice=self._program.slices[0].name)
        return self._passed_on("read", self.land(ref, value), value)

    def _passed_on(self, name: str, ref: Ref, value: Value) -> Ref:
        user = self._at(str(value.slice))
        computation = passing_on(
            name,
            (value.type,),
            (value.spec or (),),
            user.mesh,
            user.platform,
            is_taking=False,
        )
        return Ref(self.rebuilder.add(Call(computation, str(value.slice), (ref,))))

    def _call(self, index: int, node: Call) -> None:
        computation = node.computation
        user = _User(computation.mesh, computation.settings, computation.platform)
        operands = []
        for position, ref in enumerate(node.operands):
            wanted = Value(
                computation.in_types[position],
                computation.in_specs[position],
                node.slice,
            )
            is_destroyed = position in computation.donated
            operands.append(self._moved(ref, wanted, user, is_destroyed=is_destroyed))
        self._put(index, replace(node, operands=tuple(operands)))

    def _control(self, index: int, node: Branch | Loop) -> None:
        passed = node.passed
        where = [self._program.value(ref) for ref in passed]
        if isinstance(node, Loop):
            where[: len(node.values)] = node.values
        lifted = _Lifted(where)
        regions = [
            self._region(region, node, is_condition=region is node.condition)
            if isinstance(node, Loop)
            else self._region(region, node)
            for region in node.regions
        ]
        regions = [lifted.region(each) for each in regions]
        operands = [self.land(passed[i], where[i]) for i in lifted.kept]
        for position, value, is_destroyed in lifted.puts:
            user = self._at(str(value.slice))
            ref = passed[position]
            operands.append(self._moved(ref, value, user, is_destroyed=is_destroyed))
        if node.is_replayed:
            operands.insert(0, self.rebuilder.now(node.operands[0]))
        elif isinstance(node, Branch):
            operands.insert(0, self.read(node.operands[0]))
        again = iter(regions)
        changed = with_regions(node, lambda _: next(again))
        self._put(index, with_operands(changed, operands))

    def _region(
        self, region: Region, node: Branch | Loop, *, is_condition: bool = False
    ) -> Region:
        inner = _Inserter(self._program.inside(region))
        inner.all()
        if is_condition:
            told = inner.read(region.results[0])  # may add a node
            return Region(tuple(inner.rebuilder.nodes), (told,))
        returned = region.results[: len(node.values)]
        pairs = zip(returned, node.values, strict=True)
        results = [inner.land(ref, wanted) for ref, wanted in pairs]
        kept = region.results[len(returned) :]  # stays where it is
        results += map(inner.rebuilder.now, kept)
        return Region(tuple(inner.rebuilder.nodes), tuple(results))

    def _put(self, index: int, node: Node) -> None:
        added = self.rebuilder.add(node)
        for output in range(len(node.outputs)):
            self.rebuilder.move(Ref(index, output), Ref(added, output))

    def _at(self, slice_name: str) -> _User:
        slice_ = self._program.slice_named(slice_name)
        return _User(slice_.mesh, _ANY_TYPE, slice_.platform)

    def _moved(
        self, ref: Ref, wanted: Value, user: _User, *, is_destroyed: bool
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

    def _resharded(self, ref: Ref, value: Value, wanted: Value, user: _User) -> Ref:
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


class _Lifted:
    """Takes out of regions what comes from the client, to be one of their operands.

    Attributes:
        kept: Positions of operands that stay as they are.
        puts: For each new operand the position of what it is put of, where it is
            wanted, and whether a region destroys it.
    """

    def __init__(self, where: Sequence[Value]) -> None:
        self.kept = [i for i, each in enumerate(where) if each.slice is not None]
        self.puts: list[tuple[int, Value, bool]] = []

    def region(self, region: Region) -> Region:
        """Return a region that is given values on slices only."""
        donated = {
            ref
            for each in region.nodes
            if isinstance(each, Call)
            for ref in each.donated
        }
        moved: dict[int, int] = {}
        nodes: list[Node] = []
        for index, node in enumerate(region.nodes):
            changed: Node | None = node
            if isinstance(node, Arg):
                is_kept = node.position in self.kept
                position = self.kept.index(node.position) if is_kept else -1
                changed = replace(node, position=position) if is_kept else None
            elif isinstance(node, Transfer) and node.route is Route.PUT:
                source = region.nodes[node.operand.node]
                assert isinstance(source, Arg)  # noqa: S101 - it has no constants
                put = source.position, node.value, Ref(index) in donated
                position = len(self.kept) + self._number(put)
                changed = Arg(position, source.label, node.value)
            else:
                operands = [ref._replace(node=moved[ref.node]) for ref in node.operands]
                changed = with_operands(node, operands)
            if changed is not None:
                moved[index] = len(nodes)
                nodes.append(changed)
        results = tuple(ref._replace(node=moved[ref.node]) for ref in region.results)
        return Region(tuple(nodes), results)

    def _number(self, put: tuple[int, Value, bool]) -> int:
        if put[2] or put not in self.puts:
            self.puts.append(put)
            return len(self.puts) - 1
        return self.puts.index(put)


def _cut(mesh: LogicalMesh, spec: Spec) -> tuple[tuple[str, ...], ...]:
    sizes = mesh.sizes
    cut = [tuple(axis for axis in axes_of(each) if sizes[axis] > 1) for each in spec]
    while cut and not cut[-1]:
        cut.pop()
    return tuple(cut)
