"""How device time is shared by weight, whatever the lengths of programs: Figure 9.

Four clients on one paced device (it holds for a stated time and computes nothing; all
else is real) under the policy "share", running ahead with calls of 0.33, 1, 2.4 and
0.6 ms, with weights 1:1:1:1 and 1:2:4:8. How long launches of each held the device in two
seconds, by the trace, beside what its weight says, and as the cluster accounts for it.
`--plot FILE` draws the former over time; needs the extra `plot`.
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
        measured = measure(weights)
        add_row(table, weights, measured)
        drawn.append((weights, measured))
    table.show(as_json=options.json)
    if options.plot:
        draw(drawn, options.plot)
    return 0


@dataclass(frozen=True, slots=True)
class Measured:
    """What clients of one device got in two seconds.

    Attributes:
        held_s: Of each, when its launches held the device: from and to, in seconds since
            the begin.
        accounted_s: Of each, the device seconds that the cluster says it had.
    """

    held_s: list[list[tuple[float, float]]]
    accounted_s: list[float]

    def used_s(self) -> list[float]:
        """Return the device seconds of each."""
        return [sum(end - begin for begin, end in spans) for spans in self.held_s]


def measure(weights: Sequence[int]) -> Measured:
    """Return what clients of these weights got, all of which always have something."""
    are_ready = threading.Barrier(len(weights) + 1)
    with ml.local(paced_s=TIMES_S, policy="share") as client:
        others = [client.another(weight=each) for each in weights]
        busy = [Busy(*each, are_ready) for each in zip(others, TIMES_S, strict=True)]
        for each in busy:
            each.start()
        are_ready.wait()
        with client.resources.trace() as trace:
            time.sleep(WARM_UP_S)
            began_s, before = time.monotonic(), _accounted_s(client, len(others))
            time.sleep(SECONDS)
            after = _accounted_s(client, len(others))
            for each in busy:
                each.is_over.set()
                each.join()
        for other in others:
            other.close()
    if trace.num_left_out:
        raise RuntimeError(
            f"the trace has not all launches: got {trace.num_left_out} less"
        )
    held_s: dict[str, list[tuple[float, float]]] = {name: [] for name in TIMES_S}
    for launch in trace.launches:
        begin = max(0.0, launch.began_s - began_s)
        end = min(SECONDS, launch.ended_s - began_s)
        if begin < end:
            held_s[launch.name].append((begin, end))
    accounted_s = [b - a for a, b in zip(before, after, strict=True)]
    return Measured(list(held_s.values()), accounted_s)


def _accounted_s(client: Any, num_others: int) -> list[float]:
    return [each.device_s for each in client.usage()[1 : num_others + 1]]


class Busy(threading.Thread):
    """A client that calls a function again and again, as far ahead as it may."""

    def __init__(self, client: Any, name: str, are_ready: threading.Barrier) -> None:
        super().__init__(name=name)
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
        x.block_until_ready()  # so that all of it is in the trace


def add_row(table: Report, weights: Sequence[int], measured: Measured) -> None:
    """Add how far the worst share is from what its weight says."""
    used_s = measured.used_s()
    shares, error = _shares(weights, used_s)
    table.add(
        f"error_{'_'.join(map(str, weights))}",
        error,
        "of a share",
        target=f"at most {MAX_ERROR:g}",
        is_met=error <= MAX_ERROR,
        **{f"share_{name}": share for name, share in zip(TIMES_S, shares, strict=True)},
        accounted_error=_shares(weights, measured.accounted_s)[1],
        utilisation=sum(used_s) / SECONDS,
    )


def _shares(
    weights: Sequence[int], used_s: Sequence[float]
) -> tuple[list[float], float]:
    shares = [each / sum(used_s) for each in used_s]
    pairs = zip(shares, weights, strict=True)
    return shares, max(abs(x * sum(weights) / weight - 1) for x, weight in pairs)


def draw(drawn: Sequence[tuple[Sequence[int], Measured]], path: str) -> None:
    """Draw the device time of each client over time."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - of the extra `plot`

    figure = Figure(figsize=(10, 4))
    axes = figure.subplots(1, len(drawn))
    for axis, (weights, measured) in zip(axes, drawn, strict=True):
        for spans, weight in zip(measured.held_s, weights, strict=True):
            ends = [end for _, end in spans]
            axis.plot(
                ends, np.cumsum([b - a for a, b in spans]), label=f"weight {weight}"
            )
        axis.set(xlabel="s", ylabel="device s", title=":".join(map(str, weights)))
        axis.legend()
    figure.savefig(path)
