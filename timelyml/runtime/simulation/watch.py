"""One run of a simulation, watched: what its oracle is shown, and how it may end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from timelyml.errors import (
    DeadlineError,
    OperatorError,
    PeerError,
    RunStoppedError,
    TimelyError,
)
from timelyml.exchange import CONTROLLER
from timelyml.runtime.config import ShippedRun
from timelyml.runtime.controller import Controller
from timelyml.runtime.dataflow import Dataflow
from timelyml.runtime.effects import Effect, Ended, Inspected, Released
from timelyml.runtime.run_plan import RunPlan
from timelyml.runtime.run_state import RunState
from timelyml.runtime.shipping import ship
from timelyml.runtime.simulation.behaviour import Behaviour
from timelyml.runtime.simulation.oracle import Oracle
from timelyml.runtime.simulation.scenario import (
    HARMLESS,
    OF_ONE_RUN,
    Fault,
    Run,
    Scenario,
)
from timelyml.runtime.simulation.sources import Source
from timelyml.runtime.simulation.trace import TRACE, Trace
from timelyml.runtime.simulation.violation import Violation
from timelyml.runtime.worker import Worker


class Watch:
    """Looks at one run from outside, after every step of anything."""

    def __init__(self, scenario: Scenario, index: int) -> None:
        self.run: Run = scenario.runs[index]
        self.generation = index + 1
        self.ended: Ended | None = None
        self.is_stopped = False
        self.is_cancelled = False
        self.oracle = Oracle(
            self.run.plan, scenario.num_workers, self.run.config.max_epochs_ahead
        )
        self.plan = RunPlan(
            self.generation,
            self.run.plan.graph,
            self.run.config,
            ship(ShippedRun(self.run.plan.graph, self.run.config)),
            scenario.num_workers,
        )
        self._fault = scenario.fault if index == 0 or not _is_local(scenario) else None
        self._seen: dict[int, tuple[Dataflow, Trace]] = {}
        self._started: set[int] = set()
        self._num_asked = 0
        self._num_answered = 0

    def inputs(self) -> list[list[tuple[int, int, Any]]]:
        """Return what the driver sends to fed sources: one list a shard, in order."""
        return [
            [(source.operator, shard, body) for body in source.script(shard)]
            for source in self.run.plan.operators
            if isinstance(source, Source) and source.is_fed
            for shard in range(
                self.plan.graph.operators[source.operator].num_shards or 0
            )
        ]

    def num_spilled(self) -> int:
        """Return how many blocks went to disk, on all workers that said so."""
        metrics = self.ended.metrics.values() if self.ended is not None else ()
        return sum(each.get("spilled_blocks", 0) for each in metrics)

    def inspect(self, run: RunState, now: float) -> list[Effect]:
        """Ask what is going on; the answer must come before the run ends."""
        self._num_asked += 1
        return run.inspect(self._num_asked, now)

    def on_effect(self, effect: Effect) -> None:
        """Take what the run's observer is told.

        Raises:
            Violation: It is not true, or not how this run may end.
        """
        if self.ended is not None:
            raise Violation("failure", f"run {self.generation} goes on after its end")
        match effect:
            case Released():
                self.oracle.release(effect)
            case Inspected():
                self._num_answered += 1
            case Ended():
                self.ended = effect
                self._check_end(effect.error)

    def after_controller(self, controller: Controller) -> None:
        """Look at the controller's view of the run."""
        state = self._state_in(controller)
        if state is not None:
            self.oracle.check_tracker(CONTROLLER, state._progress.tracker)  # noqa: SLF001

    def after_worker(self, worker: Worker, controller: Controller) -> None:
        """Look at one worker, which has just taken a step.

        Raises:
            Violation: A promise is broken.
        """
        flow = worker._dataflows.get(self.generation)  # noqa: SLF001
        seen = self._seen.get(worker.index)
        if seen is None:
            if flow is None:
                return
            seen = self._seen[worker.index] = (flow, _install_trace(flow))
        known, trace = seen
        events, trace[:] = trace[:], []
        has_started = (
            worker.index not in self._started
            and (known in worker._started or known.has_failed)  # noqa: SLF001
        )
        if has_started:
            self._started.add(worker.index)
        self.oracle.observe(events, has_started=has_started)
        if flow is None or known.has_failed:
            self._on_gone(worker, known, controller)
        elif worker.index in self._started:
            self.oracle.check_tracker(worker.index, flow.tracker)

    def forget_worker(self, index: int) -> None:
        """A worker is replaced by one that knows nothing."""
        self._seen.pop(index, None)
        self.oracle.forget_tracker(index)

    def _on_gone(self, worker: Worker, flow: Dataflow, controller: Controller) -> None:
        state = self._state_in(controller)
        self.oracle.forget_tracker(worker.index)
        gave_up = flow.has_failed or worker.is_stopped
        if state is not None and state.error is None and not gave_up:
            self.oracle.check_settled(worker.index, flow.tracker)

    def _state_in(self, controller: Controller) -> RunState | None:
        return controller.runs.get(self.generation)

    def _check_end(self, error: TimelyError | None) -> None:
        if self._num_answered != self._num_asked:
            what = f"run {self.generation} ended without answering the driver"
            raise Violation("failure", what)
        if error is None:
            self._check_not_failing()
            self.oracle.finish(is_stopped=self.is_stopped)
        elif not self._may_end_with(error):
            notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
            what = f"run {self.generation} ended with {type(error).__name__}: {error}"
            raise Violation("failure", what + notes)

    def _may_end_with(self, error: TimelyError) -> bool:
        match self._fault:
            case Fault.CANCEL:
                return self.is_cancelled and isinstance(error, RunStoppedError)
            case Fault.TIMEOUT:
                return isinstance(error, DeadlineError) and bool(
                    error.values["explanation"]
                )
            case Fault.RAISE:
                names = {spec.name for spec in self._failing()}
                is_users = isinstance(error, OperatorError) and isinstance(
                    error, ValueError
                )
                return is_users and error.values["operator"] in names
            case None | Fault.NONE | Fault.PAUSE | Fault.STOP | Fault.INSPECT:
                return False
            case _:
                return isinstance(error, PeerError)

    def _failing(self) -> Iterator[Any]:
        for each in self.run.plan.operators:
            if isinstance(each, Behaviour) and each.is_failing:
                yield self.plan.graph.operators[each.operator]

    def _check_not_failing(self) -> None:
        """An operator that fails by design must have got nothing."""
        for spec in self._failing():
            for (channel, _, _), records in self.oracle.truth.got.items():
                target = self.plan.graph.channels[channel].target.operator
                if target == spec.index and records:
                    what = f"{spec.name!r} raised, and the run is complete all the same"
                    raise Violation("failure", what)


def _is_local(scenario: Scenario) -> bool:
    """Whether the fault concerns the first run alone."""
    return scenario.fault in HARMLESS or scenario.fault in OF_ONE_RUN


def _install_trace(flow: Dataflow) -> Trace:
    """Make all operators of one worker write into one list, in order."""
    trace: Trace = []
    for instance in flow.instances:
        for shard in instance.shards:
            cell = flow.state.cell(instance.index, shard, TRACE, instance.name)
            trace += cell.get("events", ())
            cell["events"] = trace
    return trace
