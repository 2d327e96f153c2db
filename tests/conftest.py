"""The three places where a dataflow runs, for tests that must not tell them apart."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pytest
from zmq.utils.garbage import gc

from timelyml import Cluster, Dataflow

MODES = {"inline": 1, "threads": 2, "processes": 2}
RUN_TIMEOUT_S = 30.0
GONE_TIMEOUT_S = 10.0


class Place:
    """A cluster that tests share, and what a test left behind on it."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.num_workers = MODES[mode]
        self.cluster = Cluster(self.num_workers, mode=mode)
        self._runs: list = []
        self._warm = None

    def wait_until_ready(self) -> None:
        """Run something once on each session, so that its workers have all come."""
        self.cluster.__enter__()
        if self._warm is not self.cluster._session:
            flow = Dataflow("warm-up")
            flow.source([0]).collect()
            self.run(flow)
            self._warm = self.cluster._session

    def run(self, flow, **options):
        """Run to the end; inline it is the calling thread that works."""
        options.setdefault("timeout_s", RUN_TIMEOUT_S)
        if self.mode == "inline":
            return flow.run(cluster=self.cluster, **options)
        run = self.start(flow, **options)
        for spec in run._identity.graph.operators:
            if spec.kind == "input":
                run.input(spec.name).close()
        return run.result()

    def start(self, flow, **options):
        """Start, and watch that it ends with the test."""
        options.setdefault("timeout_s", RUN_TIMEOUT_S)
        # A thread for the shared inline cluster would end its driving by the caller.
        shared = None if self.mode == "inline" else self.cluster
        run = flow.start(cluster=shared, **options)
        self._runs.append(run)
        return run

    def check_nothing_left(self) -> None:
        """Demand that every run of the test is over, and left nothing in workers."""
        runs, self._runs = self._runs, []
        for run in runs:
            assert run.done(), f"the test left {run!r} running: {run.explain_stall()}"
            if run.record.error is None:
                self._check_books(run)
        controller = self.cluster._session.controller
        assert eventually(lambda: not controller._runs), controller._runs

    def _check_books(self, run) -> None:
        by_worker = run.metrics()["workers"]
        assert set(by_worker) == set(range(self.num_workers))
        for worker, figures in by_worker.items():
            assert figures["bytes_waiting_for_credit"] == 0, worker
            for name, operator in figures["operators"].items():
                left = operator["queued_blocks"], operator["pending_notifications"]
                assert left == (0, 0), f"{name} on worker {worker} holds {left}"


def eventually(condition, timeout_s: float = GONE_TIMEOUT_S) -> bool:
    """Poll for something that ends soon, such as a thread."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def threads() -> set[str]:
    """Names of the threads of this process, less the one that pyzmq keeps for good.

    It frees buffers that were sent without a copy, and starts with the first.
    """
    return {each.name for each in threading.enumerate() if each is not gc.thread}


def children() -> set[int]:
    """Child processes of this process."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that ended meanwhile
            found.update(map(int, (task / "children").read_text().split()))
    return found


def sockets() -> int:
    """How many sockets this process has open."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += str(descriptor.readlink()).startswith("socket:")
    return found


@pytest.fixture(scope="session")
def places():
    """The clusters that tests have used so far, by mode; all gone at the end."""
    before = threads(), children(), sockets()
    opened: dict[str, Place] = {}
    yield opened
    for place in opened.values():
        place.cluster.close()
    assert eventually(lambda: threads() <= before[0]), threads() - before[0]
    assert eventually(lambda: children() <= before[1]), children() - before[1]
    assert eventually(lambda: sockets() <= before[2]), (before[2], sockets())


@pytest.fixture(params=list(MODES))
def cluster(request, places):
    """A place to run: the calling thread, two threads, two processes over ZeroMQ."""
    mode = request.param
    if mode not in places:
        places[mode] = Place(mode)
    place = places[mode]
    place.wait_until_ready()
    before = threads(), children()
    yield place
    place.check_nothing_left()
    assert eventually(lambda: threads() <= before[0]), threads() - before[0]
    assert eventually(lambda: children() <= before[1]), children() - before[1]
