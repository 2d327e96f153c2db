"""What a process has of threads, child processes and sockets: to see what stays behind.

Only Linux tells of children and sockets; elsewhere they are taken to be none.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PREFIX = "timelyml"  # of the names of all threads that clusters start
GONE_TIMEOUT_S = 10.0
POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Threads of timelyml, child processes and sockets of this process."""

    threads: frozenset[str]
    children: frozenset[int]
    num_sockets: int

    @classmethod
    def now(cls) -> Leftovers:
        """Return what there is now."""
        return cls(_threads(), _children(), _num_sockets())

    def is_within(self, earlier: Leftovers, *, sockets: bool = True) -> bool:
        """Whether there is nothing that there was not earlier."""
        return (
            self.threads <= earlier.threads
            and self.children <= earlier.children
            and (self.num_sockets <= earlier.num_sockets or not sockets)
        )

    def check_gone(self, *, sockets: bool = True) -> None:
        """Demand that soon nothing is there that was not when this was made.

        Args:
            sockets: Whether sockets count too; not while other clusters are in use.

        Raises:
            AssertionError: Something stays.
        """
        __tracebackhide__ = True
        if not eventually(lambda: Leftovers.now().is_within(self, sockets=sockets)):
            raise AssertionError(f"left behind: {Leftovers.now()}; before: {self}")


def eventually(
    condition: Callable[[], bool], timeout_s: float = GONE_TIMEOUT_S
) -> bool:
    """Wait for something that comes soon, such as the end of a thread; whether it did."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _threads() -> frozenset[str]:
    names = (thread.name for thread in threading.enumerate())
    return frozenset(name for name in names if name.startswith(PREFIX))


def _children() -> frozenset[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(FileNotFoundError):  # a thread that ended meanwhile
            found.update(map(int, (task / "children").read_text().split()))
    return frozenset(found)


def _num_sockets() -> int:
    found = 0
    for descriptor in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += str(descriptor.readlink()).startswith("socket:")
    return found
