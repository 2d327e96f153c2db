"""One session of a cluster: a controller, its loop, and the workers it started.

A session is replaced as a whole when a worker is lost. Whoever drives it, a thread
of its own or the caller of `Cluster.run`, also takes it down, so that nothing is
left when `serve` returns.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeGuard

from timelyml.errors import ConfigError, InvariantError, PeerError, summary_of
from timelyml.exchange import Transport
from timelyml.runtime.controller import Controller
from timelyml.runtime.enquiries import EnquiryServer
from timelyml.runtime.launch import Launcher
from timelyml.runtime.loop import Endpoint, drive
from timelyml.runtime.record import RunRecord, reentry_error
from timelyml.runtime.run import Run, RunIdentity
from timelyml.runtime.signals import is_interrupt

CLOSE_TIMEOUT_S = 20.0
TURN_TIMEOUT_S = 0.05  # how soon one that waits to drive sees that it need not


class Session:
    """The driver's side of one set of workers.

    Args:
        controller: Knows the runs.
        transport: The controller's.
        launcher: Started by the session, and closed by it.
        endpoint: What the loop steps: the controller, or it and its inline worker.
    """

    def __init__(
        self,
        controller: Controller,
        transport: Transport,
        launcher: Launcher,
        endpoint: Endpoint,
    ) -> None:
        self.controller = controller
        self.transport = transport
        self._launcher = launcher
        self._endpoint = endpoint
        self._thread: threading.Thread | None = None
        self._driving = threading.Lock()
        self._driver: int | None = None  # the thread that drives it now
        self._closed = threading.Event()
        # Weak, or what the last run collected would stay in memory.
        self._runs: list[tuple[RunIdentity, weakref.ref[RunRecord]]] = []
        self._enquiries: EnquiryServer | None = None
        launcher.start(controller)
        with contextlib.suppress(OSError, ConfigError):
            self._enquiries = EnquiryServer(self._why)

    @property
    def is_usable(self) -> bool:
        """Whether runs can still be started on it."""
        controller = self.controller
        return not (self._closed.is_set() or controller.is_stopped or controller.error)

    @property
    def has_thread(self) -> bool:
        """Whether a thread of its own drives it."""
        return self._thread is not None

    def follow(self, identity: RunIdentity, record: RunRecord) -> None:
        """Let others ask about a run, as long as it goes on."""
        going_on = [(each, ref) for each, ref in self._runs if _goes_on(ref())]
        self._runs = [*going_on, (identity, weakref.ref(record))]

    def start_thread(self) -> None:
        """Let a thread of its own drive the session until it is closed."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self.serve, name="timelyml-controller", daemon=True
            )
            self._thread.start()

    def serve(self) -> None:
        """Drive the session until it is closed, then take it down."""
        try:
            self.drive_until(lambda: False)
        finally:
            self.take_down()

    @property
    def is_driven_here(self) -> bool:
        """Whether the calling thread drives it, and so cannot wait for it."""
        return self._driver == threading.get_ident()

    def drive_until(self, is_enough: Callable[[], bool]) -> None:
        """Drive it in the calling thread until `is_enough()`, or until it is down.

        While another thread drives it, which does the same work, this one waits.

        Raises:
            ReentryError: The calling thread drives it already.
        """
        if self.is_driven_here:
            raise reentry_error("a cluster")
        controller = self.controller
        while not self._driving.acquire(timeout=TURN_TIMEOUT_S):
            if controller.is_stopped or is_enough():
                return
        try:
            self._driver = threading.get_ident()
            self._drive_until(is_enough)
            if controller.is_stopped:
                self.take_down()
        finally:
            self._driver = None
            self._driving.release()

    def _drive_until(self, is_enough: Callable[[], bool]) -> None:
        controller = self.controller
        try:
            drive(
                self._endpoint,
                self.transport,
                lambda: controller.is_stopped or is_enough(),
                time.monotonic,
            )
        except BaseException as problem:  # nobody may wait for it in vain
            if is_interrupt(problem):
                raise
            msg = f"the controller failed: {summary_of(problem)}"
            error = InvariantError(msg)
            error.__cause__ = problem
            controller.end_all(error)
            controller.is_stopped = True

    def close(self) -> None:
        """End every run and every worker; blocks until they are gone.

        Not if the calling thread drives it: then they go when this callback is over.
        """
        self.request_close()
        if self.is_driven_here:
            return
        if self._thread is None:
            self.drive_until(lambda: False)
            self._closed.wait(CLOSE_TIMEOUT_S)
        else:
            self._thread.join(CLOSE_TIMEOUT_S)

    def request_close(self) -> None:
        """As `close`, from the loop's own thread or without waiting."""
        self.controller.post(self.controller.shut_down)

    def take_down(self) -> None:
        """Free everything; whatever comes to the controller now ends at once."""
        if self._closed.is_set():
            return
        if self._enquiries is not None:
            self._enquiries.close()
        try:
            # Of a broken session nothing is wanted any more.
            self._launcher.close(at_once=self.controller.error is not None)
            self.transport.close()
        finally:
            self.controller.end_all(PeerError("the session of the cluster is over"))
            self._closed.set()

    def _why(self, timeout_s: float) -> dict[str, Any]:
        """Say what the runs wait for; called in the thread of the enquiries."""
        return {
            "process_id": os.getpid(),
            "program": " ".join(sys.argv) or "python",
            "num_workers": self.controller.num_workers,
            "workers": {
                str(worker): doing
                for worker in range(self.controller.num_workers)
                if (doing := self._doing(worker))
            },
            "runs": [
                asdict(Run(identity, self.controller, record).explain_stall(timeout_s))
                for identity, ref in self._runs
                if _goes_on(record := ref())
            ],
        }

    def _doing(self, worker: int) -> str:
        doing = self._launcher.activity(worker) or self.controller.activity(worker)
        return f"in {doing}" if doing.startswith("operator") else doing


def _goes_on(record: RunRecord | None) -> TypeGuard[RunRecord]:
    return record is not None and not record.is_ended
