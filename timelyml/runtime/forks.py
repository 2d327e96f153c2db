"""What becomes of a process that user code forks: it must never act as a worker.

A fork has its parent's sockets and only the thread that forked. It may do what it was
forked for, as children of `multiprocessing` do; but where it comes back from user code
into a worker's loop, it would take messages and repeat work, so there it ends.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, NoReturn, Protocol

EXIT_FORKED = 4


class Fork:
    """Stands for the clock and the transport of a worker, in a fork of its process.

    Args:
        worker: The worker's index.
        activity: What it was doing when its process forked.
    """

    def __init__(self, worker: int, activity: str) -> None:
        self._where = f"{activity} of worker {worker}"

    def __call__(self) -> float:
        """Be asked for the time."""
        self._leave()

    def __getattr__(self, _: str) -> Any:
        self._leave()

    def _leave(self) -> NoReturn:
        # Written and ended without Python's own buffers and handlers: the parent has
        # the same, and will do it all again.
        message = (
            f"process {os.getpid()}, which was forked in {self._where}, came back from "
            "there and is ended; expected it to end by itself; let a forked child call "
            "os._exit, or use subprocess\n"
        )
        with contextlib.suppress(OSError):  # who would read it may be gone
            os.write(2, message.encode())
        os._exit(EXIT_FORKED)


class Forkable(Protocol):
    """A worker, as far as a fork of its process is concerned."""

    def disown(self) -> None:
        """End the process as soon as it acts as the worker: it is a fork."""


_workers: set[Forkable] = set()  # a compiled worker takes no weak reference


def watch(worker: Forkable) -> None:
    """Let every fork of this process disown a worker, until it is forgotten."""
    _workers.add(worker)


def forget(worker: Forkable) -> None:
    """Take that back: the worker has left, or was never watched."""
    _workers.discard(worker)


def _disown_all() -> None:
    for worker in list(_workers):
        worker.disown()


os.register_at_fork(after_in_child=_disown_all)
