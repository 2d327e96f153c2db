"""Cutting programs with branches and loops into flows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from timelyml.ml.programs.flows import (
    Choice,
    Flow,
    Part,
    Repeat,
    Scatter,
    Step,
    Var,
    WholeFlow,
)
from timelyml.ml.programs.ir import Program
from timelyml.ml.programs.nodes import (
    CONTROL,
    Arg,
    Call,
    Exchange,
    Loop,
    Node,
    Recalled,
    Ref,
    Region,
    Route,
    Transfer,
    Value,
)
from timelyml.ml.programs.rebuild import with_operands
from timelyml.ml.programs.shipped import outputs_of
from timelyml.ml.programs.transfers import passing_on


def split(program: Program) -> WholeFlow:
    """Cut a program into parts without branches and loops.

    Args:
        program: As `run_passes` returned it.
    """
    refs = outputs_of(program)
    nodes = program.nodes
    args = {
        node.position: Ref(index)
        for index, node in enumerate(nodes)
        if isinstance(node, Arg) and node.value.slice is not None
    }
    puts = [Ref(index) for index, node in enumerate(nodes) if _is_put(node)]
    inputs = [*(args[each] for each in sorted(args)), *puts]
    given = {ref: number for number, ref in enumerate(inputs)}
    region = Region(nodes, tuple(refs))
    flow = _Splitter(program, region, given, len(inputs)).flow()
    outputs = tuple(map(program.value, refs))
    return WholeFlow(
        program.name,
        flow,
        tuple(map(program.value, inputs)),
        outputs,
        _final_part(program, outputs) if outputs else None,
        tuple(each.name for each in program.slices),
    )


def _is_put(node: Node) -> bool:
    return isinstance(node, Transfer) and node.route is Route.PUT


def _is_move(node: Node) -> bool:
    return isinstance(node, Transfer) and node.route is not Route.PUT


class _Splitter:
    """Cuts one region.

    Args:
        program: What it is part of.
        region: The region.
        given: Which of its outputs it is given, and as which input.
        num_inputs: How many there are.
    """

    def __init__(
        self,
        program: Program,
        region: Region,
        given: Mapping[Ref, Var],
        num_inputs: int,
    ) -> None:
        self._program = program
        self._nodes = list(region.nodes)
        self._results = list(region.results)
        self._num_inputs = self._num_vars = num_inputs
        self._vars = dict(given)
        self._waits = self._waited_for()
        self._copies: dict[int, list[int]] = {}  # by the node that they copy
        self._keep_from_donation()

    def flow(self) -> Flow:
        """Return the flow."""
        groups: dict[frozenset[int], list[int]] = {}
        controls = []
        for index, node in enumerate(self._nodes):
            if isinstance(node, CONTROL):
                controls.append(index)
            elif isinstance(node, Call):
                groups.setdefault(self._waits[index], []).append(index)
        whole = {waits: self._with_transfers(each) for waits, each in groups.items()}
        found: list[tuple[int, int, Step]] = [
            (
                len(waits),
                members[0],
                self._part(members, self._needed([*whole.values()], members, controls)),
            )
            for waits, members in whole.items()
        ]
        found += [
            (len(self._waits[index]), index, self._control(self._nodes[index], index))
            for index in controls
        ]
        steps = tuple(step for _, _, step in sorted(found, key=lambda each: each[:2]))
        results = tuple(map(self._var, self._results))
        return Flow(self._num_inputs, steps, results)

    def _with_transfers(self, calls: Sequence[int]) -> list[int]:
        """Return calls with what brings their operands; a part may not end with that."""
        found: dict[int, None] = {}
        for index in calls:
            for ref in self._nodes[index].operands:
                if _is_move(self._nodes[ref.node]):
                    found[ref.node] = None
            found[index] = None
            found.update(dict.fromkeys(self._copies.get(index, ())))
        return list(found)

    def _needed(
        self, parts: Sequence[list[int]], own: list[int], controls: Sequence[int]
    ) -> list[Ref]:
        """Return what others need of a part, in order."""
        users = [i for each in parts if each is not own for i in each] + [*controls]
        used = {ref for index in users for ref in self._nodes[index].operands}
        inside = {index for index in own if isinstance(self._nodes[index], Call)}
        return sorted(x for x in {*used, *self._results} if x.node in inside)

    def _waited_for(self) -> list[frozenset[int]]:
        """The branches and loops that each node needs, through whatever else."""
        waits: list[frozenset[int]] = []
        for node in self._nodes:
            needed = {ref.node for ref in node.operands}
            found = frozenset().union(*(waits[each] for each in needed))
            found |= {each for each in needed if isinstance(self._nodes[each], CONTROL)}
            waits.append(found)
        return waits

    def _keep_from_donation(self) -> None:
        """Copy what a part makes and destroys although others use it too."""
        for index in range(len(self._nodes)):
            node = self._nodes[index]
            for ref in node.donated if isinstance(node, Call) else ():
                if not self._is_made_with(ref, index):
                    continue
                if not self._is_used_outside(ref, index):
                    continue
                value = self._nodes[ref.node].outputs[ref.output]
                copied = Ref(len(self._nodes))
                call = _pass_on(self._program, "copy", [ref], [value])
                self._nodes.append(call)
                self._waits.append(self._waits[index])
                self._copies.setdefault(ref.node, []).append(copied.node)
                self._use_instead(ref, copied, self._waits[index])

    def _is_made_with(self, ref: Ref, donor: int) -> bool:
        """Whether a value is computed in the part that destroys it."""
        is_made = isinstance(self._nodes[ref.node], Call)
        return is_made and self._waits[ref.node] == self._waits[donor]

    def _is_used_outside(self, ref: Ref, donor: int) -> bool:
        home = self._waits[donor]
        return ref in self._results or self._is_used_outside_of(ref, home)

    def _is_outside(self, index: int, home: frozenset[int]) -> bool:
        """Whether a node, or whoever needs what it moves, is not of a part."""
        node = self._nodes[index]
        if _is_move(node):
            return self._is_used_outside_of(Ref(index), home)
        return self._waits[index] != home or isinstance(node, CONTROL)

    def _is_used_outside_of(self, ref: Ref, home: frozenset[int]) -> bool:
        return any(
            ref in node.operands and self._is_outside(index, home)
            for index, node in enumerate(self._nodes)
        )

    def _use_instead(self, ref: Ref, copied: Ref, home: frozenset[int]) -> None:
        self._results = [copied if each == ref else each for each in self._results]
        for index, node in enumerate(self._nodes[: copied.node]):
            if ref in node.operands and self._is_outside(index, home):
                operands = [copied if each == ref else each for each in node.operands]
                self._nodes[index] = with_operands(node, operands)

    def _var(self, ref: Ref) -> Var:
        if ref not in self._vars:
            self._vars[ref] = self._num_vars
            self._num_vars += 1
        return self._vars[ref]

    def _part(self, members: Sequence[int], outputs: Sequence[Ref]) -> Part:
        inside = set(members)
        inputs: dict[Ref, int] = {}
        for index in members:
            for ref in self._nodes[index].operands:
                if ref.node not in inside:
                    inputs.setdefault(ref, len(inputs))
        moved = {ref: Ref(number) for ref, number in inputs.items()}
        nodes: list[Node] = [
            Arg(number, f"value {self._var(ref)}", self._value(ref))
            for ref, number in inputs.items()
        ]
        for index in members:
            node = self._nodes[index]
            for output in range(len(node.outputs)):
                moved[Ref(index, output)] = Ref(len(nodes), output)
            nodes.append(with_operands(node, [moved[ref] for ref in node.operands]))
        program = _program(
            self._program, nodes, tuple(moved[ref] for ref in outputs), len(inputs)
        )
        return Part(
            program, tuple(map(self._var, inputs)), tuple(map(self._var, outputs))
        )

    def _control(self, node: Node, index: int) -> Choice | Repeat | Scatter:
        assert isinstance(node, CONTROL)  # noqa: S101 - for the type
        outputs = tuple(self._var(Ref(index, i)) for i in range(len(node.outputs)))
        if isinstance(node, Exchange):
            return self._scatter(node, outputs)
        chooser, *inputs = map(self._var, node.operands)
        flows = tuple(self._inner(each, len(inputs)) for each in node.regions)
        place = f"the {node.kind} at {node.line}"
        if node.is_replayed:
            place = f"the way back through {place}"
        common = tuple(inputs), outputs, node.values, place
        recorded, replayed = node.is_recorded, node.is_replayed
        if isinstance(node, Loop):
            most = node.max_steps
            return Repeat(chooser, *common, flows[0], most, recorded, replayed)
        is_flag = node.kind == "cond"
        return Choice(chooser, *common, flows, is_flag, recorded, replayed)

    def _inner(self, region: Region, num_passed: int) -> Flow:
        given = _given(region, num_passed)
        num_recalled = sum(isinstance(node, Recalled) for node in region.nodes)
        return _Splitter(self._program, region, given, num_passed + num_recalled).flow()

    def _scatter(self, node: Exchange, outputs: tuple[Var, ...]) -> Scatter:
        """Return the step of an exchange: what arrives is passed on by a computation."""
        before = [self._value(ref) for ref in node.rows]
        nodes: list[Node] = [
            Arg(number, f"value {self._var(ref)}", value)
            for number, (ref, value) in enumerate(zip(node.rows, before, strict=True))
        ]
        count = len(nodes)
        nodes += [
            Transfer(Ref(number), value, Route.BETWEEN, node.sparse)
            for number, value in enumerate(node.outputs)
        ]
        arrived = [Ref(count + number) for number in range(count)]
        nodes.append(_pass_on(self._program, "arrive", arrived, node.outputs))
        results = tuple(Ref(2 * count, number) for number in range(count))
        part = Part(
            _program(self._program, nodes, results, count),
            tuple(map(self._var, node.rows)),
            outputs,
        )
        return Scatter(
            tuple(map(self._var, node.matrix)),
            part,
            node.shape,
            None if node.sparse.is_back else node.max_rows,
            node.outputs,
            f"the {node.kind} at {node.line}",
        )

    def _value(self, ref: Ref) -> Value:
        return self._nodes[ref.node].outputs[ref.output]


def _given(region: Region, num_passed: int) -> dict[Ref, Var]:
    """Return which outputs of a region are its operands; some may be so twice.

    What it recalls comes after these.
    """
    found = {}
    for index, node in enumerate(region.nodes):
        if isinstance(node, Arg):
            found[Ref(index)] = node.position
        elif isinstance(node, Recalled):
            found[Ref(index)] = num_passed + node.number
    return found


def _final_part(program: Program, values: Sequence[Value]) -> Program:
    """Return a program that passes on what a flow computed, each in its place."""
    nodes: list[Node] = [Arg(i, f"output {i}", each) for i, each in enumerate(values)]
    results: dict[int, Ref] = {}
    for slice_ in dict.fromkeys(str(each.slice) for each in values):
        own = [i for i, each in enumerate(values) if each.slice == slice_]
        refs, of = [Ref(i) for i in own], [values[i] for i in own]
        call = _pass_on(program, "land", refs, of, is_taking=True)
        results.update({i: Ref(len(nodes), k) for k, i in enumerate(own)})
        nodes.append(call)
    ordered = tuple(results[i] for i in range(len(values)))
    return _program(program, nodes, ordered, len(values))


def _pass_on(
    program: Program,
    name: str,
    refs: Sequence[Ref],
    values: Sequence[Value],
    *,
    is_taking: bool = False,
) -> Call:
    slice_ = program.slice_named(str(values[0].slice))
    computation = passing_on(
        name,
        tuple(each.type for each in values),
        tuple(each.spec or () for each in values),
        slice_.mesh,
        slice_.platform,
        is_taking=is_taking,
    )
    return Call(computation, slice_.name, tuple(refs))


def _program(
    whole: Program, nodes: Sequence[Node], results: tuple[Ref, ...], num_args: int
) -> Program:
    used = {value.slice for node in nodes for value in node.outputs}
    slices = tuple(each for each in whole.slices if each.name in used)
    return replace(
        whole, slices=slices, nodes=tuple(nodes), results=results, num_args=num_args
    )
