"""Flows: programs with branches and loops, cut into parts that have none.

A part is a program of its own, as large as may be: all computations that wait for the
same branches and loops. It is registered, dispatched and run as any program is, one
message for each host. What stands between parts, and is decided by values, is a flow:
few steps that name values by numbers, which the controller goes through.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from timelyml.ml.programs.ir import Program
from timelyml.ml.programs.nodes import Value

Var: TypeAlias = int
"""Names a value of a flow; while it runs, a buffer."""


@dataclass(frozen=True, slots=True)
class Part:
    """A program without branches and loops.

    Attributes:
        program: Its arguments are all on slices.
        inputs: What its arguments are, by position.
        outputs: What its results are.
    """

    program: Program
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several flows, once it is known which.

    Attributes:
        chooser: Tells which: the nearest, if out of range; or is a trail.
        outputs: The results; then, if it is recorded, the trail.
        is_flag: Whether it is true or false, in place of a number.
        values: What the results are, and where they lie.
        place: What and where it is, for errors.
        is_recorded: Whether what flows return beyond results is kept, in a trail.
        is_replayed: Whether the flow is that of a trail, which gives it what it kept,
            after the inputs.
    """

    chooser: Var
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    values: tuple[Value, ...]
    place: str
    flows: tuple[Flow, ...]
    is_flag: bool
    is_recorded: bool = False
    is_replayed: bool = False


@dataclass(frozen=True, slots=True)
class Repeat:
    """A flow again and again, as long as its first result is true.

    Attributes:
        chooser: Whether it runs at all; or a trail.
        inputs: What is carried, as many as there are values, then what each run gets.
        outputs: What is carried; then, if it is recorded, the trail.
        values: What is carried, and where it lies.
        max_steps: So often at most; or None.
        place: What and where it is, for errors.
        is_recorded: Whether what runs return beyond what is carried is kept, in a trail.
        is_replayed: Whether there is a run for each of a trail, the last first, which
            is given what that kept, after the inputs. Its flow tells nothing of another.
    """

    chooser: Var
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    values: tuple[Value, ...]
    place: str
    flow: Flow
    max_steps: int | None
    is_recorded: bool = False
    is_replayed: bool = False


@dataclass(frozen=True, slots=True)
class Scatter:
    """A part that moves rows, once it is known how many go from where to where.

    Attributes:
        matrix: The pieces of the matrix that says so.
        part: What moves them; told of the matrix.
        shape: Of the matrix: shards of the source and of the target.
        max_rows: No shard of the target may be sent more; None on the way back.
        values: What the results are, and where they lie.
        place: What and where it is, for errors.
    """

    matrix: tuple[Var, ...]
    part: Part
    shape: tuple[int, int]
    max_rows: int | None
    values: tuple[Value, ...]
    place: str

    @property
    def outputs(self) -> tuple[Var, ...]:
        """What the results are."""
        return self.part.outputs


Step: TypeAlias = Part | Choice | Repeat | Scatter


@dataclass(frozen=True, slots=True)
class Flow:
    """Steps, each of which may be taken once all that it names is there.

    Attributes:
        num_inputs: They are the variables from 0.
    """

    num_inputs: int
    steps: tuple[Step, ...]
    results: tuple[Var, ...]

    def parts(self) -> Iterator[Part]:
        """Return all parts, also those within."""
        for step in self.steps:
            match step:
                case Part():
                    yield step
                case Choice():
                    for flow in step.flows:
                        yield from flow.parts()
                case Repeat():
                    yield from step.flow.parts()
                case Scatter():
                    yield step.part


@dataclass(frozen=True, slots=True)
class WholeFlow:
    """A program as a flow.

    Attributes:
        inputs: What the inputs are, in the order of `inputs_of`.
        outputs: What its outputs are, in the order of `outputs_of`.
        final_part: Passes the outputs on, under the names that whoever called it knows;
            None if there are none.
        slices: All that it uses.
    """

    name: str
    flow: Flow
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    final_part: Program | None
    slices: tuple[str, ...]

    def programs(self) -> Iterator[Program]:
        """Return the programs of all parts."""
        yield from (part.program for part in self.flow.parts())
        if self.final_part is not None:
            yield self.final_part
