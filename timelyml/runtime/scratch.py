"""Private directories for sockets and spilled blocks, which outlive no process for long.

A process that is killed cannot remove what it made. So each directory is locked for as
long as its process lives, and whoever makes one removes those whose lock is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

PREFIX = "timelyml-own-"
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class ScratchDirectory:
    """A new directory among the temporary files that only the user may enter.

    It goes with `remove`, with the last reference, or at the end of the process; if
    that is killed, when any process of the user makes another.

    Attributes:
        path: Where it is.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self) -> None:
        _sweep()
        self.path, lock = _make()
        self._remove = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def remove(self) -> None:
        """Remove it and what is in it; idempotent."""
        self._remove()


def _make() -> tuple[Path, int]:
    """Make a directory, and return it with the descriptor that keeps it locked."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))  # mode 0700
        with contextlib.suppress(FileNotFoundError):  # swept before it was locked
            lock = os.open(path, _OPEN)
            with contextlib.suppress(OSError):  # no locks here: then nobody sweeps
                fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # a fork that ends leaves it alone
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _sweep() -> None:
    """Remove the directories of processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            lock = os.open(path, _OPEN)
        except OSError:
            continue  # gone by now, another user's, or no directory
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass  # its process lives
        finally:
            os.close(lock)
