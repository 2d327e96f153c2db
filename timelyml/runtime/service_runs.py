"""Dataflows that services run: their sources and sinks are beside the controller.

Such a run has one worker or some, and ends as any other does, with the first of them
that dies. What its operators do on a worker they may have the service's half there do:
`shard.service(name)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from timelyml.exchange import Lane
from timelyml.graph import Graph
from timelyml.progress import Timestamp
from timelyml.runtime.config import RunConfig, ShippedRun
from timelyml.runtime.effects import Effect, Ended
from timelyml.runtime.record import RunRecord
from timelyml.runtime.run_plan import RunPlan
from timelyml.runtime.run_state import RunState
from timelyml.runtime.runs import Observer, Runs
from timelyml.runtime.shipping import ship


class ServiceRuns:
    """The runs of the services of one controller; owned by the thread that drives it.

    Args:
        runs: All runs of the controller.
        start: Starts a run, or tells its observer at once why that cannot be.
        generations: Numbers for runs.
    """

    def __init__(
        self,
        runs: Runs,
        start: Callable[[RunPlan, Observer], None],
        generations: Iterator[int],
    ) -> None:
        self._runs = runs
        self._start = start
        self._generations = generations
        self._shipped: tuple[Graph, Graph, bytes] | None = None  # what ran last
        self._open: dict[int, tuple[RunPlan, RunRecord]] = {}

    def start(
        self, graph: Graph, workers: Sequence[int], hear: Callable[[Effect], None]
    ) -> ServiceRun:
        """Start a dataflow on some workers; see `ServiceSite.run`."""
        resolved, shipped = self._ship(graph, len(workers))
        plan = RunPlan(
            next(self._generations),
            resolved,
            RunConfig(),
            shipped,
            len(workers),
            workers=tuple(workers),
        )
        record = RunRecord(resolved)
        self._open[plan.generation] = plan, record

        def observe(effect: Effect) -> None:
            if isinstance(effect, Ended):
                self._open.pop(plan.generation, None)
            record.apply(effect)
            hear(effect)

        self._start(plan, observe)
        return ServiceRun(plan, self._runs)

    def open(self) -> list[tuple[RunPlan, RunRecord]]:
        """Return those that are not over; from any thread."""
        return list(self._open.values())

    def _ship(self, graph: Graph, num_workers: int) -> tuple[Graph, bytes]:
        """Return a graph for so many workers, and pickled; of many runs of one once."""
        resolved = graph.resolve(num_workers)
        last = self._shipped
        if last is None or last[0] is not graph or last[1] != resolved:
            shipped = ship(ShippedRun(resolved, RunConfig()))
            last = self._shipped = graph, resolved, shipped
        return last[1], last[2]


class ServiceRun:
    """A run of a service; for the controller's thread.

    What is sent to a worker here and by the service itself, on the control lane, comes
    there in the order in which it was sent.
    """

    def __init__(self, plan: RunPlan, runs: Runs) -> None:
        self.generation = plan.generation
        self._plan = plan
        self._runs = runs

    def send(self, name: str, shard: int, epoch: int, records: list[object]) -> None:
        """Send records to a shard of an input at an epoch, which never falls."""
        self._to(name, (shard,), ("data", epoch, records))

    def advance_to(self, name: str, epoch: int) -> None:
        """Promise that an input brings nothing before an epoch any more."""
        num_shards = self._plan.graph.operator_named(name).num_shards
        self._to(name, range(num_shards or 1), ("advance", epoch))

    def cancel(self) -> None:
        """Give it up."""
        self._runs.decide(self.generation, RunState.cancel)

    def _to(self, name: str, shards: Sequence[int], body: tuple[object, ...]) -> None:
        operator = self._plan.graph.operator_named(name).index

        def send(run: RunState, now: float) -> list[Effect]:
            del now
            sent = (run.send_input(operator, x, body, Lane.CONTROL) for x in shards)
            return list(chain.from_iterable(sent))

        self._runs.decide(self.generation, send)


def passed(frontier: Sequence[Timestamp]) -> int | None:
    """Return the first epoch that a probe has not passed; None: it passed all.

    >>> passed(()), passed((3,))
    (None, 3)
    """
    epochs = [time if isinstance(time, int) else time[0] for time in frontier]
    return min(epochs, default=None)
