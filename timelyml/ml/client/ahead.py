"""Calls that run ahead of replies: small ones travel together, as one program.

While enough of a client's calls are under way to keep devices busy, a call need not go
off at once. Calls on one slice are then collected, and a sequence of them that comes
again, as the body of a loop does, is registered as a program and called by its number:
one small message, and one entry in the controller, for all of them. Values that nobody
holds any more by then have no name outside of it. Each computation is launched as it
would be alone, so results are the same bits.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeAlias

from timelyml.errors import TimelyError
from timelyml.ml.client.handle import Handle
from timelyml.ml.client.inbox import Inbox
from timelyml.ml.client.link import Link
from timelyml.ml.client.releases import Releases
from timelyml.ml.client.slices import Slice
from timelyml.ml.controller.messages import Call, CallProgram, Release
from timelyml.ml.functions import Computation, TracedCall
from timelyml.ml.functions.specs import logical_mesh
from timelyml.ml.programs import Arg, Program, Ref, SliceNode, Value
from timelyml.ml.programs import Call as CallNode

MAX_CALLS = 16
"""That travel together: as many as hosts launch without a look at anything else."""

BATCH_S = 4e-3
"""How long these may take together; whoever waits for one waits for all of them."""

MIN_UNDER_WAY = 16
"""Calls that keep devices busy while others are collected."""

MAX_PACE_S = BATCH_S / 2
"""Calls that take longer go alone; what they cost is little to that."""

SMALL_BYTES = 1 << 16
"""Of all arguments and results; larger ones may have to be spilled one by one."""

DELAY_S = 1e-3
"""How long a call is kept for others to join it."""

MAX_SEQUENCES = 64
"""That are remembered; programs whose calls never come in the same order need none."""

_Operand: TypeAlias = tuple[int, int]
"""A call of the batch and which of its results; or -1 and a place among the inputs."""

_Sequence: TypeAlias = tuple[object, ...]


@dataclass(slots=True)
class _Batch:
    """Calls that were collected, all on one slice.

    Attributes:
        most: How many calls it may become.
        calls: Of each, the computation and where its operands come from.
        inputs: Handles that come from outside, each once.
        results: Of each call, its handles; whoever wants them holds them.
        numbers: Of these, their buffers.
        made: Where a buffer comes from that is none of the inputs.
    """

    slice: Slice
    most: int
    calls: list[tuple[Computation, tuple[_Operand, ...]]] = field(default_factory=list)
    inputs: dict[int, Handle] = field(default_factory=dict)
    results: list[list[weakref.ref[Handle]]] = field(default_factory=list)
    numbers: list[tuple[int, ...]] = field(default_factory=list)
    made: dict[int, _Operand] = field(default_factory=dict)

    def add(
        self,
        computation: Computation,
        operands: Sequence[Handle],
        results: Sequence[Handle],
    ) -> None:
        """Add a call."""
        found = []
        for each in operands:
            place = self.made.get(each.buffer)
            if place is None:
                self.inputs.setdefault(each.buffer, each)
                place = -1, list(self.inputs).index(each.buffer)
            found.append(place)
        number = len(self.calls)
        self.calls.append((computation, tuple(found)))
        self.results.append([weakref.ref(each) for each in results])
        self.numbers.append(tuple([each.buffer for each in results]))
        for position, each in enumerate(results):
            self.made[each.buffer] = number, position

    def program(self, wanted: Sequence[_Operand]) -> Program:
        """Return the program that these calls are, if so much of them is wanted."""
        num_inputs = len(self.inputs)

        def ref(place: _Operand) -> Ref:
            number, position = place
            return Ref(position) if number < 0 else Ref(num_inputs + number, position)

        args = [
            Arg(position, f"x{position}", Value(each.type, each.spec, self.slice.name))
            for position, each in enumerate(self.inputs.values())
        ]
        calls = [
            CallNode(computation, self.slice.name, tuple(map(ref, operands)))
            for computation, operands in self.calls
        ]
        node = SliceNode(
            self.slice.name, logical_mesh(self.slice.mesh), self.slice.platform
        )
        name = " ".join(dict.fromkeys(each.name for each, _ in self.calls))
        results = tuple(map(ref, wanted))
        return Program(name, (node,), (*args, *calls), results, num_inputs)


class Ahead:
    """Collects calls, and sends them before anything else is sent or waited for.

    Args:
        link: The way to the controller.
        inbox: Knows how many calls are under way, and how long they take.
        releases: Tells of values that nobody holds; what they took may be needed.
        register: Has a program registered; returns its number.
    """

    def __init__(
        self,
        link: Link,
        inbox: Inbox,
        releases: Releases,
        register: Callable[[Program], int],
    ) -> None:
        self._link = link
        self._inbox = inbox
        self._releases = releases
        self._register = register
        self._lock = threading.Lock()
        self._batch: _Batch | None = None
        # Of each sequence that came, its program; None until it comes again.
        self._numbers: dict[_Sequence, int | None] = {}
        self._given_back: set[str] = set()
        self._bell: SimpleQueue[bool] = SimpleQueue()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._bell.put, False)

    def takes(self, call: TracedCall) -> bool:
        """Whether a call may be added; if not, what was collected is sent."""
        inbox = self._inbox
        if (
            inbox.num_unfinished >= MIN_UNDER_WAY
            and inbox.pace_s <= MAX_PACE_S
            and call.slice.name not in self._given_back
            and _may_travel(call)
        ):
            return True
        self.flush()
        return False

    def add(
        self,
        slice_: Slice,
        computation: Computation,
        operands: Sequence[Handle],
        results: Sequence[Handle],
    ) -> None:
        """Take a call; it is sent within a millisecond or so."""
        with self._lock:
            batch = self._batch
            # What is full goes only now: by this time `x` of `x = f(x)` is let go of.
            if batch is not None and (
                batch.slice is not slice_ or len(batch.calls) >= batch.most
            ):
                self._send()
            if self._batch is None:
                self._batch = _Batch(slice_, _most_at(self._inbox.pace_s))
                self._ring()
            self._batch.add(computation, operands, results)

    def send(self, message: object) -> None:
        """Send a message after what was collected.

        Raises:
            TimelyError: Nothing can be sent any more.
        """
        self.flush()
        self._send_now(message)

    def start(self, message: object) -> None:
        """Send what counts as a call; waits while too many are not over.

        Raises:
            TimelyError: Nothing can be sent any more.
        """
        self.flush()
        self._start_now(message)

    def flush(self) -> None:
        """Send what was collected.

        Raises:
            TimelyError: Nothing can be sent any more.
        """
        if self._batch is not None:
            with self._lock:
                self._send()

    def forget(self, slice_: Slice) -> None:
        """Send what was collected, and let calls on a slice go alone from now on."""
        self.flush()
        self._given_back.add(slice_.name)
        with self._lock:
            self._numbers = {
                key: number
                for key, number in self._numbers.items()
                if key[0] != slice_.name
            }

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()
        self._bell.put(False)
        if self._thread is not None:
            self._thread.join()

    def _send_now(self, message: object) -> None:
        self._inbox.check()
        self._link.send(message)

    def _start_now(self, message: object, num_calls: int = 1) -> None:
        self._inbox.begin_call(num_calls)
        self._releases.flush()
        self._send_now(message)

    def _send(self) -> None:
        batch, self._batch = self._batch, None
        if batch is None:
            return
        # Whoever is held until all is sent is let go after that, and not before.
        held = [[ref() for ref in results] for results in batch.results]
        wanted = [
            (number, position)
            for number, results in enumerate(held)
            for position, each in enumerate(results)
            if each is not None and not each.is_deleted()
        ]
        number = self._program_of(batch, wanted)
        if number is None:
            self._send_each(batch, wanted)
        else:
            outs = tuple([batch.numbers[call][position] for call, position in wanted])
            message = CallProgram(number, tuple(batch.inputs), outs)
            self._start_now(message, len(batch.calls))
        del held

    def _program_of(self, batch: _Batch, wanted: Sequence[_Operand]) -> int | None:
        """Return the program of a sequence of calls that came before."""
        if len(batch.calls) < 2 or not wanted:
            return None
        key = (
            batch.slice.name,
            tuple([(each.identity, operands) for each, operands in batch.calls]),
            tuple([(each.type, each.spec) for each in batch.inputs.values()]),
            tuple(wanted),
        )
        if key not in self._numbers:
            if len(self._numbers) < MAX_SEQUENCES:
                self._numbers[key] = None
            return None
        number = self._numbers[key]
        if number is None:
            number = self._register(batch.program(wanted))
            self._numbers[key] = number
        return number

    def _send_each(self, batch: _Batch, wanted: Sequence[_Operand]) -> None:
        inputs = tuple(batch.inputs)
        for (computation, operands), outs in zip(
            batch.calls, batch.numbers, strict=True
        ):
            args = [
                inputs[position] if call < 0 else batch.numbers[call][position]
                for call, position in operands
            ]
            name = batch.slice.name
            self._start_now(Call(computation.identity, name, tuple(args), outs))
        kept = set(wanted)
        # That they went may have been told already, when nobody knew of them.
        gone = [n for n, place in batch.made.items() if place not in kept]
        if gone:
            self._send_now(Release(tuple(gone)))

    def _ring(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve,
                args=(weakref.ref(self), self._bell, self._is_closed),
                name="timelyml-ahead",
                daemon=True,
            )
            self._thread.start()
        if self._bell.empty():
            self._bell.put(True)


def _most_at(pace_s: float) -> int:
    """Return how many calls may travel together; few numbers, so that they come again.

    >>> _most_at(60e-6), _most_at(1.2e-3)
    (16, 2)
    """
    most = MAX_CALLS
    while most > 2 and most * pace_s > BATCH_S:
        most //= 2
    return most


def _may_travel(call: TracedCall) -> bool:
    """Whether a call could be part of a program that takes handles where they lie."""
    computation, slice_ = call.computation, call.slice
    if computation.donated or computation.has_effects:
        return False
    size = sum(each.size_bytes for each in computation.in_types)
    size += sum(each.size_bytes for each in computation.out_types)
    return size <= SMALL_BYTES and all(
        isinstance(each, Handle) and each.slice is slice_ and each.spec == spec
        for each, spec in zip(call.operands, computation.in_specs, strict=True)
    )


def _serve(
    owner: weakref.ref[Ahead], bell: SimpleQueue[bool], is_closed: threading.Event
) -> None:
    while bell.get() and not is_closed.wait(DELAY_S):
        ahead = owner()
        if ahead is None:
            return
        try:
            ahead.flush()
        except TimelyError:  # the client hears of the end by itself
            return
        del ahead
