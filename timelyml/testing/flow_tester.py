"""Runs a flow in one thread, with a clock of its own, in an order that a seed decides.

The workers and the controller are those of every run; between them are simulated links,
which deliver in any order that real ones might, and always the same for the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import cache
from types import TracebackType
from typing import Any, Self

from timelyml.errors import InvariantError
from timelyml.exchange import CONTROLLER, Codec
from timelyml.fluent import Dataflow
from timelyml.graph import Graph
from timelyml.runtime.cluster import make_config
from timelyml.runtime.config import ShippedRun
from timelyml.runtime.controller import Controller
from timelyml.runtime.loop import Endpoint
from timelyml.runtime.messages import HANDSHAKE, Hello
from timelyml.runtime.record import OnMessage, RunRecord, reentry_error
from timelyml.runtime.result import Result
from timelyml.runtime.run import Run, RunIdentity
from timelyml.runtime.run_plan import RunPlan
from timelyml.runtime.scratch import ScratchDirectory
from timelyml.runtime.shipping import ship, worker_codec
from timelyml.runtime.simulation.clock import SimClock
from timelyml.runtime.simulation.network import SimNetwork
from timelyml.runtime.worker import Worker
from timelyml.testing.scheduler import Scheduler, StuckError

TICKS_S = (0.0, 3e-4, 4e-3, 1.1e-2)  # the last ends every turn after one callback


class FlowTester:
    """A cluster whose clock you move and whose order of events follows from a seed.

    Whatever waits, on a handle of a run, an input or a probe, lets the cluster work
    until the wait is over; time-outs are in the tester's own time, and pass at once. A
    wait that could never end raises `StuckError`. Callbacks run in the calling
    thread. What waits for another thread or process of its own, as `map_async` and
    asyncio do, is not simulated.

    Args:
        num_workers: Simulated workers.
        seed: The same seed gives the same order of events.

    >>> flow = Dataflow()
    >>> _ = flow.source(range(4)).exchange(lambda n: n).map(lambda n: n * n).collect()
    >>> with FlowTester(3, seed=7) as tester:
    ...     sorted(tester.run(flow)["out"])
    [0, 1, 4, 9]
    """

    def __init__(self, num_workers: int = 2, *, seed: int = 0) -> None:
        self.num_workers = num_workers
        self.seed = seed
        rng = random.Random(f"{seed} flow tester")  # noqa: S311 - guards nothing
        self._clock = SimClock(rng.choice(TICKS_S))
        self._scratch = ScratchDirectory()
        network = SimNetwork(_codec())
        self._controller = Controller(
            network.transport(CONTROLLER),
            num_workers,
            clock=self._clock,
            startup_timeout_s=float("inf"),
        )
        self._workers = [
            Worker(
                index,
                network.transport(index),
                codec=_codec(),
                clock=self._clock,
                spill_directory=self._scratch.path,
            )
            for index in range(num_workers)
        ]
        for worker in self._workers:
            hello = Hello(worker.index, 0, None, HANDSHAKE)
            network.transport(worker.index).send(CONTROLLER, hello)
        endpoints: dict[int, Endpoint] = {
            CONTROLLER: self._controller,
            **{worker.index: worker for worker in self._workers},
        }
        self._scheduler = Scheduler(rng, network, self._clock, endpoints)
        self._runs: list[Run] = []

    def start(
        self,
        flow: Dataflow | Graph,
        *,
        on_message: OnMessage | None = None,
        **config: Any,
    ) -> Run:
        """Start a flow; nothing happens before something is waited for.

        Args:
            flow: What to run.
            on_message: As of `Dataflow.run`.
            config: Options of `RunConfig`.

        Raises:
            TimelyError: The graph, an option or captured code was refused.
        """
        graph = flow.build() if isinstance(flow, Dataflow) else flow
        run_config = make_config(config)
        resolved = graph.resolve(self.num_workers, placement=run_config.placement)
        generation = len(self._runs) + 1
        record = _SteppedRecord(
            self._wait,
            resolved,
            on_message=on_message,
            on_listener_error=lambda error: self._controller.ask(
                generation, lambda run, now: run.fail(error, now)
            ),
            is_driven_here=lambda: self._scheduler.is_acting,
        )
        run = Run(
            RunIdentity(generation, resolved, run_config), self._controller, record
        )
        plan = RunPlan(
            generation,
            resolved,
            run_config,
            ship(ShippedRun(resolved, run_config)),
            self.num_workers,
            build_timeout_s=float("inf"),
        )
        self._controller.submit(plan, record.apply)
        self._runs.append(run)
        return run

    def run(
        self,
        flow: Dataflow | Graph,
        *,
        on_message: OnMessage | None = None,
        **config: Any,
    ) -> Result:
        """Run a flow to its end; its inputs are closed at once.

        Raises:
            TimelyError: As `start`; or the run failed, or would never end.
        """
        run = self.start(flow, on_message=on_message, **config)
        run.close_inputs()
        return run.result()

    @property
    def now(self) -> float:
        """Seconds since the tester was made, by its own clock."""
        return self._clock.now_s

    def settle(self) -> None:
        """Let everything happen that can, short of letting time pass."""
        self._noted(self._scheduler.settle)

    def advance(self, seconds: float) -> None:
        """Let so much time pass, and everything happen that falls due in it."""
        until = self._clock.now_s + seconds
        self._noted(lambda: self._scheduler.run_until(lambda: False, until))

    def close(self) -> None:
        """Cancel what still runs and let the workers leave.

        Raises:
            InvariantError: A worker still holds something of a run that is over.
        """
        if self._controller.is_stopped:
            return
        for run in self._runs:
            if not run.done():
                run.cancel()
        self.settle()
        left = [worker.index for worker in self._workers if worker.num_runs]
        self._free()
        if left:
            raise InvariantError(
                f"workers {left} still hold runs that are over; got seed {self.seed}; "
                f"expected nothing to be left; this is a bug of timelyml",
                seed=self.seed,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(self._note)
            self._free()
        else:
            self.close()

    def __repr__(self) -> str:
        return f"<FlowTester of {self.num_workers} workers, seed {self.seed}>"

    def _wait(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        until = None if timeout_s is None else self._clock.now_s + timeout_s
        try:
            return self._scheduler.run_until(condition, until)
        except StuckError as error:
            for run in self._runs:
                if timeout_s is None and not run.done():
                    error.add_note(str(run.explain_stall()))
            raise

    def _free(self) -> None:
        """Let the workers leave, with whatever they still hold."""
        self._controller.shut_down()
        for worker in self._workers:
            worker.leave()
        self._scratch.remove()

    def _noted(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            error.add_note(self._note)
            raise

    @property
    def _note(self) -> str:
        return (
            f"in the order of seed {self.seed}; see it again with "
            f"FlowTester({self.num_workers}, seed={self.seed})"
        )


class _SteppedRecord(RunRecord):
    """The record of a run that gets on while somebody waits for it."""

    def __init__(
        self,
        wait: Callable[[Callable[[], bool], float | None], bool],
        graph: Graph,
        **options: Any,
    ) -> None:
        super().__init__(graph, **options)
        self._wait = wait

    def wait_until(
        self, condition: Callable[[], bool], timeout_s: float | None
    ) -> bool:
        """Let the cluster work until `condition()` or the end of the run."""
        if self.is_driven_here() and not (self.is_ended or condition()):
            raise reentry_error("a run")
        return self._wait(lambda: self.is_ended or condition(), timeout_s)


def run_in_orders(
    flow: Dataflow,
    check: Callable[[Result], object],
    *,
    seeds: Iterable[int] = range(20),
    num_workers: int = 2,
    **config: Any,
) -> None:
    """Run a flow once for each seed and check what it collected.

    Args:
        flow: What to run.
        check: Called with each result; raises if it is not right.
        seeds: One order of events for each.
        num_workers: Simulated workers.
        config: Options of `RunConfig`.

    Raises:
        Exception: What `check` or a run raised, with a note that names the seed.
    """
    for seed in seeds:
        with FlowTester(num_workers, seed=seed) as tester:
            check(tester.run(flow, **config))


@cache
def _codec() -> Codec:
    """The codec of all testers here: making one takes 15 ms."""
    return worker_codec()
