"""Which nodes of a tape gradients go through, and what of their derivatives is wanted.

Through a branch they go as through any of its regions; through a loop as through as
many bodies as it takes until nothing more depends on, or changes, what does; through an
exchange of rows as through a call that returns the rows it is given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax.numpy as jnp

from timelyml.errors import TraceError
from timelyml.ml.functions import ArrayType
from timelyml.ml.functions.types import dtype_named
from timelyml.ml.gradients.derivatives import Derivative
from timelyml.ml.gradients.tape import Tape
from timelyml.ml.programs import (
    Arg,
    Branch,
    Call,
    Constant,
    Loop,
    Node,
    Program,
    Ref,
    Region,
    Value,
)
from timelyml.ml.programs.nodes import Exchange


@dataclass(frozen=True, slots=True)
class Step:
    """A call between what gradients are wanted of and the loss.

    Attributes:
        is_joint: Whether nothing but the loss comes of it, so that its way back can
            follow at once, in the same computation.
    """

    derivative: Derivative
    is_joint: bool


@dataclass(frozen=True, slots=True)
class ControlStep:
    """A branch or a loop between what gradients are wanted of and the loss.

    Attributes:
        live: Results that have cotangents; of a loop, what carries them.
        wanted: Operands, of those that are passed, whose gradients are wanted; of a
            loop, only of those that are not carried.
        plans: The steps of each region; of a loop, of its body.
    """

    live: tuple[int, ...]
    wanted: tuple[int, ...]
    plans: tuple[Plan, ...]


@dataclass(frozen=True, slots=True)
class ExchangeStep:
    """Rows that are sent from shard to shard, and whose cotangents come back.

    Attributes:
        live: Which of the rows have cotangents.
    """

    live: tuple[int, ...]


Plan: TypeAlias = dict[int, Step | ControlStep | ExchangeStep]
"""The steps of a program or region by their node, in its order."""


def plan(
    tape: Tape, program: Program, loss: Ref, wrt: Collection[Ref], *, keeps: bool
) -> Plan:
    """Return the steps of a gradient.

    Args:
        tape: What recorded the program.
        program: Its nodes.
        loss: The scalar that is differentiated.
        wrt: What gradients are wanted of.
        keeps: Keep residuals; else functions are computed again.

    Raises:
        TraceError: A loop on the way has no bound, or is itself part of a gradient; or
            there is more in the program than calls, loops, branches and routings.
    """
    planner = _Planner(tape, program.nodes, wrt, keeps=keeps)
    found, _ = planner.plan({loss} & planner.active, loss)
    return found


def results_of(tape: Tape, index: int) -> list[Ref]:
    """Return what a call of the tape returns, without what tells of its checks."""
    count = tape.calls[index].computation.num_results
    return [Ref(index, output) for output in range(count)]


def args_of(region: Region) -> dict[int, Ref]:
    """Return what stands in a region for its operands, by position."""
    return {
        node.position: Ref(index)
        for index, node in enumerate(region.nodes)
        if isinstance(node, Arg)
    }


def is_real(array_type: ArrayType) -> bool:
    """Whether there are gradients of an array: it is one of floats, or complex."""
    return bool(jnp.issubdtype(dtype_named(array_type.dtype), jnp.inexact))


class _Planner:
    """Plans one program or region.

    Attributes:
        active: Values that depend on what gradients are wanted of.
    """

    def __init__(
        self, tape: Tape, nodes: Sequence[Node], wrt: Collection[Ref], *, keeps: bool
    ) -> None:
        self._tape = tape
        self._nodes = nodes
        self._keeps = keeps
        self._wanted: dict[int, tuple[int, ...]] = {}
        self.active = set(wrt)
        for index, node in enumerate(nodes):
            match node:
                case Call():
                    self._through_call(index, node)
                case Branch() | Loop():
                    self._through_control(index, node)
                case Exchange():
                    self._through_exchange(index, node)
                case Arg() | Constant():
                    pass
                case _:
                    self._refuse_node(node)

    def plan(self, live: Iterable[Ref], loss: Ref | None) -> tuple[Plan, set[Ref]]:
        """Return the steps, and the values that have cotangents.

        Args:
            live: Results that have cotangents.
            loss: The one whose cotangent is 1, if it is among them.
        """
        used = set(live) - {loss}
        found: Plan = {}
        for index in reversed(range(len(self._nodes))):
            node = self._nodes[index]
            outputs = [Ref(index, output) for output in range(len(node.outputs))]
            has = [x for x in outputs if x in self.active and (x in used or x == loss)]
            if not (has and self._wanted.get(index)):
                continue
            if isinstance(node, Call):
                found[index] = self._call_step(index, has, loss, used)
                operands = node.operands
                used |= {operands[position] for position in self._wanted[index]}
            elif isinstance(node, Branch | Loop):
                positions = [each.output for each in has]
                found[index], passed = self._control_step(index, node, positions)
                used |= {node.passed[position] for position in passed} & self.active
            elif isinstance(node, Exchange):
                rows = tuple(each.output for each in has)
                found[index] = ExchangeStep(rows)
                used |= {node.rows[each] for each in rows}
        return dict(reversed(found.items())), used

    def _through_call(self, index: int, node: Call) -> None:
        operands = node.operands
        here = tuple(i for i, ref in enumerate(operands) if ref in self.active)
        self._wanted[index] = here
        if here:
            results = results_of(self._tape, index)
            self.active |= {ref for ref in results if is_real(self._value(ref).type)}

    def _through_exchange(self, index: int, node: Exchange) -> None:
        here = tuple(i for i, ref in enumerate(node.rows) if ref in self.active)
        self._wanted[index] = here
        self.active |= {Ref(index, i) for i in here}

    def _through_control(self, index: int, node: Branch | Loop) -> None:
        here = {i for i, ref in enumerate(node.passed) if ref in self.active}
        if not here:
            return
        if index not in self._tape.regions:
            self._refuse(
                node, "is part of a gradient", "a gradient of it",
                "first derivatives of loops and branches by values",
                "put the loop into a compiled function",
            )  # fmt: skip
        while True:
            results = set[int]()
            for each in self._regions(index):
                results |= self._active_results(*each, here, len(node.values))
            if isinstance(node, Branch) or results <= here:
                break
            here |= results
        if isinstance(node, Loop):
            results |= {i for i in here if i < len(node.values)}
        self._wanted[index] = tuple(sorted(here))
        self.active |= {Ref(index, i) for i in results if is_real(node.values[i].type)}

    def _active_results(
        self, tape: Tape, region: Region, here: set[int], count: int
    ) -> set[int]:
        inner = self._inner(tape, region, here)
        return {
            i for i, ref in enumerate(region.results[:count]) if ref in inner.active
        }

    def _inner(self, tape: Tape, region: Region, here: Collection[int]) -> _Planner:
        args = args_of(region)
        wrt = {args[position] for position in here if position in args}
        wrt = {ref for ref in wrt if is_real(_value(region.nodes, ref).type)}
        return _Planner(tape, region.nodes, wrt, keeps=self._keeps)

    def _regions(self, index: int) -> list[tuple[Tape, Region]]:
        """Return what gradients go through, with the tapes."""
        node = self._nodes[index]
        tapes = self._tape.regions[index]
        if isinstance(node, Loop):
            return [(tapes[-1], node.body)]
        assert isinstance(node, Branch)  # noqa: S101 - for the type
        return list(zip(tapes, node.regions, strict=True))

    def _call_step(
        self, index: int, has: Sequence[Ref], loss: Ref | None, used: Collection[Ref]
    ) -> Step:
        live = [ref for ref in has if ref in self.active]
        derivative = Derivative(
            self._tape.calls[index].flat,
            self._wanted[index],
            tuple(ref.output for ref in live),
            frozenset(ref.output for ref in live if ref == loss),
            self._keeps,
        )
        return Step(derivative, live == [loss] and loss not in used)

    def _control_step(
        self, index: int, node: Branch | Loop, has: Sequence[int]
    ) -> tuple[ControlStep, set[int]]:
        """Return the step of a branch or loop, and which operands have gradients."""
        wanted = self._wanted[index]
        planners = [self._inner(*each, wanted) for each in self._regions(index)]
        live = set(has)
        if isinstance(node, Branch):
            plans, passed = self._inner_plans(node.regions, planners, live)
            step = ControlStep(tuple(sorted(live)), tuple(sorted(passed)), plans)
            return step, passed
        if node.max_steps is None:
            self._refuse(
                node, "has no gradient", "no max_steps",
                "a bound of what is kept for the way back", "pass max_steps",
            )  # fmt: skip
        count = len(node.values)
        while True:
            plans, passed = self._inner_plans([node.body], planners, live)
            carried = {i for i in passed if i < count}
            if carried <= live:
                break
            live |= carried
        beside = tuple(sorted(passed - carried))
        return ControlStep(tuple(sorted(live)), beside, plans), {*live, *beside}

    def _inner_plans(
        self,
        regions: Sequence[Region],
        planners: Sequence[_Planner],
        live: Collection[int],
    ) -> tuple[tuple[Plan, ...], set[int]]:
        """Return the steps in regions, and which operands have gradients in any."""
        plans, passed = [], set()
        for region, planner in zip(regions, planners, strict=True):
            results = {region.results[i] for i in live} & planner.active
            steps, used = planner.plan(results, None)
            plans.append(steps)
            args = args_of(region)
            passed |= {i for i, ref in args.items() if ref in used}
        return tuple(plans), passed

    def _value(self, ref: Ref) -> Value:
        return _value(self._nodes, ref)

    def _refuse_node(self, node: Node) -> None:
        name = self._tape.name
        raise TraceError(
            f"{name!r} has no gradient; got a {type(node).__name__.lower()} in it; "
            f"expected calls, loops, branches and routings alone; put it into a function",
            function=name,
        )

    def _refuse(
        self, node: Branch | Loop, what: str, got: str, expected: str, do: str
    ) -> None:
        raise TraceError(
            f"the {node.kind} at {node.line} {what}; got {got}; expected {expected}; {do}",
            function=node.kind,
            where=node.line,
        )


def _value(nodes: Sequence[Node], ref: Ref) -> Value:
    return nodes[ref.node].outputs[ref.output]
