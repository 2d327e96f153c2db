"""What a client has heard: which values are there, what they are, what was answered."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from timelyml.errors import DeadlineError, TimelyError
from timelyml.ml.client.elements import assembled
from timelyml.ml.client.handle import Handle
from timelyml.ml.controller.code_messages import NotCompiled
from timelyml.ml.controller.messages import (
    ANSWERS,
    Closed,
    Failed,
    Fetched,
    Finished,
    Refused,
)
from timelyml.ml.controller.resource_messages import Moved
from timelyml.runtime.failure import unpack_error

SEEN_CALLS = 64
"""How many calls are looked at to tell how long one takes; more or less."""


class Inbox:
    """Takes what the controller says, and lets threads wait for it.

    Args:
        max_unfinished_calls: How far a client runs ahead.
        on_slice: Called when a slice stands elsewhere, or something cannot be compiled
            for it; quick.
    """

    def __init__(
        self,
        max_unfinished_calls: int,
        on_slice: Callable[[Moved | NotCompiled], None] = lambda _: None,
    ) -> None:
        self._on_slice = on_slice
        self.max_unfinished_calls = max_unfinished_calls
        self._changed = threading.Condition()
        # Of coroutines that wait: what for, and what lets them go on.
        self._listeners: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        # Each until it is forgotten: a weak dictionary takes 1 us more for every call.
        self._handles: dict[int, weakref.ref[Handle]] = {}
        self._unasked: dict[int, None] = {}  # put, and nobody waited for them
        self._answers: dict[int, Any] = {}
        self._fetching: set[int] = set()
        self._num_unfinished = 0
        # Of messages under way: calls in each, and whether it is a program's.
        self._weights: deque[tuple[int, bool]] = deque()
        self._finished_at = 0.0
        self.pace_s = 0.0
        """How long it takes on average from the end of a call to that of the next, of
        those that follow one another; 0 if that is not known."""
        self.call_s = 0.0
        """Device time of a call on average; 0 if that is not known."""
        self.is_alone = False
        """Whether no other client has run anything where the last calls ran."""
        self._end: TimelyError | None = None  # why nothing will be answered any more

    @property
    def is_open(self) -> bool:
        """Whether anything may still be heard."""
        return self._end is None

    def check(self) -> None:
        """Raise why nothing will be answered any more, if so."""
        if self._end is not None:
            raise self._end

    def add(self, handles: Iterable[Handle]) -> None:
        """Take news of handles from now on, as long as anybody else holds them."""
        self._handles.update({each.buffer: weakref.ref(each) for each in handles})

    def put(self, handle: Handle) -> None:
        """Take note that news of a handle come only if they are asked for."""
        self._unasked[handle.buffer] = None

    def asked(self, handle: Handle) -> None:
        """Take note that news of a handle come."""
        self._unasked.pop(handle.buffer, None)

    def unasked(self, most: int) -> list[Handle]:
        """Return handles of what was put of which nobody asked news, the first ones."""
        found = map(self.get, list(self._unasked)[:most])
        return [each for each in found if each is not None]

    def forget(self, handle: Handle) -> None:
        """Take note that nobody holds a handle any more; from any thread."""
        found = self._handles.get(handle.buffer)
        there = None if found is None else found()
        if there is None or there is handle:  # else the number has another by now
            self._handles.pop(handle.buffer, None)
            self._unasked.pop(handle.buffer, None)

    def get(self, buffer: int) -> Handle | None:
        """Return the handle of a buffer, if anybody holds it."""
        found = self._handles.get(buffer)
        return None if found is None else found()

    @property
    def num_unfinished(self) -> int:
        """Calls that are not over."""
        return self._num_unfinished

    def begin_call(self, num_calls: int = 1, *, is_program: bool = False) -> None:
        """Count one more message of so many calls, once there are few enough.

        Args:
            num_calls: Of computations, all alike in how long they take.
            is_program: Whether it is none of these, but a program, that may take longer.
        """
        with self._changed:
            while self._num_unfinished >= self.max_unfinished_calls and self.is_open:
                self._changed.wait()
            if not self._weights:
                self._finished_at = time.monotonic()
            self._num_unfinished += num_calls
            self._weights.append((num_calls, is_program))

    def begin_fetch(self, handle: Handle) -> bool:
        """Note that the elements of a value are asked for; False if they were."""
        with self._changed:
            if handle.buffer in self._fetching or handle.is_known():
                return False
            self._fetching.add(handle.buffer)
            return True

    def wait(
        self, is_over: Callable[[], bool], timeout_s: float | None, what: str
    ) -> None:
        """Wait until something was heard.

        Raises:
            DeadlineError: It was not in time.
            TimelyError: Nothing is heard any more.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not is_over():
                self.check()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise DeadlineError(
                        f"{what} did not come in time; got none after {timeout_s} s; "
                        f"expected it by then; wait longer",
                        timeout_s=timeout_s,
                    )
                self._changed.wait(left)

    async def heard(self, is_over: Callable[[], bool]) -> None:
        """Wait in a coroutine until something was heard, or nothing is heard any more."""
        listener = is_over, asyncio.get_running_loop().create_future()
        with self._changed:
            if is_over() or not self.is_open:
                return
            self._listeners.append(listener)
        try:
            await listener[1]
        finally:  # of a cancelled wait nothing is left
            with self._changed, contextlib.suppress(ValueError):
                self._listeners.remove(listener)

    def answer_to(self, request: int, what: str, timeout_s: float | None = None) -> Any:
        """Wait for the answer to a request.

        Raises:
            DeadlineError: It was not in time.
            TimelyError: It was refused, or nothing is heard any more.
        """
        self.wait(lambda: request in self._answers, timeout_s, what)
        answer = self._answers.pop(request)
        if isinstance(answer, Refused):
            raise unpack_error(answer.error)
        return answer

    def receive(self, message: Any) -> None:
        """Take what the controller says; called in a thread of the link."""
        with self._changed:
            if isinstance(message, ANSWERS):
                self._answers[message.request] = message
            match message:
                case Finished():
                    self._on_finished(message)
                case Failed():
                    self._end_calls(message.num_calls)
                    self._fail(message.buffers, message.error)
                case Fetched():
                    self._on_fetched(message)
                case Moved() | NotCompiled():
                    self._on_slice(message)
                case Closed():
                    self._end = self._end or unpack_error(message.error)
            self._changed.notify_all()
            if self._listeners:
                self._tell_coroutines()

    def _tell_coroutines(self) -> None:
        """Let those go on that wait no longer."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            is_over, future = listener
            if self.is_open and not is_over():
                self._listeners.append(listener)
                continue
            with contextlib.suppress(RuntimeError):  # its loop was closed
                future.get_loop().call_soon_threadsafe(_settle, future)

    def _on_finished(self, message: Finished) -> None:
        ended = self._end_calls(message.num_calls)
        if ended:
            self.is_alone = message.is_alone
            # Whatever calls waited for, this is what they took: the first says it all.
            call_s = message.device_ns / 1e9 / ended
            before_s = self.call_s or call_s
            self.call_s = before_s + (call_s - before_s) / 4
        for buffer in message.buffers:
            handle = self.get(buffer)
            if handle is not None:
                handle.take()
        for buffer, value in message.values:
            handle = self.get(buffer)
            if handle is not None:
                handle.take(value)

    def _end_calls(self, num_messages: int) -> int:
        """Count messages whose calls are over, on one slice in the order of sending.

        Returns:
            How many calls they were; 0 if not all of them were calls.
        """
        messages = [self._weights.popleft() for _ in range(num_messages)]
        ended = sum(num_calls for num_calls, _ in messages)
        if not ended:
            return 0
        self._num_unfinished -= ended
        now = time.monotonic()
        pace_s = (now - self._finished_at) / ended
        self._finished_at = now
        if any(is_program for _, is_program in messages):
            return 0
        self.pace_s += (pace_s - self.pace_s) * _weight_of(ended)
        return ended

    def _on_fetched(self, message: Fetched) -> None:
        self._fetching.discard(message.buffer)
        if message.error is not None:
            self._fail((message.buffer,), message.error)
            return
        handle = self.get(message.buffer)
        if handle is not None:
            handle.take(assembled(handle.type, message.pieces))

    def _fail(self, buffers: Sequence[int], packed: bytes) -> None:
        for buffer in buffers:
            handle = self.get(buffer)
            if handle is not None:
                handle.fail(unpack_error(packed))


def _weight_of(num_calls: int) -> float:
    """Return how much news of calls counts.

    A single call, which may have waited for anything, says less than many.
    """
    return min(1 / 4, num_calls / SEEN_CALLS)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():  # as by a cancellation
        future.set_result(None)
