"""Loops of flows under way: there, by what they decide, and back, by what they did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from timelyml.errors import ComputationError
from timelyml.ml.controller.flow_frames import Control, Frame, Trail, needs, within
from timelyml.ml.programs import Value
from timelyml.ml.programs.flows import Flow, Repeat, Var
from timelyml.runtime.failure import pack_error


class Run(Protocol):
    """The run of a flow that loops are part of; `flow_runs` has it."""

    def open(
        self,
        flow: Flow,
        where: str,
        inputs: Sequence[int],
        done: Callable[[list[int]], None],
    ) -> Frame:
        """Return a run of a flow on buffers, to be advanced."""

    def advance(self, frame: Frame) -> None:
        """Take each step for which all is there."""

    def give(self, frame: Frame, step: Control, numbers: Sequence[int]) -> None:
        """Go on after a branch or a loop, with its results."""

    def hold(self, numbers: Iterable[int]) -> None:
        """Count buffers once more."""

    def drop(self, numbers: Iterable[int]) -> None:
        """Count buffers once less."""

    def use(self, frame: Frame, names: Sequence[Var]) -> None:
        """Count down what a step has taken."""

    def failed(self, values: Sequence[Value], error: bytes) -> list[int]:
        """Return buffers that will never be."""

    def when_known(self, number: int, reader: Callable[[Any], None]) -> None:
        """Call with the value of a buffer, or its packed error, once that came."""

    def may_go_on(self, waiter: Callable[[], None]) -> bool:
        """Return whether more may begin; if not, the waiter is called when it may."""

    def kept(self, trail: Trail) -> int:
        """Return the number of a trail, which counts once."""

    def taken(self, number: int) -> Trail:
        """Return a trail that counted once for who asks; now what it keeps does."""


class Repeated:
    """A loop under way.

    If it is recorded, what its runs keep is kept until the way back over them.
    """

    def __init__(self, run: Run, frame: Frame, step: Repeat) -> None:
        self._run = run
        self._frame = frame
        self._step = step
        self._num_steps = 0
        self._kept: list[list[int]] = []
        numbers = [frame.env[name] for name in step.inputs]
        self._chooser = frame.env[step.chooser]
        self._carried = numbers[: len(step.values)]
        self._captured = numbers[len(step.values) :]
        run.hold((self._chooser, *numbers))
        run.use(frame, needs(step))
        run.when_known(self._chooser, self._decide)

    def _decide(self, news: Any) -> None:
        run, step = self._run, self._step
        run.drop((self._chooser,))
        if isinstance(news, bytes):
            self._fail(news)
        elif not np.asarray(news).item():
            run.drop(self._captured)
            self._end(self._carried, Trail(self._kept))
        elif self._num_steps == step.max_steps:
            self._fail(pack_error(_endless(step)))
        else:
            inputs = [*self._carried, *self._captured]
            where = f"in run {self._num_steps} of {step.place}"
            place = within(where, self._frame.where)
            inner = run.open(step.flow, place, inputs, self._again)
            run.drop(self._carried)
            run.advance(inner)

    def _again(self, found: list[int]) -> None:
        self._num_steps += 1
        end = 1 + len(self._step.values)
        self._chooser, *self._carried = found[:end]
        self._kept.append(found[end:])
        self._run.when_known(self._chooser, self._decide)

    def _fail(self, error: bytes) -> None:
        run, step = self._run, self._step
        run.drop([*self._carried, *self._captured])
        for kept in self._kept:
            run.drop(kept)
        self._end(run.failed(step.values, error), Trail([], error=error))

    def _end(self, found: list[int], trail: Trail) -> None:
        if self._step.is_recorded:
            found = [*found, self._run.kept(trail)]
        self._run.give(self._frame, self._step, found)


class Replayed:
    """The way back over a loop: a run for each that there was, the last first.

    Nothing decides, so that runs begin without waiting for those before them, as long as
    not too much is under way.
    """

    def __init__(self, run: Run, frame: Frame, step: Repeat) -> None:
        self._run = run
        self._frame = frame
        self._step = step
        number = frame.env[step.chooser]
        numbers = [frame.env[name] for name in step.inputs]
        self._carried = numbers[: len(step.values)]
        self._captured = numbers[len(step.values) :]
        run.hold((number, *numbers))
        run.use(frame, needs(step))
        self._trail = run.taken(number)
        self._is_ready = True
        self._is_going = False
        self._go()

    def _go(self) -> None:
        """Begin runs as long as one is over as soon as it has begun."""
        run, step = self._run, self._step
        self._is_going = True
        while self._is_ready and self._trail.runs:
            if not run.may_go_on(self._go):
                return
            self._is_ready = False
            kept = self._trail.runs.pop()
            inputs = [*self._carried, *self._captured, *kept]
            where = f"in run {len(self._trail.runs)} of {step.place}"
            place = within(where, self._frame.where)
            inner = run.open(step.flow, place, inputs, self._again)
            run.drop([*self._carried, *kept])
            run.advance(inner)
        self._is_going = False
        if self._is_ready:
            self._end()

    def _again(self, found: list[int]) -> None:
        self._carried = found
        self._is_ready = True
        if not self._is_going:
            self._go()

    def _end(self) -> None:
        run, step = self._run, self._step
        run.drop(self._captured)
        error = self._trail.error
        if error is not None:
            run.drop(self._carried)
            self._carried = run.failed(step.values, error)
        run.give(self._frame, step, self._carried)


def _endless(step: Repeat) -> ComputationError:
    return ComputationError(
        f"{step.place} did not end; got a condition that is true after {step.max_steps} "
        f"runs; expected it false by then, as max_steps says; raise max_steps",
        function="while_loop",
        where=step.place,
    )
