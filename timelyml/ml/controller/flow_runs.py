"""A call of a flow under way: which steps are taken, and what their variables are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from timelyml.errors import ComputationError, InvariantError, TimelyError
from timelyml.ml.controller.buffers import Buffers
from timelyml.ml.controller.cuts import Known
from timelyml.ml.controller.dispatching import Dispatch
from timelyml.ml.controller.flow_calls import FlowRecord
from timelyml.ml.controller.work import Work
from timelyml.ml.programs import Value
from timelyml.ml.programs.flows import Choice, Flow, Part, Repeat, Step, Var
from timelyml.ml.store import NOBODY, Buffer, Entry
from timelyml.runtime.failure import pack_error


class Parts(Protocol):
    """Who makes calls of programs."""

    def part(
        self,
        whole: Work,
        known: Known,
        args: list[Entry],
        outputs: Sequence[Buffer],
        taken: Collection[int],
        *,
        where: str,
    ) -> Work:
        """Return a part of other work, to be started."""

    def outputs(
        self, outs: Sequence[int], values: Sequence[Value], name: str
    ) -> list[Buffer]:
        """Return the buffers that a part makes."""


@dataclass(slots=True, eq=False)
class _Frame:
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


class FlowRun:
    """Takes the steps of one call.

    A buffer counts for each variable that it is, and for who is about to pass it on.
    One that is the flow's own, or was given to it, goes with its last count; if a part
    is given that, it may take the memory.

    Attributes:
        record: The call.
        is_over: Whether there are no more steps to take.
    """

    def __init__(
        self, record: FlowRecord, dispatch: Dispatch, buffers: Buffers, parts: Parts
    ) -> None:
        self.record = record
        self.is_over = False
        self._known = record.known
        self._dispatch = dispatch
        self._buffers = buffers
        self._parts = parts
        self._counts: Counter[int] = Counter()
        self._own = set(record.given)
        self._num_parts = 0
        self._news: dict[int, Any] = {}  # values and packed errors of what parts made
        self._readers: dict[int, Callable[[Any], None]] = {}
        self._is_landed = False

    def begin(self) -> None:
        """Take the first steps."""
        inputs = [each.buffer.number for each in self.record.args]
        self.advance(self.open(self._known.whole.flow, "", inputs, self._land))

    def over(self, part: Work, fates: Mapping[int, bytes]) -> None:
        """Take note of what a part made."""
        self._num_parts -= 1
        for out in part.outs:
            if out in self.record.held:  # or nobody needs it any more
                self._hear(out, fates.get(out, part.values.get(out)))
        self._end_if_landed()

    def open(
        self,
        flow: Flow,
        where: str,
        inputs: Sequence[int],
        done: Callable[[list[int]], None],
    ) -> _Frame:
        """Return a run of a flow on buffers, which count for it, to be advanced."""
        frame = _Frame(flow, where, done)
        frame.steps_left = list(flow.steps)
        frame.num_open = len(flow.steps)
        for step in flow.steps:
            frame.uses_left.update(_needs(step))
        frame.uses_left.update(flow.results)
        self._bind(frame, range(flow.num_inputs), inputs)
        return frame

    def advance(self, frame: _Frame) -> None:
        """Take each step for which all is there; each part that begins may allow more."""
        while ready := [
            step
            for step in frame.steps_left
            if all(name in frame.env for name in _needs(step))
        ]:
            frame.steps_left = [
                x for x in frame.steps_left if not any(x is y for y in ready)
            ]
            for step in ready:
                self._take(frame, step)
        if frame.num_open == 0:
            frame.num_open = -1  # once
            found = [frame.env[name] for name in frame.flow.results]
            self.hold(found)
            self.use(frame, frame.flow.results)
            frame.done(found)

    def give(
        self, frame: _Frame, step: Choice | Repeat, numbers: Sequence[int]
    ) -> None:
        """Go on after a branch or a loop, with its results, which count for the giver."""
        self._bind(frame, step.outputs, numbers)
        self.drop(numbers)
        frame.num_open -= 1
        self.advance(frame)

    def hold(self, numbers: Iterable[int]) -> None:
        """Count buffers once more."""
        self._counts.update(numbers)

    def drop(self, numbers: Iterable[int]) -> None:
        """Count buffers once less; what is the flow's own goes with its last count."""
        for number in numbers:
            self._counts[number] -= 1
            if self._counts[number]:
                continue
            del self._counts[number]
            self._news.pop(number, None)
            if number in self._own:
                self._own.discard(number)
                self._buffers.unuse(self.record.held.pop(number))

    def use(self, frame: _Frame, names: Sequence[Var]) -> None:
        """Count down what a step has taken."""
        for name, count in Counter(names).items():
            frame.uses_left[name] -= count
            if not frame.uses_left[name]:
                self.drop((frame.env.pop(name),))

    def failed(self, values: Sequence[Value], error: bytes) -> list[int]:
        """Return buffers that will never be, which count for who asks."""
        outs = self._numbers(len(values))
        for buffer in self._parts.outputs(outs, values, self._known.name):
            self._fail(buffer, error)
        self.hold(outs)
        return outs

    def when_known(self, number: int, reader: Callable[[Any], None]) -> None:
        """Call with the value of a buffer, or its packed error, once that came."""
        if number in self._news:
            reader(self._news[number])
        else:
            self._readers[number] = reader

    def _bind(
        self, frame: _Frame, names: Sequence[Var], numbers: Sequence[int]
    ) -> None:
        for name, number in zip(names, numbers, strict=True):
            self.hold((number,))
            if frame.uses_left[name]:
                frame.env[name] = number
            else:
                self.drop((number,))

    def _hear(self, number: int, news: Any) -> None:
        if news is None:
            # Of most there is no news; who decides by one must not wait for ever.
            missing = InvariantError(
                f"a value that decides in program {self._known.name!r} did not come with "
                f"the news of it; report it, as this is a bug"
            )
            news = pack_error(missing) if number in self._readers else b""
        reader = self._readers.pop(number, None)
        if reader is not None:
            reader(news)
        elif number in self.record.held:
            self._news[number] = news

    def _take(self, frame: _Frame, step: Step) -> None:
        match step:
            case Part():
                self._start(frame, step)
                frame.num_open -= 1
            case Choice():
                chooser = frame.env[step.chooser]
                self.when_known(chooser, lambda news: self._choose(frame, step, news))
            case Repeat():
                _Repeated(self, frame, step)

    def _start(self, frame: _Frame, step: Part) -> None:
        numbers = [frame.env[name] for name in step.inputs]
        is_last = [frame.uses_left[name] == 1 for name in step.inputs]
        values = [step.program.value(ref) for ref in step.program.results]
        outs = self._numbers(len(values))
        outputs = self._parts.outputs(outs, values, self._known.name)
        try:
            part = self._part(
                step.program.identity, numbers, is_last, outputs, frame.where
            )
        except TimelyError as error:
            for buffer in outputs:
                self._fail(buffer, pack_error(error))
        else:
            self._num_parts += 1
            part.results = [self._add(each, part.program) for each in outputs]
            self._dispatch.start(part, ())
        self._bind(frame, step.outputs, outs)
        self.use(frame, step.inputs)

    def _part(
        self,
        identity: str,
        numbers: Sequence[int],
        is_last: Sequence[bool],
        outputs: Sequence[Buffer],
        where: str,
    ) -> Work:
        args = [self.record.held[number] for number in numbers]
        may_donate = self._buffers.directory.may_donate
        taken = {
            position
            for position, number in enumerate(numbers)
            if is_last[position]
            and number in self._own
            and self._counts[number] == 1
            and may_donate(self.record.client, args[position])
        }
        known = self._known.parts[identity]
        return self._parts.part(self.record, known, args, outputs, taken, where=where)

    def _choose(self, frame: _Frame, step: Choice, news: Any) -> None:
        if isinstance(news, bytes):
            self.use(frame, _needs(step))
            self.give(frame, step, self.failed(step.values, news))
            return
        value = np.asarray(news).item()
        index = int(bool(value)) if step.is_flag else int(value)
        index = min(max(index, 0), len(step.flows) - 1)
        name = ("false", "true")[index] if step.is_flag else str(index)
        inner = self.open(
            step.flows[index],
            within(f"in branch {name} of {step.place}", frame.where),
            [frame.env[each] for each in step.inputs],
            lambda found: self.give(frame, step, found),
        )
        self.use(frame, _needs(step))
        self.advance(inner)

    def _land(self, numbers: list[int]) -> None:
        """Begin the last part, which gives the outputs their names."""
        self._is_landed = True
        landing = self._known.whole.landing
        if landing is None:
            self._end_if_landed()
            return
        self.is_over = True
        record = self.record
        outputs = [each.buffer for each in record.results]
        is_last = [True] * len(numbers)
        try:
            part = self._part(landing.identity, numbers, is_last, outputs, "")
        except TimelyError as error:
            refused = pack_error(error)
            self._dispatch.cancel(lambda work: work is record, refused)
            return
        part.results = list(record.results)
        record.heir = part
        self._dispatch.start(part, ())
        self.drop(numbers)

    def _end_if_landed(self) -> None:
        if self._is_landed and not self.is_over and not self._num_parts:
            self.is_over = True
            self._dispatch.settle(self.record)

    def _numbers(self, count: int) -> list[int]:
        first = self._buffers.numbers(count)
        return list(range(first, first + count))

    def _add(self, buffer: Buffer, producer: str | None = None) -> Entry:
        """Make a buffer known that is the flow's own."""
        entry = self._buffers.add(NOBODY, buffer, producer)
        self._buffers.directory.use(entry)
        self.record.held[buffer.number] = entry
        self._own.add(buffer.number)
        return entry

    def _fail(self, buffer: Buffer, error: bytes) -> None:
        """Make a buffer known that will never be."""
        self._buffers.fail(self._add(buffer), error)
        self._news[buffer.number] = error


class _Repeated:
    """A loop under way."""

    def __init__(self, run: FlowRun, frame: _Frame, step: Repeat) -> None:
        self._run = run
        self._frame = frame
        self._step = step
        self._num_steps = 0
        numbers = [frame.env[name] for name in step.inputs]
        self._chooser = frame.env[step.chooser]
        self._carried = numbers[: len(step.outputs)]
        self._captured = numbers[len(step.outputs) :]
        run.hold((self._chooser, *numbers))
        run.use(frame, _needs(step))
        run.when_known(self._chooser, self._decide)

    def _decide(self, news: Any) -> None:
        run, step = self._run, self._step
        run.drop((self._chooser,))
        if isinstance(news, bytes):
            self._fail(news)
        elif not np.asarray(news).item():
            run.drop(self._captured)
            run.give(self._frame, step, self._carried)
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
        self._chooser, *self._carried = found
        self._run.when_known(self._chooser, self._decide)

    def _fail(self, error: bytes) -> None:
        run, step = self._run, self._step
        run.drop([*self._carried, *self._captured])
        run.give(self._frame, step, run.failed(step.values, error))


def within(inner: str, outer: str) -> str:
    """Say where something is, from the inside out.

    >>> within("in run 3 of a loop", "in branch 1 of a switch")
    'in run 3 of a loop, in branch 1 of a switch'
    """
    return f"{inner}, {outer}" if outer else inner


def _needs(step: Step) -> tuple[Var, ...]:
    """Return what has to be there for a step, as often as it takes it."""
    if isinstance(step, Part):
        return step.inputs
    return (step.chooser, *step.inputs)


def _endless(step: Repeat) -> ComputationError:
    return ComputationError(
        f"{step.place} did not end; got a condition that is true after {step.max_steps} "
        f"runs; expected it false by then, as max_steps says; raise max_steps",
        function="while_loop",
        where=step.place,
    )
