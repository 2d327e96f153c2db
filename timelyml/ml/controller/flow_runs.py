"""A call of a flow under way: which steps are taken, and what their variables are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from timelyml.errors import InvariantError, TimelyError
from timelyml.ml.controller.buffers import Buffers
from timelyml.ml.controller.dispatching import Dispatch
from timelyml.ml.controller.flow_calls import FlowRecord
from timelyml.ml.controller.flow_frames import (
    Control,
    Frame,
    Parts,
    Trail,
    branch_name,
    needs,
    within,
)
from timelyml.ml.controller.flow_loops import Repeated, Replayed
from timelyml.ml.controller.flow_scatters import Scattered
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
from timelyml.ml.programs.sparse import Matrix
from timelyml.ml.store import NOBODY, Buffer, Entry
from timelyml.runtime.failure import pack_error

MAX_PARTS_AHEAD = 8
"""Parts of a flow under way, beyond which no more runs of a way back begin."""


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
        self._trails: dict[int, Trail] = {}
        self._num_trails = 0
        self._num_parts = 0
        self._waiters: list[Callable[[], None]] = []
        self._news: dict[int, Any] = {}  # values and packed errors of what parts made
        self._readers: dict[int, Callable[[Any], None]] = {}
        self._is_ending = False

    def begin(self) -> None:
        """Take the first steps."""
        for number in self._own:  # which the client does not hold any more
            entry = self.record.held[number]
            self._buffers.directory.charge(entry, self.record.client)
        inputs = [each.buffer.number for each in self.record.args]
        self.advance(self.open(self._known.whole.flow, "", inputs, self._finish))

    def over(self, part: Work, errors: Mapping[int, bytes]) -> None:
        """Take note of what a part made."""
        self._num_parts -= 1
        for out in part.outs:
            if out in self.record.held:  # or nobody needs it any more
                self._hear(out, errors.get(out, part.values.get(out)))
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter()
        self._end_if_over()

    def open(
        self,
        flow: Flow,
        where: str,
        inputs: Sequence[int],
        done: Callable[[list[int]], None],
    ) -> Frame:
        """Return a run of a flow on buffers, which count for it, to be advanced."""
        frame = Frame(flow, where, done)
        frame.steps_left = list(flow.steps)
        frame.num_open = len(flow.steps)
        for step in flow.steps:
            frame.uses_left.update(needs(step))
        frame.uses_left.update(flow.results)
        self._bind(frame, range(flow.num_inputs), inputs)
        return frame

    def advance(self, frame: Frame) -> None:
        """Take each step for which all is there; each part that begins may allow more."""
        while ready := [
            step
            for step in frame.steps_left
            if all(name in frame.env for name in needs(step))
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

    def give(self, frame: Frame, step: Control, numbers: Sequence[int]) -> None:
        """Go on after a branch or a loop, with its results, which count for the giver."""
        self._bind(frame, step.outputs, numbers)
        self.drop(numbers)
        frame.num_open -= 1
        self.advance(frame)

    def scatter(self, frame: Frame, step: Scatter, matrix: Matrix) -> None:
        """Move rows as a matrix says, and go on."""
        if step.max_rows is not None:
            self._dispatch.device_time.routed(self.record.client, matrix.sum(0))
        self._start(frame, step.part, matrix)
        self.use(frame, step.matrix)
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
            trail = self._trails.pop(number, None)
            if trail is not None:
                for kept in trail.runs:
                    self.drop(kept)
            if number in self._own:
                self._own.discard(number)
                self._buffers.unuse([self.record.held.pop(number)])

    def use(self, frame: Frame, names: Sequence[Var]) -> None:
        """Count down what a step has taken."""
        for name, count in Counter(names).items():
            frame.uses_left[name] -= count
            if not frame.uses_left[name]:
                self.drop((frame.env.pop(name),))

    def failed(self, values: Sequence[Value], error: bytes) -> list[int]:
        """Return buffers that will never be, which count for who asks."""
        outs = list(self._buffers.numbers(len(values)))
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

    def may_go_on(self, waiter: Callable[[], None]) -> bool:
        """Return whether more may begin; if not, the waiter is called when it may.

        Every part that has begun is a program that waits, of which a client may have
        only so many, and which other clients' programs are ordered between.
        """
        if self._num_parts < MAX_PARTS_AHEAD:
            return True
        self._waiters.append(waiter)
        return False

    def kept(self, trail: Trail) -> int:
        """Return the number of a trail, which counts once; no buffer has it."""
        self._num_trails += 1
        number = -self._num_trails
        self._trails[number] = trail
        self.hold((number,))
        return number

    def taken(self, number: int) -> Trail:
        """Return a trail that counted once for who asks; now what it keeps does."""
        trail = self._trails[number]
        found = replace(trail, runs=[list(kept) for kept in trail.runs])
        for kept in found.runs:
            self.hold(kept)
        self.drop((number,))
        return found

    def _bind(self, frame: Frame, names: Sequence[Var], numbers: Sequence[int]) -> None:
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

    def _take(self, frame: Frame, step: Step) -> None:
        match step:
            case Part():
                self._start(frame, step)
                frame.num_open -= 1
            case Choice() if step.is_replayed:
                self._go_back(frame, step)
            case Choice():
                chooser = frame.env[step.chooser]
                self.when_known(chooser, lambda news: self._choose(frame, step, news))
            case Repeat():
                (Replayed if step.is_replayed else Repeated)(self, frame, step)

            case Scatter():
                Scattered(self, frame, step)

    def _start(self, frame: Frame, step: Part, matrix: Any = None) -> None:
        numbers = [frame.env[name] for name in step.inputs]
        is_last = [frame.uses_left[name] == 1 for name in step.inputs]
        values = [step.program.value(ref) for ref in step.program.results]
        outs = list(self._buffers.numbers(len(values)))
        outputs = self._parts.outputs(outs, values, self._known.name)
        try:
            part = self._part(
                step.program.identity,
                numbers,
                is_last,
                outputs,
                frame.where,
                matrix=matrix,
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
        *,
        matrix: Any = None,
    ) -> Work:
        args = [self.record.held[number] for number in numbers]
        client, may_donate = self.record.client, self._buffers.directory.may_donate
        passing = [
            position
            for position, number in enumerate(numbers)
            if is_last[position] and number in self._own and self._counts[number] == 1
        ]
        if not self._is_ending:  # else it makes what the client was charged for before
            passed = (numbers[position] for position in passing)
            self._buffers.admission.check_bytes(client, outputs, passed)
        taken = {each for each in passing if may_donate(client, args[each])}
        known = self._known.parts[identity]
        return self._parts.part(
            self.record, known, args, outputs, taken, where=where, matrix=matrix
        )

    def _choose(self, frame: Frame, step: Choice, news: Any) -> None:
        if isinstance(news, bytes):
            self.use(frame, needs(step))
            self._give_up(frame, step, news)
            return
        value = np.asarray(news).item()
        index = int(bool(value)) if step.is_flag else int(value)
        index = min(max(index, 0), len(step.flows) - 1)

        def done(found: list[int]) -> None:
            if step.is_recorded:
                count = len(step.values)
                trail = Trail([found[count:]], index)
                found = [*found[:count], self.kept(trail)]
            self.give(frame, step, found)

        self._branch(frame, step, index, (), done)

    def _go_back(self, frame: Frame, step: Choice) -> None:
        number = frame.env[step.chooser]
        self.hold((number,))
        trail = self.taken(number)
        if trail.error is not None:
            self.use(frame, needs(step))
            self._give_up(frame, step, trail.error)
            return
        (kept,) = trail.runs
        self._branch(
            frame, step, trail.index, kept, lambda found: self.give(frame, step, found)
        )

    def _branch(
        self,
        frame: Frame,
        step: Choice,
        index: int,
        kept: Sequence[int],
        done: Callable[[list[int]], None],
    ) -> None:
        """Run a flow of a branch; what it is given beside its inputs goes with it."""
        where = f"in branch {branch_name(step, index)} of {step.place}"
        inputs = [*(frame.env[each] for each in step.inputs), *kept]
        place = within(where, frame.where)
        inner = self.open(step.flows[index], place, inputs, done)
        self.drop(kept)
        self.use(frame, needs(step))
        self.advance(inner)

    def _give_up(self, frame: Frame, step: Choice, error: bytes) -> None:
        found = self.failed(step.values, error)
        if step.is_recorded:
            found.append(self.kept(Trail([], error=error)))
        self.give(frame, step, found)

    def _finish(self, numbers: list[int]) -> None:
        """Begin the last part, which gives the outputs their names."""
        self._is_ending = True
        final_part = self._known.whole.final_part
        if final_part is None:
            self._end_if_over()
            return
        self.is_over = True
        record = self.record
        outputs = [each.buffer for each in record.results]
        is_last = [True] * len(numbers)
        try:
            part = self._part(final_part.identity, numbers, is_last, outputs, "")
        except TimelyError as error:
            refused = pack_error(error)
            self._dispatch.cancel(lambda work: work is record, refused)
            return
        part.results = list(record.results)
        record.final_part = part
        self._dispatch.start(part, ())
        self.drop(numbers)

    def _end_if_over(self) -> None:
        if self._is_ending and not self.is_over and not self._num_parts:
            self.is_over = True
            self._dispatch.settle(self.record)

    def _add(self, buffer: Buffer, producer: str | None = None) -> Entry:
        """Make a buffer known that is the flow's own."""
        (entry,) = self._buffers.add(NOBODY, [buffer], producer)
        self._buffers.directory.charge(entry, self.record.client)
        self._buffers.directory.use([entry])
        self.record.held[buffer.number] = entry
        self._own.add(buffer.number)
        return entry

    def _fail(self, buffer: Buffer, error: bytes) -> None:
        """Make a buffer known that will never be."""
        self._buffers.fail(self._add(buffer), error)
        self._news[buffer.number] = error
