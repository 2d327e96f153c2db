"""Figures 5, 6 and 8 on a GPU, with absolute times; says so where there is none.

One script of less than four minutes: OpByOp, Chained and Fused beside plain JAX on the
first GPU (Figure 5); the share of plain JAX that calls of their own reach by the time
that a computation takes (Figure 6); and the throughput of 1 to 8 clients (Figure 8).
Computations are loops of matmuls; how many take how long is measured first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from jax.sharding import PartitionSpec as P

from benchmarks.peers.asked import Asked, asked_process
from benchmarks.peers.plain_calls import CHAIN, first_value, function_named
from benchmarks.report import Report
from timelyml import ml

PLATFORM = "cuda"
SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Two processes share the device: neither takes all of its memory."""
TIMES_MS = (0.1, 0.33, 1.0, 2.4)
CLIENTS = (1, 2, 4, 8)
SECONDS = 0.5
"""Of each figure."""


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(prog="benchmarks gpu", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--platform", default=PLATFORM, help="cpu tries the script out")
    options = parser.parse_args(argv)
    kind = found(options.platform)
    if kind is None:
        print(f"no device of platform {options.platform!r} here: nothing is measured")
        return 0
    table = Report(f"Calls on one {kind}, beside plain JAX")
    settings = {**SHARED, "JAX_PLATFORMS": options.platform}
    with (
        asked_process("plain_calls", {**os.environ, **settings}) as plain,
        ml.local(environment=settings) as client,
    ):
        figure_5(table, Side(client), plain, options.rounds)
        lengths = calibrated(plain)
        figure_6(table, Side(client), plain, lengths, options.rounds)
        figure_8(table, client, plain, lengths, options.rounds)
    table.show(as_json=options.json)
    return 0


def found(platform: str) -> str | None:
    """Return the kind of the first device of a platform, if there is one."""
    code = f"import jax; print(jax.devices({platform!r})[0].device_kind)"
    environment = {**os.environ, "JAX_PLATFORMS": platform}
    looked = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    return looked.stdout.strip() if looked.returncode == 0 else None


class Side:
    """A client with a slice of one device."""

    def __init__(self, client: Any) -> None:
        self._slice = client.slice({"x": 1})
        self._whole = self._slice.sharding(P())  # type: ignore[no-untyped-call]  # JAX is typed in part
        self.first = client.put(first_value(), self._whole)
        self._functions: dict[str, Any] = {}

    def function(self, name: str) -> Any:
        """Return a function, compiled when it is called first."""
        if name not in self._functions:
            self._functions[name] = ml.jit(
                function_named(name), slice=self._slice, out_shardings=self._whole
            )
        return self._functions[name]

    def run(self, function: Any, num_calls: int) -> float:
        """Call a function so often, running ahead; return the seconds."""
        x = self.first
        began = time.perf_counter()
        for _ in range(num_calls):
            x = function(x)
        x.block_until_ready()
        return time.perf_counter() - began


def calibrated(plain: Asked) -> dict[str, float]:
    """Return functions that take about the wanted times, with the seconds they take."""
    each_s = plain("work200", 20) / 20 / 200
    found = {}
    for time_ms in TIMES_MS:
        name = f"work{max(1, round(time_ms / 1e3 / each_s))}"
        plain(name, 8)
        found[name] = plain(name, 64) / 64
    return found


def figure_5(table: Report, side: Side, plain: Asked, num_rounds: int) -> None:
    """Add calls of small computations, alone, in programs and in one."""
    step = side.function("step")

    def chain(x: Any) -> Any:
        for _ in range(CHAIN):
            x = step(x)
        return x

    kinds = {
        "op_by_op": (step, 1, "step"),
        "chained": (ml.program(chain), CHAIN, "step"),
        "chained_fuse": (ml.program(chain, fuse=True), CHAIN, "step"),
        "fused": (side.function("fused"), CHAIN, "fused"),
    }
    for what, (function, steps, peer) in kinds.items():
        num_peer = 32 * CHAIN // (CHAIN if peer == "fused" else 1)
        plain(peer, 64)
        side.run(function, 8)
        rounds = [
            (side.run(function, 32 * CHAIN // steps), plain(peer, num_peer))
            for _ in range(num_rounds)
        ]
        table.add(
            f"figure_5_{what}_us",
            median(own for own, _ in rounds) / (32 * CHAIN) * 1e6,
            "us a computation",
            jax_us=median(other for _, other in rounds) / (32 * CHAIN) * 1e6,
            ratio_to_jax=median(other / own for own, other in rounds),
        )


def figure_6(
    table: Report, side: Side, plain: Asked, lengths: dict[str, float], num_rounds: int
) -> None:
    """Add calls of their own, by the time that a computation takes."""
    for name, each_s in lengths.items():
        num_calls = max(16, round(SECONDS / each_s))
        function = side.function(name)
        side.run(function, 8)
        rounds = [
            (side.run(function, num_calls), plain(name, num_calls))
            for _ in range(num_rounds)
        ]
        table.add(
            f"figure_6_{each_s * 1e3:.3g}_ms",
            median(own for own, _ in rounds) / num_calls * 1e3,
            "ms a call",
            jax_us=median(other for _, other in rounds) / num_calls * 1e6,
            ratio_to_jax=median(other / own for own, other in rounds),
        )


def figure_8(
    table: Report,
    client: Any,
    plain: Asked,
    lengths: dict[str, float],
    num_rounds: int,
) -> None:
    """Add the throughput of several clients together."""
    others = [client.another() for _ in range(max(CLIENTS))]
    sides = [Side(each) for each in others]
    for name, each_s in lengths.items():
        num_calls = max(64, round(SECONDS / each_s))
        for side in sides:
            side.run(side.function(name), 2)
        for count in CLIENTS:
            rounds = [
                (_together(sides[:count], name, num_calls), plain(name, num_calls))
                for _ in range(num_rounds)
            ]
            table.add(
                f"figure_8_{count}_clients_{each_s * 1e3:.3g}_ms",
                num_calls / median(own for own, _ in rounds),
                "/s",
                ratio_to_jax=median(other / own for own, other in rounds),
            )
    for each in others:
        each.close()


def _together(sides: Sequence[Side], name: str, num_calls: int) -> float:
    share = num_calls // len(sides)
    threads = [
        threading.Thread(target=each.run, args=(each.function(name), share))
        for each in sides
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - began) * num_calls / (share * len(sides))
