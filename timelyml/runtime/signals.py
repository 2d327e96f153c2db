"""SIGINT and SIGTERM while the main thread runs a dataflow or waits for one.

The first signal is counted, so that the run can drain; the second raises
KeyboardInterrupt where the main thread is, whatever user code it is in. Handlers
are installed for the duration only, and only over Python's defaults: a program
that handles signals itself keeps doing so.
"""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

_EXIT_BASE = 128  # the shell's code for a death by signal


class Interrupts:
    """Context manager that counts signals instead of dying of the first.

    Args:
        terminate: Whether SIGTERM drains too; it then ends in SystemExit(143).
    """

    def __init__(self, *, terminate: bool = False) -> None:
        self.count = 0
        self._signals = (
            (signal.SIGINT, signal.SIGTERM) if terminate else (signal.SIGINT,)
        )
        self._first: int | None = None
        self._saved: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                present = signal.getsignal(number)
                if present in (signal.default_int_handler, signal.SIG_DFL):
                    self._saved[number] = present
                    signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._saved.items():
            signal.signal(number, handler)
        self._saved.clear()

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

    def exit_error(self) -> BaseException:
        """What to raise once the run has drained."""
        if self._first == signal.SIGTERM:
            return SystemExit(_EXIT_BASE + signal.SIGTERM)
        return KeyboardInterrupt()


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
