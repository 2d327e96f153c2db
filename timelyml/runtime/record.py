"""What is known of one run on the driver's side, shared between threads.

The controller's thread writes it, through `apply`; handles, probes and inputs read
it and wait for it to change. A run always ends, so every wait ends.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from timelyml.errors import (
    OperatorError,
    ReentryError,
    RunStoppedError,
    TimelyError,
    summary_of,
)
from timelyml.graph import Graph
from timelyml.progress import Timestamp, minimum
from timelyml.runtime.config import INPUT_KIND, PROBE_KIND
from timelyml.runtime.effects import (
    DriverMessage,
    Effect,
    Ended,
    FrontierMoved,
    Inspected,
    OldestEpochs,
    Released,
    Send,
    Started,
)
from timelyml.runtime.recording import Recording
from timelyml.runtime.result import Result
from timelyml.runtime.signals import is_interrupt

COLLECT_KIND = "collect"
CREDIT_TAG = "input-credit"
CAPTURE_TAG = "captured"
WAIT_SLICE_S = 0.1  # how soon a waiting main thread sees a signal

OnMessage = Callable[[str, int, str, Any], None]
"""Called with operator, shard, tag and body; in the controller's thread."""


class RunRecord:
    """The present state of one run, guarded by one condition."""

    def __init__(
        self,
        graph: Graph,
        *,
        on_message: OnMessage | None = None,
        on_listener_error: Callable[[TimelyError], None] | None = None,
        on_end: Callable[[], None] | None = None,
        is_driven_here: Callable[[], bool] = lambda: False,
    ) -> None:
        self.future: Future[Result] = Future()
        self.future.set_running_or_notify_cancel()  # so that nobody can cancel it
        self.changed = threading.Condition()
        self.is_started = False
        self.is_ended = False
        self.error: TimelyError | None = None
        self._raised_in: set[int] = set()  # threads
        self.metrics: dict[int, dict[str, Any]] = {}
        # What follows is read and written under `changed`.
        self.frontiers: dict[str, tuple[Timestamp, ...]] = {
            spec.name: (minimum(spec.depth),)
            for spec in graph.operators
            if spec.kind == PROBE_KIND
        }
        self.oldest_epochs: dict[int, int | None] = {}
        # Of open inputs; one that nobody asked for yet stands at its start.
        self.input_epochs = {
            spec.name: 0 for spec in graph.operators if spec.kind == INPUT_KIND
        }
        self.outstanding_bytes: Counter[str] = Counter()  # by input
        self._input_names = frozenset(self.input_epochs)
        self._batches: dict[str, list[tuple[Timestamp, int, Any]]] = {
            spec.name: [] for spec in graph.operators if spec.kind == COLLECT_KIND
        }
        self._tapes: dict[str, dict[int, list[bytes]]] = {}  # by operator and shard
        self._inspections: dict[int, Future[Inspected]] = {}
        self._next_request = 1
        self._on_message = on_message
        self._on_listener_error = on_listener_error
        self._on_end = on_end
        self.is_driven_here = is_driven_here  # if so, the calling thread cannot wait

    def apply(self, effect: Effect) -> None:
        """Take an effect of the run."""
        match effect:
            case DriverMessage():
                self._driver_message(effect)
            case Ended():
                self._ended(effect)
            case Send():
                pass  # the controller's own business
            case _:
                with self.changed:
                    self._note(effect)
                    self.changed.notify_all()

    def _note(self, effect: Effect) -> None:
        match effect:
            case FrontierMoved():
                self.frontiers[effect.operator] = effect.elements
            case OldestEpochs():
                self.oldest_epochs = effect.by_input
            case Released():
                batches = self._batches.setdefault(effect.operator, [])
                batches += [(effect.time, shard, body) for shard, body in effect.items]
            case Inspected():
                future = self._inspections.pop(effect.request, None)
                if future is not None:
                    future.set_result(effect)
            case Started():
                self.is_started = True

    def _driver_message(self, message: DriverMessage) -> None:
        if message.tag == CREDIT_TAG and message.operator in self._input_names:
            with self.changed:
                self.outstanding_bytes[message.operator] -= message.body
                self.changed.notify_all()
        elif message.tag == CAPTURE_TAG:
            with self.changed:
                tapes = self._tapes.setdefault(message.operator, {})
                tapes.setdefault(message.shard, []).append(message.body)
        elif self._on_message is not None:
            try:
                self._on_message(
                    message.operator, message.shard, message.tag, message.body
                )
            except BaseException as problem:  # exits too: the controller goes on
                if is_interrupt(problem):
                    raise
                self._listener_failed(problem)

    def _listener_failed(self, problem: BaseException) -> None:
        self._on_message = None
        msg = f"the driver's on_message failed: {summary_of(problem)}"
        error = OperatorError(msg)
        error.__cause__ = problem
        if self._on_listener_error is not None:
            self._on_listener_error(error)

    def _ended(self, effect: Ended) -> None:
        with self.changed:
            if self.is_ended:
                return
            self.is_ended = True
            self.error, self.metrics = effect.error, effect.metrics
            if effect.error is None:
                self.frontiers = dict.fromkeys(self.frontiers, ())
                self.oldest_epochs = dict.fromkeys(self.oldest_epochs)
            inspections, self._inspections = self._inspections, {}
            self.changed.notify_all()
        for future in inspections.values():
            future.cancel()
        if effect.error is None:
            self.future.set_result(Result(self._batches, self.recordings()))
        else:
            self.future.set_exception(effect.error)
        if self._on_end is not None:
            self._on_end()

    def wait_until(
        self, condition: Callable[[], bool], timeout_s: float | None
    ) -> bool:
        """Block until `condition()` or the end of the run; False if time is over.

        Raises:
            ReentryError: Only the calling thread could bring that about.
        """
        if self.is_driven_here() and not (self.is_ended or condition()):
            raise reentry_error("a run")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self.changed:
            while not (self.is_ended or condition()):
                left = WAIT_SLICE_S
                if deadline is not None:
                    left = min(left, deadline - time.monotonic())
                if left <= 0:
                    return False
                self.changed.wait(left)
        return True

    @property
    def was_raised_here(self) -> bool:
        """Whether the calling thread has been told of the run's error."""
        return threading.get_ident() in self._raised_in

    def take_result(self) -> Result:
        """Return the result of a run that is over, or raise its error."""
        self.raise_if_failed()
        return self.future.result()

    def raise_if_failed(self) -> None:
        """Raise the run's error if it ended with one."""
        if self.error is not None:
            self._raised_in.add(threading.get_ident())
            raise self.error

    def over_error(self, who: str) -> TimelyError:
        """Return what to raise when `who` needs a run that is over."""
        if self.error is not None:
            self._raised_in.add(threading.get_ident())
            return self.error
        msg = f"{who} cannot be used: its run is over; start another run"
        return RunStoppedError(msg)

    def open_inspection(self) -> tuple[int, Future[Inspected]] | None:
        """Reserve a request; None if the run is over."""
        with self.changed:
            if self.is_ended:
                return None
            request = self._next_request
            self._next_request += 1
            future: Future[Inspected] = Future()
            self._inspections[request] = future
            return request, future

    def batches(self, name: str) -> list[tuple[Timestamp, int, Any]] | None:
        """Return what was collected so far under `name`: whole times only."""
        with self.changed:
            batches = self._batches.get(name)
            return None if batches is None else list(batches)

    def take_batches(
        self, name: str, start: int, *, keep: bool
    ) -> list[tuple[Timestamp, int, Any]]:
        """Return what was collected from batch `start` on; forget it, if asked to."""
        with self.changed:
            batches = self._batches.get(name, [])
            found = batches[start:]
            if not keep:
                del batches[start:]
            return found

    def num_batches(self, name: str) -> int:
        """Return how many batches are held of `name`; takes no lock."""
        return len(self._batches.get(name, ()))

    def recordings(self) -> dict[str, Recording]:
        """Return what was captured to memory so far, by name."""
        with self.changed:
            return {
                name: Recording.of(tapes[shard] for shard in sorted(tapes))
                for name, tapes in self._tapes.items()
            }

    @property
    def collected_names(self) -> list[str]:
        """Names under which something is, or will be, collected."""
        with self.changed:
            return list(self._batches)


def reentry_error(who: str) -> ReentryError:
    """Return what to raise when the thread that drives something waits for it."""
    return ReentryError(
        f"{who} waits for itself; got a wait in the thread that would have to go on; "
        f"expected none in on_message or within a run of the same cluster; do it in "
        f"another thread, or on another cluster"
    )
