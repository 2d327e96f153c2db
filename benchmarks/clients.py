"""Many clients of one device: throughput, utilisation, switching: Figures 8 and 11.

1 to 16 clients, each running ahead with calls of 0.04, 0.33, 1 or 2.4 ms that take what
the one before returned, on one paced device (it holds for that time and computes nothing;
all else is real). Beside launches in one loop of one process that knows of no other.
Utilisation: the part of the time for which the device is held. Switching: by how much
longer the same calls take from several clients than from one.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from benchmarks.peers.paced import PlainLaunches, named_step
from benchmarks.report import Report
from timelyml import ml

TIMES_MS = (0.04, 0.33, 1.0, 2.4)
CLIENTS = (1, 2, 4, 8, 16)
MAX_SWITCHING = 1.05
MIN_UTILISATION = 0.95

SWITCH_S = 1e-4
"""After so long a thread lets others run: clients are threads here, not processes."""


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(prog="benchmarks clients", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each figure")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    options = parser.parse_args(argv)
    sys.setswitchinterval(SWITCH_S)
    table = Report("Calls of several clients on one paced device")
    times_s = {f"step{number}": each / 1e3 for number, each in enumerate(TIMES_MS)}
    plain = PlainLaunches(times_s)
    with ml.local(paced_s=times_s) as client:
        others = [client.another() for _ in range(max(options.clients) - 1)]
        sides = [Side(each, times_s) for each in (client, *others)]
        for name, time_s in times_s.items():
            total = max(64, round(options.seconds / time_s))
            rounds = [
                measure(sides, plain, name, total, options.clients)
                for _ in range(options.rounds + 1)
            ][1:]
            add_rows(table, time_s, total, rounds)
        for each in others:
            each.close()
    table.show(as_json=options.json)
    return 0


class Side:
    """A client with its slice and functions."""

    def __init__(self, client: Any, times_s: dict[str, float]) -> None:
        slice_ = client.slice({"x": 1})
        whole = slice_.sharding(P())  # type: ignore[no-untyped-call]  # JAX is typed in part
        self._first = client.put(np.zeros(1, np.float32), whole)
        self._runs = {
            name: ml.jit(named_step(name), slice=slice_, out_shardings=whole)
            for name in times_s
        }

    def run(self, name: str, num_calls: int) -> None:
        """Call a function so often, and wait for the last."""
        x = self._first
        for _ in range(num_calls):
            x = self._runs[name](x)
        x.block_until_ready()


def measure(
    sides: Sequence[Side],
    plain: PlainLaunches,
    name: str,
    total: int,
    clients: Sequence[int],
) -> dict[int, float]:
    """Return the seconds for all calls together, by the number of clients; 0 is plain."""
    found = {0: plain.run(name, total)}
    for count in clients:
        threads = [
            threading.Thread(target=each.run, args=(name, total // count))
            for each in sides[:count]
        ]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found[count] = (time.perf_counter() - began) * total / (total // count * count)
    return found


def add_rows(
    table: Report, time_s: float, total: int, rounds: Sequence[dict[int, float]]
) -> None:
    """Add what was measured with calls of one length."""
    least = min(count for count in rounds[0] if count)
    for count in rounds[0]:
        seconds = median(each[count] for each in rounds)
        who = f"{count}_clients" if count else "plain"
        ratio = median(each[0] / each[count] for each in rounds)
        utilisation = total * time_s / seconds
        switching = median(each[count] / each[least] for each in rounds) if count else 1
        aims = []
        if count >= 4:
            aims.append(("throughput of plain", ratio >= 1))
        if count >= 8:
            aims.append(("95% utilised", utilisation >= MIN_UTILISATION))
        if count > least:
            aims.append(("switching below 5%", switching <= MAX_SWITCHING))
        table.add(
            f"{who}_{time_s * 1e3:g}_ms_per_s",
            total / seconds,
            "/s",
            target=", ".join(aim for aim, _ in aims),
            is_met=all(is_met for _, is_met in aims) if aims else None,
            ratio_to_plain=ratio,
            utilisation=utilisation,
            to_one_client=switching,
        )
