"""Messages and bytes that progress costs per epoch, in both modes.

Every worker sends one record per epoch to the next one, and all wait until the epoch
is closed: as little data as there can be, so progress is at its most. Real worker
processes for small clusters, a simulation of the same run for those and large ones.
What a run costs besides its epochs cancels out: figures are differences between a
longer and a shorter run. A batch that rides along with data is no message of its own;
its bytes are those of such a message, less the header.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.pulse import pulse_graph
from benchmarks.report import Report
from benchmarks.simulated import Traffic, simulate
from timelyml import Cluster
from timelyml.exchange import Lane
from timelyml.exchange.frames import HEADER_BYTES
from timelyml.runtime.config import ProgressMode

MODES: tuple[ProgressMode, ...] = ("broadcast", "accumulator")
SIMULATED_EPOCHS = 1  # of the shorter run; the simulation repeats itself exactly


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(
        prog="benchmarks progress_traffic", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--simulated", type=int, nargs="*", default=[2, 8, 64, 512])
    parser.add_argument("--epochs", type=int, default=200)
    options = parser.parse_args(argv)
    report = Report("Progress per epoch, whole cluster")
    for num_workers in options.workers:
        with Cluster(num_workers) as cluster:
            for mode in MODES:
                traffic = _real(cluster, mode, options.epochs)
                _add(report, f"{mode}_{num_workers}_workers", traffic, num_workers)
    for num_workers in options.simulated:
        for mode in MODES:
            traffic = _simulated(num_workers, mode)
            name = f"{mode}_{num_workers}_workers_simulated"
            _add(report, name, traffic, num_workers)
    report.show(as_json=options.json)
    return 0


def _add(report: Report, name: str, traffic: Traffic, num_workers: int) -> None:
    report.add(
        name,
        traffic.messages,
        "messages",
        riders=traffic.riders,
        bytes=traffic.size_bytes,
        bytes_per_worker=traffic.size_bytes / num_workers,
    )


def _simulated(num_workers: int, mode: ProgressMode) -> Traffic:
    fewer, more = (
        simulate(pulse_graph(num_epochs=epochs, senders="all"), num_workers, mode)
        for epochs in (SIMULATED_EPOCHS, 2 * SIMULATED_EPOCHS)
    )
    return more.per_epoch(fewer, SIMULATED_EPOCHS)


def _real(cluster: Cluster, mode: ProgressMode, num_epochs: int) -> Traffic:
    _run(cluster, mode, 10)  # so that all workers are there
    fewer = _run(cluster, mode, num_epochs)
    more = _run(cluster, mode, 2 * num_epochs)
    return more.per_epoch(fewer, num_epochs)


def _run(cluster: Cluster, mode: ProgressMode, num_epochs: int) -> Traffic:
    """Run it once; what workers and controller sent."""
    before = _sent_by_controller(cluster)
    graph = pulse_graph(num_epochs=num_epochs, senders="all")
    run = cluster.start(graph, progress_mode=mode)
    run.result()
    after = _sent_by_controller(cluster)
    progress: dict[str, Any] = run.metrics()["progress"]
    mean_bytes = progress["bytes"] / progress["messages"] - HEADER_BYTES
    return Traffic(
        progress["messages"] + after[0] - before[0],
        progress["riders"],
        progress["bytes"] + after[1] - before[1] + progress["riders"] * mean_bytes,
    )


def _sent_by_controller(cluster: Cluster) -> tuple[int, int]:
    """Messages and bytes; but for a run's start and end, all of it is progress."""
    session = cluster._session  # noqa: SLF001 - runs do not meter their controller
    if session is None:
        return 0, 0
    metrics = session.transport.metrics
    return metrics.messages_sent[Lane.CONTROL], metrics.bytes_sent[Lane.CONTROL]
