"""The launcher of worker processes: fresh interpreters, watched by one thread.

That thread starts them too: Linux ends a child when the thread that started it
ends, so it has to be one that lives as long as they do. It reads their stderr and
their signs of life, and learns of an exit as soon as it happens.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from timelyml.errors import ConfigError
from timelyml.runtime.boot import Boot
from timelyml.runtime.child import (
    Child,
    cpu_seconds,
    describe_exit,
    end_group,
    exit_fd_of,
    has_exited,
    process_fields,
    reap,
)
from timelyml.runtime.controller import Controller
from timelyml.runtime.environment import worker_environment
from timelyml.runtime.signals import hold_interrupts
from timelyml.runtime.whereabouts import Place, new_memory, place_in

POLL_S = 0.2
LEAVE_TIMEOUT_S = 3.0
HURRIED_TIMEOUT_S = 0.5  # for workers that have nothing to do any more
LOOKS_PER_TIMEOUT = 4
TAIL_BYTES = 4096
FILES_PER_WORKER = 12  # of the driver: pipes, what tells of an exit, links both ways


class ProcessLauncher:
    """Starts worker processes on this machine.

    Args:
        num_workers: How many are started at once.
        boot_of: What each worker is told, by index, `heartbeat_fd` and `memory_fd`.
        environment: Variables that win over those that workers get otherwise.
        num_devices: Virtual devices that JAX shows in each worker.
        heartbeat_timeout_s: After how long the controller gives a silent worker up.
        cleanup: Called when every worker is gone.
    """

    def __init__(
        self,
        num_workers: int,
        boot_of: Callable[[int], Callable[[int, int], Boot]],
        *,
        environment: Mapping[str, str] | None = None,
        num_devices: int = 1,
        heartbeat_timeout_s: float = 10.0,
        cleanup: Callable[[], None] = lambda: None,
    ) -> None:
        self._boot_of = boot_of
        self._num_workers = num_workers
        self._to_spawn: deque[int] = deque(range(num_workers))
        self._environment = worker_environment(
            os.environ, num_devices=num_devices, overrides=environment
        )
        self._environment["PYTHONPATH"] = python_path(self._environment)
        self._cleanup = cleanup
        self._look_s = heartbeat_timeout_s / LOOKS_PER_TIMEOUT
        self._children: dict[int, Child] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = os.pipe()
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        self._close_deadline: float | None = None
        self._hurry_deadline = math.inf
        self._thread: threading.Thread | None = None

    def start(self, controller: Controller) -> None:
        """Start the thread that starts the workers and watches them."""
        self._thread = threading.Thread(
            target=self._serve,
            args=(controller,),
            name="timelyml-launcher",
            daemon=True,
        )
        self._thread.start()

    def close(self, *, at_once: bool) -> None:
        """Wait for the workers to leave, kill those that stay, and clean up."""
        grace_s = 0.0 if at_once else LEAVE_TIMEOUT_S
        self._close_deadline = time.monotonic() + grace_s
        if self._thread is not None:
            os.write(self._wake_in, b"\0")
            self._thread.join(2 * LEAVE_TIMEOUT_S)
        os.close(self._wake_out)
        os.close(self._wake_in)
        self._cleanup()

    def hurry(self) -> None:
        """Let `close` kill workers that do not leave within half a second."""
        deadline = time.monotonic() + HURRIED_TIMEOUT_S
        self._hurry_deadline = min(self._hurry_deadline, deadline)

    def stderr_tail(self, worker: int) -> str:
        """Return the last lines that a worker wrote to stderr."""
        child = self._children.get(worker)
        return "" if child is None else bytes(child.tail).decode(errors="replace")

    def place(self, worker: int) -> Place | None:
        """Return in which callback of an operator a worker is, or was as it died."""
        child = self._children.get(worker)
        return None if child is None else place_in(child.memory)

    def kill(self, worker: int) -> None:
        """End a worker at once; a stopped one too."""
        child = self._children.get(worker)
        if child is not None and not child.is_gone:
            child.is_dismissed = True
            child.process.kill()

    def spawn(self, worker: int) -> None:
        """Start one more worker, in the thread that starts all."""
        self._to_spawn.append(worker)
        os.write(self._wake_in, b"\0")

    def retire(self, worker: int) -> None:
        """Let a worker end by itself, within seconds; its end is no loss."""
        child = self._children.get(worker)
        if child is not None:
            child.is_dismissed = True
            child.ends_s = time.monotonic() + LEAVE_TIMEOUT_S

    def activity(self, worker: int) -> str:
        """Return that a worker is stopped; heartbeats tell the controller all else."""
        child = self._children.get(worker)
        if child is None or child.is_gone:
            return ""
        process_id = child.process.pid
        is_stopped = process_fields(process_id)[:1] == ["T"]
        return f"stopped by a signal, as process {process_id}" if is_stopped else ""

    def _serve(self, controller: Controller) -> None:
        try:
            hold_interrupts()  # which new workers inherit from this thread
            while not self._is_done():
                self._turn(controller)
        except Exception as error:  # noqa: BLE001  runs must not wait for it in vain
            what = f"is not watched any more: {type(error).__name__}: {error}"
            controller.post(lambda: controller.lose_worker(0, what))
        finally:
            for child in self._children.values():
                if not child.is_gone:
                    end_group(child.process.pid)
                    reap(child.process)
                self._release(child)
            self._selector.close()

    def _is_done(self) -> bool:
        if self._close_deadline is None:
            return False
        if time.monotonic() >= min(self._close_deadline, self._hurry_deadline):
            for child in self._children.values():
                if not child.is_gone:
                    end_group(child.process.pid)
        return all(child.is_gone for child in self._children.values())

    def _turn(self, controller: Controller) -> None:
        while self._to_spawn:
            worker = self._to_spawn.popleft()
            self._spawn(worker, self._boot_of(worker), controller)
        for key, _ in self._selector.select(POLL_S):
            if key.fd == self._wake_out:
                os.read(self._wake_out, 4096)
                continue
            child, read = key.data
            read(child, key.fd, controller)
        now = time.monotonic()
        for child in self._children.values():
            if child.is_gone:
                continue
            if now >= child.ends_s:
                end_group(child.process.pid)
            if has_exited(child.process):
                self._gone(child, controller)
            elif now - child.last_look >= self._look_s:
                self._look_for_life(child, now, controller)

    def _spawn(
        self, worker: int, boot: Callable[[int, int], Boot], controller: Controller
    ) -> None:
        heartbeat_out, heartbeat_in = os.pipe()
        memory, memory_fd = new_memory()
        os.set_blocking(heartbeat_in, False)
        os.set_blocking(heartbeat_out, False)
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "timelyml.runtime.process"],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment,
                pass_fds=(heartbeat_in, memory_fd),
                start_new_session=True,  # signals of the terminal are for the driver
                bufsize=0,
            )
        except OSError as error:
            os.close(heartbeat_out)
            what = f"could not be started: {error}"
            self._tell_lost(worker, what, controller)
            return
        finally:
            os.close(heartbeat_in)
            os.close(memory_fd)
        child = Child(worker, process, heartbeat_out, exit_fd_of(process.pid), memory)
        child.last_look = time.monotonic()
        self._children[worker] = child
        self._watch(child)
        line = boot(heartbeat_in, memory_fd).to_line()
        assert process.stdin is not None  # noqa: S101 - for the type checker
        with contextlib.suppress(BrokenPipeError):  # dead at once: its exit tells why
            process.stdin.write(line)

    def _watch(self, child: Child) -> None:
        stderr = child.process.stderr
        assert stderr is not None  # noqa: S101 - for the type checker
        os.set_blocking(stderr.fileno(), False)
        watched: list[tuple[int, Any]] = [
            (stderr.fileno(), self._read_stderr),
            (child.heartbeat_fd, self._read_heartbeats),
        ]
        if child.exit_fd is not None:
            watched.append((child.exit_fd, self._read_exit))
        for fd, read in watched:
            self._selector.register(fd, selectors.EVENT_READ, (child, read))

    def _read(self, fd: int) -> bytes:
        """Read what is there, which may be nothing; watch it no longer at its end."""
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        if not data:
            self._unregister(fd)
        return data

    def _read_stderr(self, child: Child, fd: int, _: Controller) -> None:
        data = self._read(fd)
        if not data:
            return
        child.tail += data
        del child.tail[:-TAIL_BYTES]
        if child.is_dismissed:
            return  # what libraries say of an end that is meant would only alarm
        try:
            sys.stderr.write(data.decode(errors="replace"))
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):
            pass  # the driver's stderr is closed or replaced by something odd

    def _read_heartbeats(self, child: Child, fd: int, controller: Controller) -> None:
        *lines, child.unread = (child.unread + self._read(fd)).split(b"\n")
        child.has_beaten = child.has_beaten or bool(lines)
        if not lines or child.worker >= self._num_workers:
            return  # who came later is known by its link
        child.cpu_s, child.last_look = cpu_seconds(child.process.pid), time.monotonic()
        beat = json.loads(lines[-1])
        worker, activity, busy_s = child.worker, beat["activity"], beat["busy_s"]
        controller.post(lambda: controller.heard(worker, activity, busy_s))

    def _read_exit(self, child: Child, fd: int, controller: Controller) -> None:
        self._unregister(fd)
        self._gone(child, controller)

    def _look_for_life(self, child: Child, now: float, controller: Controller) -> None:
        """A worker whose user code keeps the interpreter busy cannot beat; it works."""
        cpu_s, before = cpu_seconds(child.process.pid), child.cpu_s
        child.cpu_s, child.last_look = cpu_s, now
        worker, doing = child.worker, self.activity(child.worker)
        if cpu_s > before and worker < self._num_workers:
            controller.post(lambda: controller.heard_working(worker))
        child.num_stopped = child.num_stopped + 1 if doing else 0
        if child.num_stopped == LOOKS_PER_TIMEOUT and not child.has_beaten:
            self._tell_lost(worker, f"never came; it is {doing}", controller)

    def _gone(self, child: Child, controller: Controller) -> None:
        child.is_gone = True
        reap(child.process)
        if child.process.stderr is not None:
            # what it said last; a grandchild may still hold the pipe, so not until EOF
            self._read_stderr(child, child.process.stderr.fileno(), controller)
        self._release(child)
        if self._close_deadline is None and child.ends_s == math.inf:
            worker, what = child.worker, describe_exit(child.process.returncode)
            self._tell_lost(worker, what, controller)

    def _tell_lost(self, worker: int, what: str, controller: Controller) -> None:
        is_guest = worker >= self._num_workers
        lose = controller.guests.lose if is_guest else controller.lose_worker
        controller.post(lambda: lose(worker, what))

    def _release(self, child: Child) -> None:
        fds = [child.heartbeat_fd, child.exit_fd]
        if child.process.stderr is not None and not child.process.stderr.closed:
            self._unregister(child.process.stderr.fileno())
            child.process.stderr.close()
        for fd in fds:
            if fd is not None and fd >= 0:
                self._unregister(fd)
                os.close(fd)
        child.heartbeat_fd, child.exit_fd = -1, None
        child.memory = bytes(child.memory)  # what is shared takes a descriptor
        if child.process.stdin is not None:
            child.process.stdin.close()

    def _unregister(self, fd: int) -> None:
        if _is_registered(self._selector, fd):
            self._selector.unregister(fd)


def _is_registered(selector: selectors.BaseSelector, fd: int) -> bool:
    return fd in selector.get_map()


def check_room(num_workers: int) -> None:
    """Refuse more workers than this process may have open files for.

    Raises:
        ConfigError: They are too many.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_workers * FILES_PER_WORKER > limit != resource.RLIM_INFINITY:
        raise ConfigError(
            f"option 'workers' cannot work; got {num_workers}; expected at most "
            f"{limit // FILES_PER_WORKER}, as this process may have {limit} open files "
            f"and each worker takes {FILES_PER_WORKER}; ask for fewer, "
            f"or raise the limit with `ulimit -n`",
            option="workers",
            value=num_workers,
        )


def python_path(environment: Mapping[str, str]) -> str:
    """Let the child find this very package, wherever the driver found it."""
    root = str(Path(__file__).resolve().parents[2])
    present = environment.get("PYTHONPATH")
    return os.pathsep.join([root, present] if present else [root])
