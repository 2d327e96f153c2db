"""How long computations have to be for calls of their own to cost nothing: Figure 6.

OpByOp, running ahead: each call a computation over all hosts of an island, which takes
what the one before it returned. Beside launches in one loop of one process. Devices are
paced: they hold for a stated time and compute nothing, while processes, sockets, messages
and the scheduler are real; so 16 hosts fit on two cores. For each number of hosts, the
shortest time from which on OpByOp reaches 95% of the plain launches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from benchmarks.peers.paced import PlainLaunches, named_step
from benchmarks.report import Report
from timelyml import ml

TIMES_MS = (0.1, 0.2, 0.35, 0.6, 1.0, 2.0, 3.5, 5.0, 10.0)
CONVERGED = 0.95
MIN_CALLS = 64
"""Or how long the first takes to come and the last to be heard of would count."""
AIMS_MS = {2: 1.0, 16: 5.0}
"""By the number of hosts."""


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(prog="benchmarks convergence", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.25, help="of each figure")
    options = parser.parse_args(argv)
    table = Report("OpByOp on paced devices, as a share of plain launches")
    times_s = {f"step{number}": each / 1e3 for number, each in enumerate(TIMES_MS)}
    plain = PlainLaunches(times_s)
    for num_hosts in options.hosts:
        rounds = measure(num_hosts, times_s, plain, options.rounds, options.seconds)
        add_rows(table, num_hosts, times_s, rounds)
    table.show(as_json=options.json)
    return 0


def measure(
    num_hosts: int,
    times_s: dict[str, float],
    plain: PlainLaunches,
    num_rounds: int,
    seconds: float,
) -> list[dict[str, float]]:
    """Return, for each round, the rate by function, as a share of plain launches."""
    with ml.local(
        devices_per_island=num_hosts,
        hosts_per_island=num_hosts,
        paced_s=times_s,
        startup_timeout_s=300,
    ) as client:
        slice_ = client.slice({"x": num_hosts})
        cut = slice_.sharding(P("x"))  # type: ignore[no-untyped-call]  # JAX is typed in part
        first = client.put(np.zeros(num_hosts, np.float32), cut)
        rounds: list[dict[str, float]] = [{} for _ in range(num_rounds)]
        for name, time_s in times_s.items():
            run = ml.jit(named_step(name), slice=slice_, out_shardings=cut)
            num_calls = max(MIN_CALLS, round(seconds / time_s))
            _timed(run, first, num_calls)
            for each in rounds:
                plain_s = plain.run(name, num_calls)
                each[name] = plain_s / _timed(run, first, num_calls)
    return rounds


def _timed(run: Any, first: Any, num_calls: int) -> float:
    x = first
    began = time.perf_counter()
    for _ in range(num_calls):
        x = run(x)
    x.block_until_ready()
    return time.perf_counter() - began


def add_rows(
    table: Report,
    num_hosts: int,
    times_s: dict[str, float],
    rounds: Sequence[dict[str, float]],
) -> None:
    """Add the share at each time, and from which on it is as good as all."""
    shares = {name: median(each[name] for each in rounds) for name in times_s}
    converged_ms = float("inf")
    for name, time_s in reversed(times_s.items()):
        if shares[name] < CONVERGED:
            break
        converged_ms = time_s * 1e3
    for name, time_s in times_s.items():
        row = f"share_{num_hosts}_hosts_{time_s * 1e3:g}_ms"
        table.add(row, shares[name], "of plain launches")
    aim = AIMS_MS.get(num_hosts)
    table.add(
        f"converged_{num_hosts}_hosts_ms",
        converged_ms,
        "ms",
        target="" if aim is None else f"at most {aim:g} ms",
        is_met=None if aim is None else converged_ms <= aim,
    )
