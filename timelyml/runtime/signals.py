"""SIGINT and SIGTERM while the main thread runs a dataflow or waits for one.

The first signal is counted, so that the run can drain; the second raises
KeyboardInterrupt where the main thread is, whatever user code it is in. What must not
be left half done, as the start and the end of workers, is done with signals held back.
Handlers are installed for the duration only, and only over Python's defaults: a program
that handles signals itself keeps doing so.
"""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_EXIT_BASE = 128  # the shell's code for a death by signal


class Interrupts:
    """Context manager that counts signals instead of dying of the first."""

    def __init__(self) -> None:
        self.count = 0
        self._first: int | None = None
        self._handlers = _Handlers(self._note, _replaceable(GuaranteedInterrupt))

    def __enter__(self) -> Self:
        self._handlers.install()
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.restore()

    def _note(self, number: int, _: FrameType | None) -> None:
        self.count += 1
        if self._first is None:
            self._first = number
        if self.count > 1:
            raise KeyboardInterrupt

    @property
    def was_interrupted(self) -> bool:
        """Whether any signal came."""
        return self.count > 0

    def is_insisted_on(self) -> bool:
        """Whether more than one came: nothing is to be waited for any more."""
        return self.count > 1

    def exit_error(self) -> BaseException:
        """What to raise once the run has drained."""
        if self._first == signal.SIGTERM:
            return SystemExit(_EXIT_BASE + signal.SIGTERM)
        return KeyboardInterrupt()


class HeldSignals:
    """Context manager in which signals wait: what they do, they do at its end.

    Args:
        on_signal: Called when one comes, to let the block come to its end sooner.
    """

    def __init__(self, on_signal: Callable[[], None] = lambda: None) -> None:
        self._on_signal = on_signal
        self._came: list[int] = []
        self._handlers = _Handlers(
            self._note, _replaceable(GuaranteedInterrupt, Interrupts)
        )

    def __enter__(self) -> Self:
        self._handlers.install()
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.restore()
        while self._came:
            signal.raise_signal(self._came.pop(0))

    def _note(self, number: int, _: FrameType | None) -> None:
        self._came.append(number)
        self._on_signal()


class GuaranteedInterrupt:
    """Context manager that a SIGINT leaves for sure, at once or at its end.

    Python drops what a handler raises while a callback of the garbage collector runs,
    and the import system has such callbacks.
    """

    def __init__(self) -> None:
        self._came = False
        self._handlers = _Handlers(self._note, _replaceable(), (signal.SIGINT,))

    def __enter__(self) -> Self:
        self._handlers.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._handlers.restore()
        if self._came and kind is None:
            raise KeyboardInterrupt

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._came = True
        raise KeyboardInterrupt


class _Handlers:
    """Puts one handler in the place of those that it may replace; main thread only."""

    def __init__(
        self,
        handler: Callable[[int, FrameType | None], None],
        may_replace: Callable[[Any], bool],
        numbers: Iterable[int] = SIGNALS,
    ) -> None:
        self._handler = handler
        self._may_replace = may_replace
        self._numbers = numbers
        self._replaced: dict[int, Any] = {}

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                if self._may_replace(signal.getsignal(number)):
                    self._replaced[number] = signal.signal(number, self._handler)

    def restore(self) -> None:
        while self._replaced:
            signal.signal(*self._replaced.popitem())


def _replaceable(*owners: type) -> Callable[[Any], bool]:
    """Return whether a handler is Python's own, or a method of one of `owners`."""

    def may_replace(handler: Any) -> bool:
        is_default = handler in (signal.default_int_handler, signal.SIG_DFL)
        return is_default or isinstance(getattr(handler, "__self__", None), owners)

    return may_replace


def is_interrupt(error: BaseException) -> bool:
    """Whether a signal to this program raised it: Ctrl-C, or a handler of its own.

    Python runs handlers in the main thread only, and none where a signal is ignored,
    as Ctrl-C is in worker processes. What a handler raises that is an ordinary
    `Exception` counts as raised by the function that it broke into.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if isinstance(error, KeyboardInterrupt):
        return signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    if isinstance(error, Exception):
        return False
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {getattr(handler, "__code__", None) for handler in handlers}
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code in codes for frame, _ in frames)


def hold_interrupts() -> None:
    """Hold SIGINT back in this thread, and in processes until they ignore it.

    A process inherits that from the thread that starts it, and can be interrupted
    nowhere else before its own code runs.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


def ignore_interrupts() -> None:
    """Ignore SIGINT from now on, and what was held back of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def die_with_parent(parent_id: int, get_parent_id: Callable[[], int]) -> None:
    """Ask Linux to kill this process when the thread that started it ends.

    Args:
        parent_id: The process that started this one; if it is gone by now, the
            request came too late, and this process exits.
        get_parent_id: Usually `os.getppid`.
    """
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - a worker process needs it once, a driver never

        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if get_parent_id() != parent_id:
        raise SystemExit(1)
