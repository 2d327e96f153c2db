"""One run as the controller sees it: a pure state machine.

It is told what workers sent, what the driver asks and what time it is, and answers
with effects. It keeps the run's own tracker, so it knows when the run is complete,
how far the probes are, and which epochs of collected results are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from timelyml.errors import (
    DeadlineError,
    InvariantError,
    RunStoppedError,
    TimelyError,
)
from timelyml.exchange import CONTROLLER, Lane, Unreadable
from timelyml.progress import ProgressBatch
from timelyml.runtime.controller_progress import ControllerProgress
from timelyml.runtime.effects import (
    DriverMessage,
    Effect,
    Ended,
    Inspected,
    OldestEpochs,
    Send,
    Started,
)
from timelyml.runtime.failure import unpack_error
from timelyml.runtime.inspections import Inspection, Inspections
from timelyml.runtime.messages import (
    Deploy,
    Drop,
    Dropped,
    Emitted,
    Failed,
    Inspect,
    OperatorMessage,
    Ready,
    Report,
    Start,
    Stopping,
    StopSources,
)
from timelyml.runtime.pickles import unreadable_failure
from timelyml.runtime.release import Collector
from timelyml.runtime.run_plan import RunPhase, RunPlan, numbers_of
from timelyml.runtime.stall import StallReport, explain, explained

COLLECT_TAG = "collect"
LAST_WORD = 0  # the request that a run makes itself when it is out of time


class RunState:
    """Decides everything about one run; knows no clock, no thread and no socket.

    Its time limit counts from `asked_at`. `activities` and who is `absent` explain it.
    It is told of workers, and sends to them, by their numbers in the cluster.
    """

    def __init__(
        self,
        plan: RunPlan,
        asked_at: float,
        activities: Mapping[int, str],
        absent: Callable[[], Collection[int]],
    ) -> None:
        self.plan = plan
        self.phase = RunPhase.WAITING
        self.error: TimelyError | None = None
        self._activities = activities
        self._absent = absent
        self._members = plan.members
        self._numbers = numbers_of(self._members)
        self._progress = ControllerProgress(
            plan.graph, self._members, plan.generation, plan.config.progress_mode
        )
        self._collector = Collector(plan.graph, self._progress.tracker)
        self._awaited: set[int] = set()
        self._lost: set[int] = set()
        self._metrics: dict[int, dict[str, Any]] = {}
        self._phase_deadline: float | None = None
        limit_s = plan.config.timeout_s
        self._time_limit = None if limit_s is None else asked_at + limit_s
        self._inspections = Inspections()
        # What the driver asked for before data could flow.
        self._early: list[Send] = []
        self._is_stop_wanted = False
        self._is_draining = False
        self._stop_epochs: dict[int, int] = {}  # by worker

    @property
    def who(self) -> str:
        """The run, for people."""
        return f"run {self.plan.generation} of dataflow {self.plan.graph.name!r}"

    def begin(self, now: float) -> list[Effect]:
        """All workers are there: deploy."""
        plan = self.plan
        self.phase = RunPhase.BUILDING
        self._awaited = set(range(plan.num_workers))
        self._phase_deadline = now + plan.build_timeout_s
        return self._to_all(Deploy(plan.generation, self._members, plan.shipped))

    def handle(self, peer: int, message: object, now: float) -> list[Effect]:
        """Take a message of this generation from a worker."""
        effects: list[Effect] = []
        if peer not in self._members:
            return effects
        worker = self.number_of(peer)
        match message:
            case ProgressBatch():
                self._progress.accept(message)
            case Emitted():
                effects = self._emitted(message)
            case Stopping():
                effects = self._stopping(message)
            case Ready():
                effects = self._ready(message, now)
            case Failed():
                effects = self.fail(unpack_error(message.error), now)
            case Dropped():
                self._metrics[worker] = message.metrics
                self._awaited.discard(worker)
                effects = self._end_if_answered()
            case Unreadable():
                failure = unreadable_failure(
                    self.plan.graph, message, peer=worker, here=CONTROLLER
                )
                effects = self.fail(failure, now)
            case Report():
                effects = self._conclude(self._inspections.report(worker, message), now)
            case _:
                kind = type(message).__name__
                error = InvariantError(
                    f"{self.who} got a message that is not for a controller; got a "
                    f"{kind} of worker {worker}; expected what workers say; report it, "
                    "as this is a bug"
                )
                effects = self.fail(error, now)
        return effects

    def settle(self) -> list[Effect]:
        """Apply all progress that came in, then say what follows from it."""
        effects: list[Effect] = list(self._progress.settle())
        if self.phase not in (RunPhase.RUNNING, RunPhase.ENDING):
            return effects
        effects += self._collector.release()
        if self.phase is RunPhase.RUNNING and self._progress.tracker.is_empty():
            effects += self._end("complete")
        return effects

    def lose(self, peer: int, error: TimelyError, now: float) -> list[Effect]:
        """A worker of the cluster is gone: the run cannot go on if it is a member."""
        if peer not in self._members:
            return []
        worker = self.number_of(peer)
        is_missed = self.phase is not RunPhase.ENDING or worker in self._awaited
        self._lost.add(worker)
        self._awaited.discard(worker)
        effects = self.fail(error, now) if is_missed else []
        effects += self._conclude(self._inspections.lose(worker), now)
        return effects + self._end_if_answered()

    def lose_link(
        self, worker: int, peer: int, error: TimelyError, now: float
    ) -> list[Effect]:
        """A worker hears no more of another: a run that has both cannot go on."""
        return self.fail(error, now) if {worker, peer} <= {*self._members} else []

    def number_of(self, worker: int) -> int:
        """Return the number in the run of a worker of the cluster."""
        return self._numbers.get(worker, worker)

    def tick(self, now: float) -> list[Effect]:
        """Act on every deadline that has passed."""
        effects = self._conclude(self._inspections.expired(now), now)
        if self._time_limit is not None and now >= self._time_limit:
            self._time_limit = None
            effects += self._ask(LAST_WORD, now)
        if self._phase_deadline is not None and now >= self._phase_deadline:
            self._phase_deadline = None
            if self.phase is RunPhase.BUILDING:
                effects += self._give_up(self._never_built(), self._awaited, now)
            elif self.phase is RunPhase.ENDING:
                effects += self._finish()
        return effects

    def next_deadline(self) -> float | None:
        """When `tick` has to be called, if ever."""
        times = (
            self._inspections.next_deadline(),
            self._time_limit,
            self._phase_deadline,
        )
        return min((t for t in times if t is not None), default=None)

    def send_input(
        self, operator: int, shard: int, body: Any, lane: Lane = Lane.BULK
    ) -> list[Effect]:
        """Pass a message of an input handle on; on one lane, so it stays in order."""
        if self.phase in (RunPhase.ENDING, RunPhase.ENDED):
            return []
        spec = self.plan.graph.operators[operator]
        placement = spec.placement or self.plan.config.placement
        num_shards = spec.num_shards or self.plan.num_workers
        worker = placement.worker_of(shard, num_shards, self.plan.num_workers)
        message = OperatorMessage(self.plan.generation, operator, shard, body)
        send = Send(self._members[worker], message, lane)
        if self.phase is RunPhase.RUNNING:
            return [send]
        self._early.append(send)
        return []

    def stop_sources(self) -> list[Effect]:
        """Let every source end at its present epoch, so that the run drains.

        Once: asked again, regular sources might agree on another epoch.
        """
        if self.phase is not RunPhase.RUNNING:
            self._is_stop_wanted = True
            return []
        if self._is_draining:
            return []
        self._is_draining = True
        # Bulk, so that it does not overtake what input handles sent before.
        return self._to_all(StopSources(self.plan.generation), Lane.BULK)

    def _stopping(self, message: Stopping) -> list[Effect]:
        """Once every worker told how far it is, let all end at the latest epoch."""
        self._stop_epochs[message.worker] = message.epoch
        if len(self._stop_epochs) < self.plan.num_workers:
            return []
        epoch = max(self._stop_epochs.values())
        return self._to_all(StopSources(self.plan.generation, epoch), Lane.BULK)

    def cancel(self, now: float) -> list[Effect]:
        """Give the run up."""
        msg = (
            f"{self.who} was cancelled; got no complete result; expected to run to its "
            "end; use stop() to drain it instead"
        )
        return self.fail(RunStoppedError(msg, generation=self.plan.generation), now)

    def inspect(self, request: int, now: float) -> list[Effect]:
        """Ask all workers for metrics and holdings; `Inspected(request)` answers."""
        return self._ask(request, now)

    def fail(self, error: TimelyError, now: float) -> list[Effect]:
        """End the run with an error; a later one is noted on the first."""
        if self.phase is RunPhase.ENDED or self.error is not None:
            if self.error is not None and not isinstance(error, RunStoppedError):
                self.error.add_note(f"then: {error}")
            return []
        self.error = error
        if self.phase is RunPhase.WAITING:
            return self._finish()
        is_cancelled = isinstance(error, RunStoppedError)
        effects = self._end("cancelled" if is_cancelled else "failed")
        self._time_limit = None
        # A worker that is gone does not answer; nor may one that failed.
        self._phase_deadline = now + self.plan.drop_timeout_s
        return effects

    def _ready(self, message: Ready, now: float) -> list[Effect]:
        if self.phase is not RunPhase.BUILDING:
            return []
        graph = self.plan.graph
        if message.fingerprint != graph.fingerprint():
            return self.fail(self._other_graph(message), now)
        self._awaited.discard(message.worker)
        if self._awaited:
            return []
        self.phase = RunPhase.RUNNING
        self._phase_deadline = None
        effects = [
            *self._to_all(Start(self.plan.generation)),
            Started(),
            OldestEpochs(self._progress.oldest_epochs()),
            *self._early,
        ]
        self._early.clear()
        return effects + (self.stop_sources() if self._is_stop_wanted else [])

    def _other_graph(self, message: Ready) -> InvariantError:
        difference = self.plan.graph.first_difference(message.description)
        msg = (
            f"{self.who}: worker {message.worker} built another graph; got "
            f"{difference or message.fingerprint}; expected the driver's graph; a graph "
            "must not depend on the worker that builds it"
        )
        return InvariantError(msg, worker=message.worker, difference=difference)

    def _never_built(self) -> DeadlineError:
        late = sorted(self._awaited)
        msg = (
            f"{self.who} did not start; got no answer from workers {late}; expected them "
            f"to build it within {self.plan.build_timeout_s:g} s; see what they do below, "
            "or allow more with startup_timeout_s"
        )
        return explained(msg, self._standing(), workers=tuple(late))

    def _emitted(self, message: Emitted) -> list[Effect]:
        if message.tag == COLLECT_TAG:
            self._collector.add(message.operator, message.shard, message.body)
            return []
        name = self.plan.graph.operators[message.operator].name
        return [DriverMessage(name, message.shard, message.tag, message.body)]

    def _ask(self, request: int, now: float) -> list[Effect]:
        is_building = self.phase is RunPhase.BUILDING and request != LAST_WORD
        is_asked = is_building or self.phase is RunPhase.RUNNING
        workers = range(self.plan.num_workers) if is_asked else ()
        self._inspections.ask(request, now + self.plan.answer_timeout_s, workers)
        if not is_asked:
            return self._conclude(self._inspections.answered(), now)
        return self._to_all(Inspect(self.plan.generation, request))

    def _conclude(self, inspections: list[Inspection], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for inspection in inspections:
            explanation = self._explain(inspection)
            if inspection.request == LAST_WORD:
                effects += self._run_out_of_time(inspection, explanation, now)
            else:
                metrics = {**self._metrics, **inspection.metrics}
                effects.append(Inspected(inspection.request, metrics, explanation))
        return effects

    def _run_out_of_time(
        self, inspection: Inspection, explanation: StallReport, now: float
    ) -> list[Effect]:
        if self.phase is RunPhase.ENDED:
            return []
        msg = (
            f"{self.who} is not complete; got {self.plan.config.timeout_s:g} s of time; "
            "expected it to end by then; see what holds it back below, or allow more "
            "with timeout_s"
        )
        silent = inspection.awaited or self._awaited
        return self._give_up(explained(msg, explanation), silent, now)

    def _give_up(
        self, error: DeadlineError, silent: Collection[int], now: float
    ) -> list[Effect]:
        """Fail without waiting for workers that have kept silent for long enough."""
        others = set(range(self.plan.num_workers)).difference(silent)
        effects = self.fail(error, now)
        self._awaited &= others
        return effects + self._end_if_answered()

    def _explain(self, inspection: Inspection) -> StallReport:
        if self.phase is not RunPhase.RUNNING:
            return self._standing()
        return explain(
            self.plan.graph,
            self._progress.tracker,
            inspection.holdings,
            who=self.who,
            unanswered=[self._doing(worker) for worker in sorted(inspection.awaited)],
        )

    def _standing(self) -> StallReport:
        """Say for whom the run waits where it is not for progress."""
        awaited = self._absent() if self.phase is RunPhase.WAITING else self._awaited
        late = tuple(self._doing(worker) for worker in sorted(awaited))
        return StallReport(f"{self.who} is {self.phase.value}", (), late)

    def _doing(self, worker: int) -> str:
        doing = self._activities.get(self._members[worker])
        return f"worker {worker}, {doing}" if doing else f"worker {worker}"

    def _end(self, reason: str) -> list[Effect]:
        self.phase = RunPhase.ENDING
        self._awaited = set(range(self.plan.num_workers)) - self._lost
        # After a complete run workers first do what is left, e.g. a callback that
        # follows the last frontier; a dead one is noticed as such, and the run's time
        # limit still holds.
        self._phase_deadline = None
        return self._to_all(Drop(self.plan.generation, reason))

    def _end_if_answered(self) -> list[Effect]:
        is_over = self.phase is RunPhase.ENDING and not self._awaited
        return self._finish() if is_over else []

    def _finish(self) -> list[Effect]:
        self.phase = RunPhase.ENDED
        self._phase_deadline = self._time_limit = None
        effects: list[Effect] = []
        if self.error is None:
            effects += self._progress.settle()
            effects += self._collector.release()
        effects += self._conclude(self._inspections.all(), 0.0)
        return [*effects, Ended(self.error, dict(self._metrics))]

    def _to_all(self, message: object, lane: Lane = Lane.CONTROL) -> list[Effect]:
        return [Send(worker, message, lane) for worker in self._members]
