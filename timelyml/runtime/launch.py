"""Launchers within this process: workers on threads, or in the caller's own turn.

A launcher starts the workers of one session and ends them; whatever it learns of
them it tells the controller. Worker processes are started by `launch_processes`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from timelyml.exchange import CONTROLLER, InProcessHub, Transport
from timelyml.runtime import forks
from timelyml.runtime.controller import Controller
from timelyml.runtime.loop import drive
from timelyml.runtime.messages import HANDSHAKE, Hello
from timelyml.runtime.scratch import ScratchDirectory
from timelyml.runtime.service import ServiceSpec
from timelyml.runtime.shipping import worker_codec
from timelyml.runtime.worker import Worker

JOIN_TIMEOUT_S = 5.0
JOIN_SLICE_S = 0.05  # how soon `close` sees that it is to hurry


class Launcher(Protocol):
    """Whoever starts and ends the workers of a session."""

    def start(self, controller: Controller) -> None:
        """Start every worker; it is told to `controller` if one ends."""

    def close(self, *, at_once: bool) -> None:
        """End every worker that has not left by itself; within seconds, or at once."""

    def hurry(self) -> None:
        """Let `close` wait no longer; from any thread, and before it too."""

    def stderr_tail(self, worker: int) -> str:
        """Return the last lines that a worker wrote to stderr."""

    def kill(self, worker: int) -> None:
        """End one worker at once, if that is possible."""

    def activity(self, worker: int) -> str:
        """Return what a worker is doing, where it can be seen from here."""


def make_worker(
    index: int,
    transport: Transport,
    spill_directory: Path,
    services: Sequence[ServiceSpec] = (),
    memory: Any = None,
) -> Worker:
    """Build a worker and let it say hello; it notes in `memory` where it is."""
    endpoint = getattr(transport, "endpoint", None)
    transport.send(CONTROLLER, Hello(index, os.getpid(), endpoint, HANDSHAKE))
    worker = Worker(
        index,
        transport,
        codec=worker_codec(),
        clock=time.monotonic,
        spill_directory=spill_directory,
        services=services,
        memory=memory,
    )
    forks.watch(worker)
    return worker


class ThreadLauncher:
    """One thread per worker, in this process."""

    def __init__(
        self, hub: InProcessHub, num_workers: int, services: Sequence[ServiceSpec] = ()
    ) -> None:
        self._hub = hub
        self._services = services
        self._scratch = ScratchDirectory()
        self._threads: list[threading.Thread] = []
        self._workers: dict[int, Worker] = {}
        self._num_workers = num_workers
        self._is_hurried = False

    def start(self, controller: Controller) -> None:
        """Start every worker's thread."""
        for index in range(self._num_workers):
            thread = threading.Thread(
                target=self._serve,
                args=(index, controller),
                name=f"timelyml-worker-{index}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()

    def _serve(self, index: int, controller: Controller) -> None:
        transport = self._hub.transport(index)
        try:
            worker = make_worker(index, transport, self._scratch.path, self._services)
            self._workers[index] = worker
            try:
                drive(worker, transport, lambda: worker.is_stopped, time.monotonic)
            finally:
                worker.leave()
        except BaseException as error:  # noqa: BLE001 - the thread must not vanish
            what = f"ended with {type(error).__name__}: {error}"
            controller.post(lambda: controller.lose_worker(index, what))
        finally:
            transport.close()

    def close(self, *, at_once: bool) -> None:
        """Wait for the threads; one that is stuck in user code is left behind."""
        deadline = time.monotonic() + (0.0 if at_once else JOIN_TIMEOUT_S)
        for thread in self._threads:
            thread.join(JOIN_SLICE_S)
            while thread.is_alive() and not self._is_hurried:
                if time.monotonic() >= deadline:
                    break
                thread.join(JOIN_SLICE_S)
        self._scratch.remove()

    def hurry(self) -> None:
        """Let `close` leave threads behind that do not end by themselves."""
        self._is_hurried = True

    def stderr_tail(self, worker: int) -> str:  # noqa: ARG002  see Launcher
        """Return nothing: a thread shares the driver's stderr."""
        return ""

    def kill(self, worker: int) -> None:
        """Do nothing: a thread cannot be ended from outside."""

    def activity(self, worker: int) -> str:
        """Return what a worker is doing; empty before it has come."""
        return self._workers[worker].activity() if worker in self._workers else ""


class InlineLauncher:
    """One worker that takes turns with the controller, in the same thread."""

    def __init__(self, hub: InProcessHub, services: Sequence[ServiceSpec] = ()) -> None:
        self._hub = hub
        self._services = services
        self._scratch = ScratchDirectory()
        self.worker: Worker | None = None

    def start(self, controller: Controller) -> None:
        """Build the worker; `InlineEndpoint` steps it."""
        del controller
        transport = self._hub.transport(0)
        transport.stand_in = self._hub.transport(CONTROLLER)  # the one that waits
        directory = self._scratch.path
        self.worker = make_worker(0, transport, directory, self._services)

    def close(self, *, at_once: bool) -> None:  # noqa: ARG002  see Launcher
        """Let the worker leave; it need not be able to take a step for that."""
        try:
            if self.worker is not None and not self.worker.is_stopped:
                self.worker.leave()
        finally:
            self._hub.transport(0).close()
            self._scratch.remove()

    def hurry(self) -> None:
        """Do nothing: `close` waits for nobody."""

    def stderr_tail(self, worker: int) -> str:  # noqa: ARG002  see Launcher
        """Return nothing: the worker is in this process."""
        return ""

    def kill(self, worker: int) -> None:
        """Do nothing: the worker is in this process."""

    def activity(self, worker: int) -> str:  # noqa: ARG002  see Launcher
        """Return what the worker is doing; empty before it has come."""
        return "" if self.worker is None else self.worker.activity()


class InlineEndpoint:
    """A controller and its only worker, stepped in turn by one thread."""

    def __init__(self, controller: Controller, launcher: InlineLauncher) -> None:
        self._controller = controller
        self._launcher = launcher
        self._has_worked = False

    def step(self) -> bool:
        """Give both a turn; True if either did anything."""
        # The controller first: after an interrupt the worker must hear of the end
        # before it runs user code again.
        worked = self._controller.step()
        worker = self._launcher.worker
        self._has_worked = (worker is not None and worker.step()) or worked
        return self._has_worked

    def has_work(self) -> bool:
        """Return whether either did anything: the other may have to act on it."""
        return self._has_worked

    def next_deadline(self) -> float | None:
        """Return the earlier deadline of the two."""
        worker = self._launcher.worker
        deadlines = [self._controller.next_deadline()]
        if worker is not None:
            deadlines.append(worker.next_deadline())
        return min((d for d in deadlines if d is not None), default=None)
