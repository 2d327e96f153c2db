"""How long a barrier takes, and an epoch in which one record crosses.

One worker in the calling process, and two worker processes in both progress modes,
next to a bare ZeroMQ round trip between two processes that wait as workers do: they
look for a message, and yield their core, which ZeroMQ's threads need, between two
looks. Ratios are to that one. Beside it stand a round trip between processes that sleep
until a message is there, and one of datagrams, which is what workers on one host send
each other as long as messages are small.

They take turns within each round, so that a busy machine slows all of them, and each
ratio is the median of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks.bare import Wait, round_trips
from benchmarks.pulse import pulse_graph
from benchmarks.report import Report, percentile
from timelyml import Cluster

WARM_UP = 50  # the first epochs wait for the slowest worker to start
BARE: dict[str, Wait] = {
    "bare_round_trip": "looking",
    "bare_round_trip_sleeping": "sleeping",
    "bare_round_trip_of_datagrams": "datagrams",
}
REFERENCE = "bare_round_trip"
AIMS = {"epoch_2_processes_broadcast": 3.0, "epoch_2_processes_accumulator": 10.0}
SENDERS = {"barrier": "none", "epoch": "first"}
MODES = (None, "broadcast", "accumulator")  # None: one worker, which tells nobody


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(prog="benchmarks latency", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3000, help="in each round")
    options = parser.parse_args(argv)
    rounds = measure(options.rounds, options.epochs)
    report(rounds).show(as_json=options.json)
    return 0


def measure(num_rounds: int, num_epochs: int) -> list[dict[str, list[float]]]:
    """Return, for each round, seconds by what was measured."""
    rounds = []
    with ExitStack() as stack:
        trips = {
            name: stack.enter_context(round_trips(wait)) for name, wait in BARE.items()
        }
        alone = stack.enter_context(Cluster(workers=1, mode="inline"))
        pair = stack.enter_context(Cluster(workers=2, mode="processes"))
        plans = [(what, mode) for what in SENDERS for mode in MODES]
        for trip in trips.values():
            trip.measure(WARM_UP)
        for _ in range(num_rounds):
            seconds: dict[str, list[float]] = {name: [] for name in BARE}
            for what, mode in plans:
                for name, trip in trips.items():
                    seconds[name] += trip.measure(-(-num_epochs // len(plans)))
                if mode is None:
                    name, samples = f"{what}_1_worker", _pulse(alone, what, num_epochs)
                else:
                    name = f"{what}_2_processes_{mode}"
                    samples = _pulse(pair, what, num_epochs, progress_mode=mode)
                seconds[name] = samples
            rounds.append(seconds)
    return rounds


def _pulse(cluster: Cluster, what: str, num_epochs: int, **config: Any) -> list[float]:
    graph = pulse_graph(num_epochs=WARM_UP + num_epochs, senders=SENDERS[what])
    result = cluster.run(graph, **config)
    return [sample for _, seconds in result["seconds"] for sample in seconds[WARM_UP:]]


def report(rounds: Sequence[dict[str, list[float]]]) -> Report:
    """Sum the rounds up: medians of the rounds' percentiles, and of their ratios.

    Of the 5th percentile the least, which a busy machine disturbs least.
    """
    p5 = defaultdict(list)
    p50 = defaultdict(list)
    p99 = defaultdict(list)
    ratios = defaultdict(list)
    for seconds in rounds:
        bare = percentile(seconds[REFERENCE], 50)
        for name, samples in seconds.items():
            p5[name].append(percentile(samples, 5))
            p50[name].append(percentile(samples, 50))
            p99[name].append(percentile(samples, 99))
            ratios[name].append(percentile(samples, 50) / bare)
    table = Report("Closing an epoch, beside a bare ZeroMQ round trip (ipc)")
    for name in p50:
        ratio, aim = median(ratios[name]), AIMS.get(name)
        table.add(
            f"{name}_p50_us",
            median(p50[name]) * 1e6,
            "us",
            target="" if aim is None else f"within {aim:g} x bare",
            is_met=None if aim is None else ratio <= aim,
            p5_us=min(p5[name]) * 1e6,
            p99_us=median(p99[name]) * 1e6,
            ratio_to_bare=ratio,
        )
    return table
