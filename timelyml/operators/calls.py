"""Calls outside of the worker's thread: on an asyncio loop, or on threads of their own.

A `Calls` belongs to one operator on one worker. It is made where it is used: pickled,
it is only its description. The worker's thread submits and takes; threads in here run
the user's function, and wake the shard that asked when something is finished.
"""

from __future__ import annotations

import inspect
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from timelyml.operators.loop_thread import LoopThread

Wake = Callable[[], None]


class Finished(NamedTuple):
    """What has become of one call: a result, or an error, be it an exit."""

    ticket: int
    result: Any
    error: BaseException | None


class Calls(Protocol):
    """Something that runs calls elsewhere; `num_out` are not yet taken back."""

    num_out: int

    def submit(self, completions: CompletionQueue, ticket: int, record: Any) -> None:
        """Start a call."""

    def look(self) -> float | None:
        """Give up calls that take too long; returns when to look again."""

    def close(self) -> None:
        """Give up all calls, and end the threads."""


class CompletionQueue:
    """Where the finished calls of one shard wait to be taken."""

    def __init__(self, wake: Wake) -> None:
        self._wake = wake
        self._finished: deque[Finished] = deque()

    def put(self, finished: Finished) -> None:
        """Add a finished call, from any thread."""
        self._finished.append(finished)
        if len(self._finished) == 1:  # else a wake is under way already
            self._wake()

    def take(self) -> list[Finished]:
        """Remove and return what is finished."""
        return [self._finished.popleft() for _ in range(len(self._finished))]


def calls_of(fn: Callable[[Any], Any], limit: int, timeout_s: float | None) -> Calls:
    """Return what runs `fn`: a coroutine function on a loop, another on threads."""
    call = getattr(fn, "__call__", None)  # noqa: B004  of an object with async __call__
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(call):
        return LoopCalls(fn, timeout_s)
    return ThreadCalls(fn, limit, timeout_s)


def _too_late(timeout_s: float | None) -> TimeoutError:
    return TimeoutError(f"a call took longer than {timeout_s:g} s")


class LoopCalls:
    """Runs coroutines on an asyncio loop."""

    def __init__(self, fn: Callable[[Any], Any], timeout_s: float | None) -> None:
        self.num_out = 0
        self._fn = fn
        self._timeout_s = timeout_s
        self._loop = LoopThread()

    def __reduce__(self) -> tuple[Any, ...]:
        return LoopCalls, (self._fn, self._timeout_s)

    def submit(self, completions: CompletionQueue, ticket: int, record: Any) -> None:
        """Start a call."""
        self.num_out += 1
        self._loop.start(lambda: self._call(completions, ticket, record))

    def look(self) -> float | None:
        """Do nothing: the loop minds the time."""
        return None

    def close(self) -> None:
        """Cancel all calls and end the loop."""
        self._loop.close()

    async def _call(
        self, completions: CompletionQueue, ticket: int, record: Any
    ) -> None:
        import asyncio  # noqa: PLC0415  loaded by the loop already

        result: Any = None
        error: BaseException | None = None
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                result = await self._fn(record)
        except TimeoutError as caught:
            error = _too_late(self._timeout_s) if limit.expired() else caught
        except BaseException as caught:  # noqa: BLE001  or the loop would end, and nobody know
            error = caught
        completions.put(Finished(ticket, result, error))


class _PoolThread:
    """One thread of a pool and what it works on."""

    def __init__(self) -> None:
        self.began = 0.0
        self.work: tuple[CompletionQueue, int] | None = None
        self.is_given_up = False


class ThreadCalls:
    """Runs plain functions on at most `limit` threads, started as they are needed.

    A call that takes too long cannot be ended: its thread is left to itself, and
    another takes its place.
    """

    def __init__(
        self, fn: Callable[[Any], Any], limit: int, timeout_s: float | None
    ) -> None:
        self.num_out = 0
        self._fn = fn
        self._limit = limit
        self._timeout_s = timeout_s
        self._waiting: queue.SimpleQueue[tuple[CompletionQueue, int, Any] | None] = (
            queue.SimpleQueue()
        )
        self._threads: list[_PoolThread] = []
        self._lock = threading.Lock()  # between an end and giving up

    def __reduce__(self) -> tuple[Any, ...]:
        return ThreadCalls, (self._fn, self._limit, self._timeout_s)

    def submit(self, completions: CompletionQueue, ticket: int, record: Any) -> None:
        """Start a call."""
        self.num_out += 1
        self._waiting.put((completions, ticket, record))
        if len(self._threads) < min(self._limit, self.num_out):
            self._add_thread()

    def look(self) -> float | None:
        """Give up calls that take too long; returns the seconds to the next look."""
        if self._timeout_s is None or not self.num_out:
            return None
        now = time.monotonic()
        for thread in list(self._threads):
            with self._lock:
                work = thread.work
                if work is None or now - thread.began < self._timeout_s:
                    continue
                thread.is_given_up = True
            self._threads.remove(thread)
            completions, ticket = work
            completions.put(Finished(ticket, None, _too_late(self._timeout_s)))
            self._add_thread()
        return self._timeout_s / 4

    def close(self) -> None:
        """Start nothing more; threads end with what they are at."""
        while not self._waiting.empty():
            self._waiting.get()
        for _ in self._threads:
            self._waiting.put(None)

    def _add_thread(self) -> None:
        thread = _PoolThread()
        self._threads.append(thread)
        name = "timelyml-call"
        threading.Thread(
            target=self._serve, args=(thread,), name=name, daemon=True
        ).start()

    def _serve(self, thread: _PoolThread) -> None:
        while not thread.is_given_up:
            order = self._waiting.get()
            if order is None:
                return
            completions, ticket, record = order
            thread.began = time.monotonic()
            thread.work = completions, ticket
            finished = self._call(ticket, record)
            with self._lock:
                thread.work = None
                if thread.is_given_up:
                    return
            completions.put(finished)

    def _call(self, ticket: int, record: Any) -> Finished:
        try:
            result = self._fn(record)
            if inspect.iscoroutine(result):
                result.close()
                msg = "the function returned a coroutine; define it with async def"
                raise TypeError(msg)  # noqa: TRY301  as if the user's function had
        except BaseException as error:  # noqa: BLE001  or the thread would end, and nobody know
            return Finished(ticket, None, error)
        return Finished(ticket, result, None)
