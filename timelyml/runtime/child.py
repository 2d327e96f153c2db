"""One worker process as its parent sees it, and what the system tells of it."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Child:
    """One worker process, as its parent sees it."""

    worker: int
    process: subprocess.Popen[bytes]
    heartbeat_fd: int
    exit_fd: int | None  # readable once it has exited, where the system has such
    memory: Any  # in which it notes where it is, or noted as it died
    tail: bytearray = field(default_factory=bytearray)
    unread: bytes = b""
    is_gone: bool = False
    is_dismissed: bool = False
    has_beaten: bool = False
    num_stopped: int = 0  # looks in a row that found it stopped by a signal
    ends_s: float = math.inf  # when it is killed, as it was let go and may be stuck
    cpu_s: float = 0.0
    last_look: float = 0.0  # at its heartbeat or, for want of one, its CPU time


def has_exited(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has, without giving its number away: its group still has it."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
        return os.waitid(os.P_PID, process.pid, options) is not None
    except ChildProcessError:
        return True  # somebody else took note, e.g. the system if SIGCHLD is ignored


def reap(process: subprocess.Popen[bytes]) -> None:
    """Await the end of a worker, and end what its user code started and left."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        end_group(process.pid)
    process.wait()


def end_group(process_id: int) -> None:
    """Kill a worker that was not reaped yet, and all that its user code started.

    Who wants to outlive the worker starts a session of its own.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process_id, signal.SIGKILL)


def exit_fd_of(process_id: int) -> int | None:
    """Return what is readable once the process has exited, where there is such."""
    try:
        return os.pidfd_open(process_id)
    except (AttributeError, OSError):
        return None  # another system: `poll` finds it out within POLL_S


def process_fields(process_id: int) -> list[str]:
    """What Linux tells of a process, its state first; nothing on other systems."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def cpu_seconds(process_id: int) -> float:
    """CPU time of a process so far; 0 where the system does not tell."""
    fields = process_fields(process_id)
    ticks = int(fields[11]) + int(fields[12]) if fields else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def describe_exit(code: int | None) -> str:
    """Say how a process ended, as in `worker 1 ...`."""
    if code is not None and code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"exited with code {code}"
