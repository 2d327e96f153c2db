"""One session of a cluster: a controller, its loop, and the workers it started.

A session is replaced as a whole when a worker is lost. Whoever drives it, a thread
of its own or the caller of `Cluster.run`, also takes it down, so that nothing is
left when `serve` returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from timelyml.errors import InvariantError, PeerError
from timelyml.exchange import Transport
from timelyml.runtime.controller import Controller
from timelyml.runtime.launch import Launcher
from timelyml.runtime.loop import Endpoint, drive

CLOSE_TIMEOUT_S = 20.0


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
        self._closed = threading.Event()
        launcher.start(controller)

    @property
    def is_usable(self) -> bool:
        """Whether runs can still be started on it."""
        controller = self.controller
        return not (self._closed.is_set() or controller.is_stopped or controller.error)

    @property
    def has_thread(self) -> bool:
        """Whether a thread of its own drives it."""
        return self._thread is not None

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

    def drive_until(self, is_enough: Callable[[], bool]) -> None:
        """Drive it in the calling thread until `is_enough()` or it is closed."""
        controller = self.controller
        try:
            drive(
                self._endpoint,
                self.transport,
                lambda: controller.is_stopped or is_enough(),
                time.monotonic,
            )
        except Exception as problem:  # noqa: BLE001 - nobody may wait for it in vain
            msg = f"the controller failed: {type(problem).__name__}: {problem}"
            error = InvariantError(msg)
            error.__cause__ = problem
            controller.end_all(error)
            controller.is_stopped = True

    def close(self) -> None:
        """End every run and every worker; blocks until they are gone."""
        if self._thread is None:
            self.controller.shut_down()
            self.take_down()
            return
        self.controller.post(self.controller.shut_down)
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)

    def request_close(self) -> None:
        """As `close`, from the loop's own thread or without waiting."""
        self.controller.post(self.controller.shut_down)

    def take_down(self) -> None:
        """Free everything; whatever comes to the controller now ends at once."""
        if self._closed.is_set():
            return
        try:
            # Of a broken session nothing is wanted any more.
            self._launcher.close(at_once=self.controller.error is not None)
            self.transport.close()
        finally:
            self.controller.end_all(PeerError("the session of the cluster is over"))
            self._closed.set()
