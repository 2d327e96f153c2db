"""One session of a cluster: a controller, its loop, and the workers it started.

A session is replaced as a whole when a worker is lost. Whoever drives it, a thread
of its own or the caller of `Cluster.run`, also takes it down, so that nothing is
left when `serve` returns.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from timelyml.errors import ConfigError, InvariantError, PeerError, summary_of
from timelyml.exchange import Transport
from timelyml.runtime.controller import Controller
from timelyml.runtime.enquiries import EnquiryServer
from timelyml.runtime.guests import Invitation
from timelyml.runtime.launch import Launcher
from timelyml.runtime.loop import Endpoint, drive
from timelyml.runtime.record import RunRecord, reentry_error
from timelyml.runtime.run import Run, RunIdentity
from timelyml.runtime.signals import HeldSignals, is_interrupt

CLOSE_TIMEOUT_S = 20.0
HURRIED_TIMEOUT_S = 5.0
JOIN_TIMEOUT_S = 1.0  # for a thread that has nothing more to do
TURN_TIMEOUT_S = 0.05  # how soon one that waits to drive sees that it need not


class Session:
    """The driver's side of one set of workers.

    Args:
        controller: Knows the runs.
        transport: The controller's.
        launcher: Started by the session, and closed by it.
        endpoint: What the loop steps: the controller, or it and its inline worker.
        invite: Returns what a process needs to join, where workers are processes; may
            be called from any thread.
    """

    def __init__(
        self,
        controller: Controller,
        transport: Transport,
        launcher: Launcher,
        endpoint: Endpoint,
        invite: Callable[[], Invitation] | None = None,
    ) -> None:
        self.controller = controller
        self.invite = invite
        self.transport = transport
        self._launcher = launcher
        self._endpoint = endpoint
        self._lock = threading.Lock()  # between threads that start runs
        self._thread: threading.Thread | None = None
        self._driving = threading.Lock()
        self._driver: int | None = None  # the thread that drives it now
        self._closed = threading.Event()
        self._close_by = math.inf  # until when `close` waits
        self._process_id = os.getpid()
        # Weak, or what the last run collected and its graph would stay in memory.
        self._runs: weakref.WeakKeyDictionary[RunRecord, RunIdentity] = (
            weakref.WeakKeyDictionary()
        )
        self._enquiries: EnquiryServer | None = None
        launcher.start(controller)
        with contextlib.suppress(OSError, ConfigError):
            self._enquiries = EnquiryServer(self._why)

    @property
    def is_usable(self) -> bool:
        """Whether runs can still be started on it."""
        controller = self.controller
        return self._is_ours and not (
            self._closed.is_set() or controller.is_stopped or controller.error
        )

    @property
    def _is_ours(self) -> bool:
        """Whether this process started it, rather than one that it was forked from."""
        return self._process_id == os.getpid()

    @property
    def has_thread(self) -> bool:
        """Whether a thread of its own drives it."""
        return self._thread is not None

    def follow(self, identity: RunIdentity, record: RunRecord) -> None:
        """Let others ask about a run, as long as it goes on."""
        with self._lock:
            self._runs[record] = identity

    def start_thread(self) -> None:
        """Let a thread of its own drive the session until it is closed."""
        with self._lock:
            if self._thread is not None:
                return
            self._thread = threading.Thread(
                target=self.serve, name="timelyml-controller", daemon=True
            )
            # Also when the program ends without close(), or was interrupted in it.
            atexit.register(self.close)
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

    def close(self, *, at_once: bool = False) -> None:
        """End every run and every worker; blocks until they are gone.

        Not if the calling thread drives it: then they go when this callback is over.
        Signals do not cut it short, or something would be left behind; they let it
        hurry, and act when it is over.

        Args:
            at_once: Do not wait for workers that are busy.
        """
        if not self._is_ours:
            return  # a fork has none of its threads, and its workers are another's
        self.request_close()
        self._close_by = min(self._close_by, time.monotonic() + CLOSE_TIMEOUT_S)
        if at_once:
            self._hurry()
        if self.is_driven_here:
            return
        with HeldSignals(self._hurry):
            if self._thread is None:
                self.drive_until(lambda: False)
            while not self._closed.wait(TURN_TIMEOUT_S):
                if time.monotonic() >= self._close_by:
                    return
            if self._thread is not None:
                self._thread.join(JOIN_TIMEOUT_S)

    def _hurry(self) -> None:
        self._launcher.hurry()
        self._close_by = min(self._close_by, time.monotonic() + HURRIED_TIMEOUT_S)

    def abandon(self) -> None:
        """As `close`, when its cluster was dropped, in whatever thread that is."""
        if self._thread is None:
            self.close()
        elif self._is_ours:
            self.request_close()  # that thread may hold what the end would wait for

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
        finally:
            try:
                self.transport.close()
            finally:
                self.controller.end_all(PeerError("the session of the cluster is over"))
                self._closed.set()
                atexit.unregister(self.close)

    def _why(self, timeout_s: float) -> dict[str, Any]:
        """Say what the runs wait for; called in the thread of the enquiries."""
        with self._lock:
            runs = [each for each in self._runs.items() if not each[0].is_ended]
        for plan, record in self.controller.service_runs.open():
            identity = RunIdentity(plan.generation, plan.graph, plan.config)
            runs.append((record, identity))
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
                for record, identity in runs
            ],
        }

    def _doing(self, worker: int) -> str:
        doing = self._launcher.activity(worker) or self.controller.activity(worker)
        return f"in {doing}" if doing.startswith("operator") else doing
