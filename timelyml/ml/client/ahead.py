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
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from timelyml.errors import TimelyError
from timelyml.ml.client.batches import Batch, Key, Part
from timelyml.ml.client.handle import Handle
from timelyml.ml.client.inbox import Inbox
from timelyml.ml.client.link import Link
from timelyml.ml.client.releases import Releases
from timelyml.ml.client.slices import Slice
from timelyml.ml.controller.messages import Call, CallProgram, Release
from timelyml.ml.functions import Computation, TracedCall
from timelyml.ml.programs import Program
from timelyml.ml.scheduling import DEFAULT_WINDOW_NS

MAX_CALLS = 128
"""That travel together; to hosts they are blocks, so that others may go in between."""

PIECE_CALLS = 16
"""Of a sequence that has not come before, such parts may have."""

BATCH_S = 2e-3
"""Device time that these may take together: whoever waits for one waits for all of them.
By the pace at which they end, which includes what they cost and what others run, a client
would collect the fewer, the slower they are, and have them cost the more."""

BATCH_ALONE_S = 16e-3
"""The same of a client that has its devices for itself: what calls on many devices share
would else be shared by few of them."""

MIN_UNDER_WAY = 16
"""Calls that keep devices busy while others are collected."""

SHORT_S = 100e-6
"""Calls of a client that has its devices for itself and that take no longer are
collected once four are under way: to send one costs more than all of these."""

MAX_CALL_S = 2e-3
"""Calls that take longer go alone; what they cost is little to that."""

SMALL_BYTES = 1 << 16
"""Of all arguments and results; larger ones may have to be spilled one by one."""

DELAY_S = 1e-3
"""How long a call is kept for others to join it, while devices may need it."""

MAX_DELAY_S = 1e-3
"""How long while what is under way keeps devices busy: a client that holds calls back for
longer is not there when its turn comes."""

MAX_DELAY_FAR_S = 8e-3
"""The same where nobody else takes turns, or enough is under way for the turns to come."""

FAR_S = MAX_DELAY_FAR_S + DEFAULT_WINDOW_NS / 1e9
"""Device time that is enough: some of it may be ordered already."""

YIELD_S = 5e-4
"""How long a client waits after a call while enough long ones are under way. Where the
controller is a thread of the client's process, it would wait ten times as long for its
turn otherwise, and devices for what is next."""

HANDOVER_S = 1e-6
"""The same after calls that fill what may travel together. The controller would get its
turn in that process only once the interpreter takes it from the client, after 5 ms, in
which devices have long done all that they were given."""

MAX_SEQUENCES = 64
"""That are remembered; programs whose calls never come in the same order need none."""


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
        # Taken again by who registers a program while it sends what was collected.
        self._lock = threading.RLock()
        self._batch: Batch | None = None
        self._most_before = 0
        # Of each sequence that came, its program; None until it comes again.
        self._numbers: dict[Key, int | None] = {}
        self._given_back: set[str] = set()
        self._may_travel: dict[str, bool] = {}  # of computations, by identity
        self._bell: SimpleQueue[bool] = SimpleQueue()
        self._is_closed = threading.Event()
        self._sender: threading.Thread | None = None
        weakref.finalize(self, self._bell.put, False)

    def takes(self, call: TracedCall) -> bool:
        """Whether a call may be added; if not, what was collected is sent."""
        inbox = self._inbox
        if (
            inbox.num_unfinished >= self._least()
            and 0 < inbox.call_s <= MAX_CALL_S
            and not call.order  # what comes in between is on other slices
            and call.slice.name not in self._given_back
            and self._fits(call)
        ):
            return True
        self.flush()
        return False

    def _least(self) -> int:
        """Return how many calls have to be under way before others are collected."""
        inbox = self._inbox
        is_short = inbox.is_alone and inbox.call_s <= SHORT_S
        return MIN_UNDER_WAY // 4 if is_short else MIN_UNDER_WAY

    def _most(self) -> int:
        """Return how many calls may travel together."""
        inbox = self._inbox
        if inbox.is_alone:
            most = _most_at(inbox.call_s, BATCH_ALONE_S, self._most_before)
        else:
            most = _most_at(inbox.call_s, BATCH_S)
        self._most_before = most
        return most

    def _fits(self, call: TracedCall) -> bool:
        """Whether a call could be part of a program that takes handles where they lie."""
        computation, slice_ = call.computation, call.slice
        may_travel = self._may_travel.get(computation.identity)
        if may_travel is None:
            may_travel = _may_travel(computation)
            self._may_travel[computation.identity] = may_travel
        if not may_travel:
            return False
        for each, spec in zip(call.operands, computation.in_specs, strict=True):
            if (
                type(each) is not Handle
                or each.slice is not slice_
                or each.spec != spec
            ):
                return False
        return True

    def add(
        self,
        slice_: Slice,
        computation: Computation,
        operands: Sequence[Handle],
        results: Sequence[Handle],
    ) -> None:
        """Take a call; it is sent before devices have nothing else to do."""
        with self._lock:
            batch = self._batch
            # What is full goes only now: by this time `x` of `x = f(x)` is let go of.
            if batch is not None and (
                batch.slice is not slice_ or len(batch.calls) >= batch.most
            ):
                self._send()
                if self._link.shares_process:
                    time.sleep(HANDOVER_S)
            if self._batch is None:
                most = self._most()
                self._batch = Batch(slice_, most, time.monotonic())
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
        """Send what was collected; if another thread is at it, wait until it went.

        Raises:
            TimelyError: Nothing can be sent any more.
        """
        with self._lock:
            self._send()

    def flush_late(self) -> None:
        """Send what has been kept long enough; what was not is looked at again."""
        inbox = self._inbox
        with self._lock:
            if self._batch is None:
                return
            age_s = time.monotonic() - self._batch.began_s
            is_needed = inbox.num_unfinished * inbox.pace_s < 2 * DELAY_S
            is_far = inbox.is_alone or inbox.num_unfinished * inbox.call_s >= FAR_S
            longest_s = MAX_DELAY_FAR_S if is_far else MAX_DELAY_S
            if age_s >= (DELAY_S if is_needed else longest_s):
                self._send()
            else:
                self._ring()

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
        if self._sender is not None:
            self._sender.join()

    def _send_now(self, message: object) -> None:
        self._inbox.check()
        self._link.send(message)

    def _start_now(self, message: object, num_calls: int = 1) -> None:
        is_program = num_calls == 1 and not isinstance(message, Call)
        self._inbox.begin_call(num_calls, is_program=is_program)
        self._releases.flush()
        self._send_now(message)
        inbox = self._inbox
        if inbox.num_unfinished >= MIN_UNDER_WAY and inbox.pace_s > MAX_CALL_S:
            time.sleep(YIELD_S)

    def _send(self) -> None:
        batch, self._batch = self._batch, None
        if batch is not None:
            self._send_all(batch)
            del batch
            self._releases.flush()  # what nobody but these calls held needs room no more

    def _send_all(self, batch: Batch) -> None:
        # Whoever is held until all is sent is let go after that, and not before.
        handles = [ref() for ref in batch.results]
        held = {x.buffer for x in handles if x is not None and not x.is_deleted()}
        named: list[int] = []
        start, num_left = 0, len(batch.calls)
        with self._releases.sending(batch.made, held):
            while num_left:  # sizes of which there are few, so that they come again
                size = 1 << (num_left.bit_length() - 1)
                named += self._send_part(batch, start, start + size, held)
                start, num_left = start + size, num_left - size
        # That they went may have been told already, when nobody knew of them.
        gone = [each for each in named if each not in held]
        if gone:
            self._send_now(Release(tuple(gone)))
        del handles

    def _send_part(
        self, batch: Batch, start: int, stop: int, held: set[int]
    ) -> list[int]:
        """Send calls as one program, or in smaller parts; return what has a name now."""
        size = stop - start
        part = Part(batch, start, stop, held)
        number = self._program_of(batch, part) if size > 1 and part.outs else None
        if number is not None:
            self._start_now(CallProgram(number, part.inputs, part.outs), size)
            return list(part.outs)
        if size > PIECE_CALLS:
            middle = start + size // 2
            first = self._send_part(batch, start, middle, held)
            return first + self._send_part(batch, middle, stop, held)
        for computation, args, outs in part.calls:
            name = batch.slice.name
            self._start_now(Call(computation.identity, name, args, outs))
        return [out for _, _, outs in part.calls for out in outs]

    def _program_of(self, batch: Batch, part: Part) -> int | None:
        """Return the program of a sequence of calls that came before."""
        key = part.key(batch)
        if key not in self._numbers:
            if len(self._numbers) < MAX_SEQUENCES:
                self._numbers[key] = None
            return None
        number = self._numbers[key]
        if number is None:
            number = self._register(part.program(batch))
            self._numbers[key] = number
        return number

    def _ring(self) -> None:
        if self._sender is None:
            self._sender = threading.Thread(
                target=_serve,
                args=(weakref.ref(self), self._bell, self._is_closed),
                name="timelyml-ahead",
                daemon=True,
            )
            self._sender.start()
        if self._bell.empty():
            self._bell.put(True)


def _most_at(call_s: float, most_s: float, before: int = 0) -> int:
    """Return how many calls may travel together; few numbers, so that they come again.

    What was right before stays so until calls take half as long again: each other number
    is a program more that has to be made.

    >>> _most_at(10e-6, 2e-3), _most_at(100e-6, 2e-3), _most_at(1.2e-3, 2e-3)
    (128, 16, 2)
    >>> _most_at(140e-6, 2e-3, before=16), _most_at(200e-6, 2e-3, before=16)
    (16, 8)
    """
    most = MAX_CALLS
    while most > 2 and most * call_s > most_s:
        most //= 2
    return before if most < before and before * call_s <= 1.5 * most_s else most


def _may_travel(computation: Computation) -> bool:
    """Whether calls of a computation may wait for others, and go with them."""
    if computation.donated or computation.has_effects:
        return False
    types = (*computation.in_types, *computation.out_types)
    return sum(each.size_bytes for each in types) <= SMALL_BYTES


def _serve(
    owner: weakref.ref[Ahead], bell: SimpleQueue[bool], is_closed: threading.Event
) -> None:
    while bell.get() and not is_closed.wait(DELAY_S):
        ahead = owner()
        if ahead is None:
            return
        try:
            ahead.flush_late()
        except TimelyError:  # the client hears of the end by itself
            return
        del ahead
