"""How device time is shared by weight, whatever the lengths of programs: Figure 9.

Four clients on one paced device (it holds for a stated time and computes nothing; all
else is real) under the policy "share", running ahead with calls of 0.33, 1, 2.4 and
0.6 ms, with weights 1:1:1:1 and 1:2:4:8. What each got in two seconds beside what its
weight says: by the calls that it made, times their length, and as the cluster accounts
for it. `--plot FILE` draws the latter over time; needs the extra `plot`.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from benchmarks.peers.paced import named_step
from benchmarks.report import Report
from timelyml import ml

TIMES_S = {"a": 0.33e-3, "b": 1e-3, "c": 2.4e-3, "d": 0.6e-3}
WEIGHTS = (1, 1, 1, 1), (1, 2, 4, 8)
WARM_UP_S = 0.5
SECONDS = 2.0
SAMPLE_S = 0.05
MAX_ERROR = 0.05

SWITCH_S = 1e-4
"""After so long a thread lets others run: clients are threads here, not processes."""


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(prog="benchmarks shares", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--plot", help="file to draw into, as shares.svg")
    options = parser.parse_args(argv)
    sys.setswitchinterval(SWITCH_S)
    table = Report("Shares of device time over two seconds")
    drawn = []
    for weights in WEIGHTS:
        samples = measure(weights)
        add_row(table, weights, samples)
        drawn.append((weights, samples))
    table.show(as_json=options.json)
    if options.plot:
        draw(drawn, options.plot)
    return 0


@dataclass(frozen=True, slots=True)
class Sample:
    """Device seconds of each client: by its calls, and as the cluster accounts for it."""

    at_s: float
    called_s: list[float]
    accounted_s: list[float]


def measure(weights: Sequence[int]) -> list[Sample]:
    """Return samples over two seconds."""
    are_ready = threading.Barrier(len(weights) + 1)
    samples: list[Sample] = []
    with ml.local(paced_s=TIMES_S, policy="share") as client:
        others = [client.another(weight=each) for each in weights]
        busy = [Busy(*each, are_ready) for each in zip(others, TIMES_S, strict=True)]
        for each in busy:
            each.start()
        are_ready.wait()
        time.sleep(WARM_UP_S)
        began = time.perf_counter()
        while not samples or samples[-1].at_s < SECONDS:
            usage = client.usage()[1 : len(others) + 1]
            samples.append(
                Sample(
                    time.perf_counter() - began,
                    [each.num_calls * TIMES_S[each.name] for each in busy],
                    [each.device_s for each in usage],
                )
            )
            time.sleep(SAMPLE_S)
        for each in busy:
            each.is_over.set()
            each.join()
        for other in others:
            other.close()
    return samples


class Busy(threading.Thread):
    """A client that calls a function again and again, as far ahead as it may."""

    def __init__(self, client: Any, name: str, are_ready: threading.Barrier) -> None:
        super().__init__(name=name)
        self.num_calls = 0
        self.is_over = threading.Event()
        self._client = client
        self._are_ready = are_ready

    def run(self) -> None:
        """Call until it is over."""
        slice_ = self._client.slice({"x": 1})
        whole = slice_.sharding(P())  # type: ignore[no-untyped-call]  # JAX is typed in part
        run = ml.jit(named_step(self.name), slice=slice_, out_shardings=whole)
        x = run(self._client.put(np.zeros(1, np.float32), whole)).block_until_ready()
        self._are_ready.wait()
        while not self.is_over.is_set():
            x = run(x)
            self.num_calls += 1


def add_row(table: Report, weights: Sequence[int], samples: Sequence[Sample]) -> None:
    """Add how far the worst share is from what its weight says."""
    first, last = samples[0], samples[-1]
    shares, error = _shares(weights, first.called_s, last.called_s)
    _, accounted_error = _shares(weights, first.accounted_s, last.accounted_s)
    took_s = sum(last.called_s) - sum(first.called_s)
    table.add(
        f"error_{'_'.join(map(str, weights))}",
        error,
        "of a share",
        target=f"at most {MAX_ERROR:g}",
        is_met=error <= MAX_ERROR,
        **{f"share_{name}": share for name, share in zip(TIMES_S, shares, strict=True)},
        accounted_error=accounted_error,
        utilisation=took_s / last.at_s,
    )


def _shares(
    weights: Sequence[int], before: Sequence[float], after: Sequence[float]
) -> tuple[list[float], float]:
    took = [b - a for a, b in zip(before, after, strict=True)]
    shares = [each / sum(took) for each in took]
    pairs = zip(shares, weights, strict=True)
    return shares, max(abs(x * sum(weights) / weight - 1) for x, weight in pairs)


def draw(measured: Sequence[tuple[Sequence[int], Sequence[Sample]]], path: str) -> None:
    """Draw the device time of each client over time."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - of the extra `plot`

    figure = Figure(figsize=(10, 4))
    axes = figure.subplots(1, len(measured))
    for axis, (weights, samples) in zip(axes, measured, strict=True):
        times = [each.at_s for each in samples]
        for index, weight in enumerate(weights):
            start = samples[0].accounted_s[index]
            took = [each.accounted_s[index] - start for each in samples]
            axis.plot(times, took, label=f"weight {weight}")
        axis.set(xlabel="s", ylabel="device s", title=":".join(map(str, weights)))
        axis.legend()
    figure.savefig(path)
