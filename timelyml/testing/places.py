"""The places where a dataflow can run, for tests that must not tell them apart."""

from __future__ import annotations

from typing import Any, Final

from timelyml.fluent import Dataflow, Mode
from timelyml.runtime.cluster import Cluster
from timelyml.runtime.result import Result
from timelyml.runtime.run import Run
from timelyml.testing.leftovers import eventually

MODES: Final[dict[Mode, int]] = {"inline": 1, "threads": 2, "processes": 2}
"""Each mode, with the number of workers that tests use there."""

RUN_TIMEOUT_S = 30.0


class Place:
    """A cluster that many tests share, and the runs of the present one.

    Args:
        mode: Where the workers live: `inline`, `threads` or `processes`.
        num_workers: Default: 1 inline, else 2.
    """

    def __init__(self, mode: Mode, *, num_workers: int | None = None) -> None:
        self.mode = mode
        self.num_workers = num_workers or MODES[mode]
        self.cluster = Cluster(self.num_workers, mode=mode)
        self._runs: list[Run] = []
        self._warm: object = None

    def wait_until_ready(self) -> None:
        """Run something once on each session, so that its workers have all come."""
        self.cluster.__enter__()
        if self._warm is not self._session:
            flow = Dataflow("warm-up")
            flow.source([0]).collect()
            self.run(flow)
            self._warm = self._session

    def run(self, flow: Dataflow, **options: Any) -> Result:
        """Run to the end; inline it is the calling thread that works.

        Args:
            flow: What to run; its inputs are closed at once.
            options: Of `Dataflow.run`; `timeout_s` is 30 unless it is given.
        """
        options.setdefault("timeout_s", RUN_TIMEOUT_S)
        if self.mode == "inline":
            return flow.run(cluster=self.cluster, **options)
        run = self.start(flow, **options)
        run.close_inputs()
        return run.result()

    def start(self, flow: Dataflow, **options: Any) -> Run:
        """Start, and watch that the run ends with the test.

        Args:
            flow: What to start.
            options: As of `run`.
        """
        options.setdefault("timeout_s", RUN_TIMEOUT_S)
        # A thread for the shared inline cluster would end its driving by the caller.
        shared = None if self.mode == "inline" else self.cluster
        run = flow.start(cluster=shared, **options)
        self._runs.append(run)
        return run

    def check_nothing_left(self) -> None:
        """Demand that every run started here is over, and left nothing in workers.

        Raises:
            AssertionError: Something is left.
        """
        __tracebackhide__ = True
        runs, self._runs = self._runs, []
        for run in runs:
            if not run.done():
                explanation = run.explain_stall()
                run.cancel()
                raise AssertionError(f"the test left {run!r} running: {explanation}")
            if run.record.error is None:
                self._check_books(run)
        controller = self._session.controller
        if not eventually(lambda: controller.num_runs == 0):
            raise AssertionError(f"the controller still has {controller.num_runs} runs")

    def close(self) -> None:
        """End the workers."""
        self.cluster.close()

    def __repr__(self) -> str:
        return f"<Place {self.mode!r} of {self.num_workers} workers>"

    @property
    def _session(self) -> Any:
        return self.cluster._session  # noqa: SLF001 - replaced when a worker is lost

    def _check_books(self, run: Run) -> None:
        by_worker = run.metrics()["workers"]
        silent = set(range(self.num_workers)) - set(by_worker)
        if silent:
            raise AssertionError(f"{run!r} has no figures of workers {sorted(silent)}")
        for worker, figures in by_worker.items():
            waiting = figures["bytes_waiting_for_credit"]
            if waiting:
                raise AssertionError(f"{waiting} bytes wait on worker {worker}")
            for name, operator in figures["operators"].items():
                left = operator["queued_blocks"], operator["pending_notifications"]
                if left != (0, 0):
                    what = f"{left[0]} blocks and {left[1]} notifications"
                    raise AssertionError(f"{name!r} on worker {worker} holds {what}")
