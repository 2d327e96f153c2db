"""What runs of flows are made of: frames, and trails of what branches and loops did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from timelyml.ml.controller.cuts import RegisteredProgram
from timelyml.ml.controller.work import Work
from timelyml.ml.programs import Value
from timelyml.ml.programs.flows import (
    Choice,
    Flow,
    Part,
    Repeat,
    Scatter,
    Step,
    Var,
)
from timelyml.ml.store import Buffer, Entry

Control: TypeAlias = Choice | Repeat | Scatter
"""A step that values decide, or what they decided before."""


class Parts(Protocol):
    """Who makes calls of programs."""

    def part(
        self,
        whole: Work,
        known: RegisteredProgram,
        args: list[Entry],
        outputs: Sequence[Buffer],
        taken: Collection[int],
        *,
        where: str,
        matrix: Any = None,
    ) -> Work:
        """Return a part of other work, to be started."""

    def outputs(
        self, outs: Sequence[int], values: Sequence[Value], name: str
    ) -> list[Buffer]:
        """Return the buffers that a part makes."""


@dataclass(slots=True, eq=False)
class Frame:
    """A run of a flow.

    Attributes:
        where: In which run of which loop, and the like.
        done: Called with the buffers of the results, which count for who is called.
        env: The buffers of variables that are still needed.
        uses_left: Of each variable, how many steps have not taken it.
        steps_left: Steps that were not taken.
        num_open: Steps that are not over; a part is, as soon as it has begun.
    """

    flow: Flow
    where: str
    done: Callable[[list[int]], None]
    env: dict[Var, int] = field(default_factory=dict)
    uses_left: Counter[Var] = field(default_factory=Counter)
    steps_left: list[Step] = field(default_factory=list)
    num_open: int = 0


@dataclass(slots=True, eq=False)
class Trail:
    """What a branch or loop did, for the way back over it.

    It has a number as buffers have, and counts as they do; its buffers count once each
    while it is there.

    Attributes:
        runs: The buffers that each run kept, in the order of runs; of a branch, one.
        index: Which flow of a branch ran.
        error: Why it did not end, packed.
    """

    runs: list[list[int]]
    index: int = 0
    error: bytes | None = None


def within(inner: str, outer: str) -> str:
    """Say where something is, from the inside out.

    >>> within("in run 3 of a loop", "in branch 1 of a switch")
    'in run 3 of a loop, in branch 1 of a switch'
    """
    return f"{inner}, {outer}" if outer else inner


def needs(step: Step) -> tuple[Var, ...]:
    """Return what has to be there for a step, as often as it takes it."""
    if isinstance(step, Part):
        return step.inputs
    if isinstance(step, Scatter):
        return (*step.matrix, *step.part.inputs)
    return (step.chooser, *step.inputs)


def branch_name(step: Choice, index: int) -> str:
    """What the user calls a flow of a branch.

    Args:
        step: The branch.
        index: Of its flows.
    """
    return ("false", "true")[index] if step.is_flag else str(index)
