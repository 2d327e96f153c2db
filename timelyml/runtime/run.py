"""The handle of one run: waits for it, stops it, feeds it, explains it.

A handle may be used from any thread and from asyncio; it decides nothing, but asks
the controller and reads the record of the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Self

from timelyml.errors import DeadlineError, GraphError, TimelyError
from timelyml.graph import Graph, OperatorSpec
from timelyml.progress import Timestamp
from timelyml.runtime.config import INPUT_KIND, PROBE_KIND, RunConfig
from timelyml.runtime.controller import Controller
from timelyml.runtime.effects import Inspected
from timelyml.runtime.inputs import InputHandle, Probe
from timelyml.runtime.metering import metrics_before
from timelyml.runtime.metrics import merge_metrics
from timelyml.runtime.options import check_wait
from timelyml.runtime.record import RunRecord
from timelyml.runtime.result import Result, nothing
from timelyml.runtime.results import Results
from timelyml.runtime.run_state import RunState
from timelyml.runtime.signals import Interrupts
from timelyml.runtime.stall import StallReport, late

CANCEL_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Which run this is; `graph` is resolved for the number of workers."""

    generation: int
    graph: Graph
    config: RunConfig


class Run:
    """A run that was started; made by `Cluster.start`.

    As a context manager it closes its inputs and waits for the result at the end
    of the block, and cancels the run if the block raises; `stop` in the block ends
    sources that would go on for ever. An error of the run that the block was told of,
    as by `result`, and has handled is not raised again at its end. `await run` gives the result; a task that is
    cancelled there, as by `asyncio.timeout`, cancels the run, unless that is awaited
    with `asyncio.shield`.
    """

    def __init__(
        self,
        identity: RunIdentity,
        controller: Controller,
        record: RunRecord,
        *,
        settle: Callable[[bool], None] | None = None,
        owner: object = None,
    ) -> None:
        self.record = record
        self._identity = identity
        self._controller = controller
        # Frees what belongs to this run alone, once it is over; True: at once.
        self._settle = settle
        self._owner = owner  # lives as long as somebody waits for this run
        self._inputs: dict[str, InputHandle] = {}
        self._is_stopping = False

    @property
    def generation(self) -> int:
        """The number of the run; later runs of a cluster have larger ones."""
        return self._identity.generation

    def done(self) -> bool:
        """Whether the run is over, in whatever way."""
        return self.record.is_ended

    def result(self, timeout_s: float | None = None) -> Result:
        """Block until the run is complete and return what it collected.

        In the main thread, SIGINT and SIGTERM let the run drain first, then end the
        program as usual; a second signal cancels the run at once.

        Raises:
            DeadlineError: It is not complete in time (and goes on); says what holds
                it back.
            TimelyError: It failed; an `OperatorError` is also of the type that the
                user's function raised.
        """
        check_wait(timeout_s)
        with Interrupts() as interrupts:
            return self.wait(interrupts, timeout_s)

    def wait(self, interrupts: Interrupts, timeout_s: float | None = None) -> Result:
        """As `result`, with signals that the caller handles."""
        is_in_time = self._wait(interrupts, timeout_s)
        return self.conclude(interrupts, timeout_s, is_in_time=is_in_time)

    def _wait(self, interrupts: Interrupts, timeout_s: float | None) -> bool:
        """Wait for the end; a signal drains, a second one gives up."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        def is_interrupted_anew() -> bool:
            return interrupts.was_interrupted and not self._is_stopping

        def is_to_act() -> bool:
            return is_interrupted_anew() or interrupts.is_insisted_on()

        try:
            is_in_time = self.record.wait_until(is_to_act, timeout_s)
            if is_interrupted_anew():
                self.request_stop()
            if not self.done() and is_in_time:
                left_s = None if deadline is None else deadline - time.monotonic()
                is_in_time = self.record.wait_until(interrupts.is_insisted_on, left_s)
            if not self.done() and interrupts.is_insisted_on():
                raise KeyboardInterrupt  # noqa: TRY301  as the handler, if it was lost
        except KeyboardInterrupt:
            self.give_up()
            raise
        return is_in_time

    def conclude(
        self, interrupts: Interrupts, timeout_s: float | None, *, is_in_time: bool
    ) -> Result:
        """Return or raise what a wait has come to."""
        if not is_in_time:
            raise self._late("is not complete", timeout_s)
        self._free()
        if interrupts.was_interrupted:
            raise interrupts.exit_error() from self.record.error
        return self.record.take_result()

    def __await__(self) -> Generator[Any, None, Result]:
        import asyncio  # noqa: PLC0415  50 ms that only programs with a loop pay

        # `yield from` keeps the run, and with it a cluster of its own, alive meanwhile.
        future = asyncio.wrap_future(self.record.future)
        try:
            yield from future.__await__()
        except asyncio.CancelledError:
            self.request_cancel()
            raise
        except TimelyError:
            pass  # raised below, where it is noted
        return self.record.take_result()

    def batches(self, name: str) -> list[tuple[Timestamp, Any]]:
        """Return (time, payload) collected so far under `name`: whole times only."""
        self._check_collected(name)
        found = self.record.batches(name) or []
        return [(time, payload) for time, _, payload in found]

    def results(self, name: str, *, keep: bool = True) -> Results:
        """Return an iterator of (time, payload) collected under `name`, as they come.

        Whole times only, in order; it waits for the next one, and ends with the run.
        `async for` takes it too. A loop that is left early, by `break` or by an error,
        leaves the run going, for other readers and for later; `stop` ends it, and so
        does an error that leaves the `with` block of the run.

        Args:
            name: What was given to `collect`.
            keep: False forgets what was given out, so that an endless run needs no
                more memory; the result then lacks it.

        Raises:
            KeyError: Nothing is collected under that name.
            TimelyError: The run failed; raised after its last complete time.
        """
        self._check_collected(name)
        return Results(self, name, keep=keep)

    def _check_collected(self, name: str) -> None:
        names = self.record.collected_names
        if name not in names:
            raise nothing("collected", name, names)

    def stop(self, drain: bool = True, timeout_s: float | None = None) -> None:
        """Let every source end at its present epoch and wait until all is done.

        Returns also if the run fails; `result` tells.

        Args:
            drain: False gives up what is under way, as `cancel` does.
            timeout_s: How long to wait; None as long as it takes.

        Raises:
            DeadlineError: It did not drain in time (and goes on draining).
        """
        check_wait(timeout_s)
        if not drain:
            self.cancel()
            return
        self.request_stop()
        with Interrupts() as interrupts:
            is_in_time = self._wait(interrupts, timeout_s)
            if not is_in_time:
                raise self._late("did not drain", timeout_s)
            self._free()
            if interrupts.was_interrupted:
                raise interrupts.exit_error()

    def request_stop(self) -> None:
        """As `stop`, without waiting."""
        self._is_stopping = True
        self.close_inputs()
        self._controller.ask(self.generation, lambda run, _: run.stop_sources())

    def cancel(self) -> None:
        """Give the run up: `result` raises RunStoppedError, whole epochs stay."""
        self.request_cancel()
        if self.record.is_driven_here():
            return  # by the callback that asks for it: the end comes after it
        self.record.wait_until(lambda: False, CANCEL_TIMEOUT_S)
        self._free()

    def give_up(self) -> None:
        """As `cancel`, and workers of this run's own are not waited for."""
        self.request_cancel()
        if self._settle is None:
            self.cancel()
        else:
            self._settle(True)

    def request_cancel(self) -> None:
        """As `cancel`, without waiting."""
        self._is_stopping = True
        self._controller.ask(self.generation, RunState.cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.give_up()
            return
        self.close_inputs()
        is_known = self.record.was_raised_here  # and handled, as the block has ended
        try:
            self.result()
        except TimelyError as error:
            if not is_known or error is not self.record.error:
                raise

    def close_inputs(self) -> None:
        """Close every input of the dataflow: nothing more comes from the driver."""
        for spec in self._identity.graph.operators:
            if spec.kind == INPUT_KIND:
                self.input(spec.name).close()

    def input(self, name: str) -> InputHandle:
        """Return the handle of an input.

        Raises:
            GraphError: The dataflow has no input of that name.
        """
        spec = self._named(name, INPUT_KIND)
        handle = self._inputs.get(name)
        if handle is None:
            ahead = self._identity.config.max_epochs_ahead
            handle = self._inputs.setdefault(name, InputHandle(self, spec, ahead))
        return handle

    def probe(self, name: str) -> Probe:
        """Return the handle of a probe.

        Raises:
            GraphError: The dataflow has no probe of that name.
        """
        return Probe(self, self._named(name, PROBE_KIND))

    def send_input(self, operator: int, shard: int, body: Any) -> None:
        """Send a message of an input handle to one shard."""
        self._controller.ask(
            self.generation, lambda run, _: run.send_input(operator, shard, body)
        )

    def metrics(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """Return figures of the run: summed over workers, and by worker.

        `controller` counts what all runs of the session sent and received there, and
        `frames_refused`, there and for the workers, what came to the session that was
        not from a peer of it, by the word for why.
        While it runs they are asked for; a worker that is too busy to answer within
        about a second, or has not begun, is missing from them.
        """
        check_wait(timeout_s)
        by_worker = self.record.metrics
        if not self.done():
            inspected = self._inspect(timeout_s)
            by_worker = self.record.metrics if inspected is None else inspected.metrics
        return {
            **merge_metrics(
                [metrics_before(self._identity.graph), *by_worker.values()]
            ),
            "workers": dict(by_worker),
            "controller": self._controller.transport_metrics(),
        }

    def explain_stall(self, timeout_s: float = ANSWER_TIMEOUT_S) -> StallReport:
        """Say who holds the run back: location, time, worker, where created."""
        check_wait(timeout_s)
        who = f"run {self.generation} of dataflow {self._identity.graph.name!r}"
        if self.done():
            return StallReport(f"{who} is over")
        inspected = self._inspect(timeout_s)
        if inspected is not None:
            return inspected.explanation
        state = "is over" if self.done() else "has a controller that does not answer"
        return StallReport(f"{who} {state}")

    def __repr__(self) -> str:
        state = "over" if self.done() else "running"
        name = self._identity.graph.name
        return f"<Run {self.generation} of {name!r}, {state}>"

    def _inspect(self, timeout_s: float) -> Inspected | None:
        opened = self.record.open_inspection()
        if opened is None:
            return None
        request, future = opened
        self._controller.ask(
            self.generation, lambda run, now: run.inspect(request, now)
        )
        self.record.wait_until(future.done, timeout_s)
        if not future.done() or future.cancelled():
            return None
        return future.result()

    def _named(self, name: str, kind: str) -> OperatorSpec:
        graph = self._identity.graph
        names = [spec.name for spec in graph.operators if spec.kind == kind]
        if name not in names:
            msg = (
                f"dataflow {graph.name!r} has no {kind} of that name; got {name!r}; "
                f"expected one of {names}"
            )
            raise GraphError(msg, name=name, kind=kind)
        return graph.operator_named(name)

    def _free(self) -> None:
        self._owner = None
        if self._settle is not None:
            self._settle(False)

    def _late(self, what: str, timeout_s: float | None) -> DeadlineError:
        who = f"run {self.generation} of dataflow {self._identity.graph.name!r} {what}"
        return late(who, timeout_s, self.explain_stall())
