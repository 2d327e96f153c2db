"""How many computations with a collective run in a second: the paper's Figure 5.

A scalar sum over all devices and an addition, on 1, 2, 4 and 8 virtual devices of one
worker. OpByOp: one call for each. Chained: a program of 128 calls, as it is and with
`fuse=True`. Fused: one computation with a loop of 128. All run ahead of replies. Beside
plain JAX in a process with the same devices and environment, which takes turns with them:
its Fused beside Fused, its OpByOp beside all others. `jax_bare` is its OpByOp launched
as workers launch, by the executable itself: what one launch after the other can reach
there. Each ratio is the median of the rounds' own ratios. `--peers` adds what is installed of
the extra `peers`: Ray, by an actor that owns the devices and by compiled graphs of it, and
Monarch, by an actor.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from benchmarks.peers.asked import asked_process
from benchmarks.peers.plain_jax import CHAIN, fused, step
from benchmarks.report import Report
from timelyml import ml
from timelyml.runtime.environment import worker_environment

STEPS_ON_ONE = 8
"""So many times more where a step has no collective, and takes so much less."""

AIMS = {"chained_1_device": 0.8} | {
    f"{what}_{num_devices}_devices": aim
    for num_devices in (2, 4, 8)
    for what, aim in {
        "op_by_op": 0.8,
        "chained": 1.3,
        "chained_fuse": 3.0,
        "fused": 0.95,
    }.items()
}
"""Steps per second, as a multiple of plain JAX's own."""


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(prog="benchmarks dispatch", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1024, help="in each round")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--peers", action="store_true", help="Ray and Monarch too")
    options = parser.parse_args(argv)
    table = Report("Computations with a collective, beside plain JAX")
    for num_devices in options.devices:
        steps = options.steps * (STEPS_ON_ONE if num_devices == 1 else 1)
        rounds = measure(num_devices, options.rounds, steps, with_peers=options.peers)
        add_rows(table, num_devices, rounds, steps)
    table.show(as_json=options.json)
    return 0


def measure(
    num_devices: int, num_rounds: int, steps: int, *, with_peers: bool = False
) -> list[dict[str, float]]:
    """Return, for each round, seconds by what was measured."""
    environment = worker_environment(os.environ, num_devices=num_devices)
    with (
        asked_process("plain_jax", environment) as plain,
        ml.local(devices_per_island=num_devices) as client,
        ExitStack() as stack,
    ):
        peers = _peers(num_devices, stack) if with_peers else {}
        slice_ = client.slice({"x": num_devices})
        cut = slice_.sharding(P("x"))  # type: ignore[no-untyped-call]  # JAX is typed in part
        first = client.put(np.zeros(num_devices, np.float32), cut)
        run = ml.jit(step, slice=slice_, out_shardings=cut)
        whole = ml.jit(fused, slice=slice_, out_shardings=cut)

        def chain(x: Any) -> Any:
            for _ in range(CHAIN):
                x = run(x)
            return x

        runs: dict[str, Callable[[int], float]] = {
            "jax": lambda steps: plain("step", steps),
            "jax_bare": lambda steps: plain("bare", steps),
            "jax_fused": lambda steps: plain("fused", steps),
            "op_by_op": lambda steps: _timed(run, first, steps),
        }
        for name, function in {
            "chained": ml.program(chain),
            "chained_fuse": ml.program(chain, fuse=True),
            "fused": whole,
        }.items():
            runs[name] = partial(_timed_chain, function, first)
        runs |= peers
        for warm_up in runs.values():
            warm_up(2 * CHAIN)
        return [
            {name: timed(steps) for name, timed in runs.items()}
            for _ in range(num_rounds)
        ]


def _peers(num_devices: int, stack: ExitStack) -> dict[str, Callable[[int], float]]:
    """Start the controllers that are installed; until the stack is left."""
    peers: dict[str, Callable[[int], float]] = {}
    for package in ("ray", "monarch"):
        if find_spec(package) is not None:
            side = import_module(f"benchmarks.peers.{package}_side")
            peers |= stack.enter_context(side.start(num_devices))
    if not peers:
        raise SystemExit("no peer is installed; pip install '.[peers]'")
    return peers


def _timed_chain(function: Callable[[Any], Any], first: Any, steps: int) -> float:
    return _timed(function, first, steps // CHAIN)


def _timed(function: Callable[[Any], Any], first: Any, count: int) -> float:
    x = first
    began = time.perf_counter()
    for _ in range(count):
        x = function(x)
    x.block_until_ready()
    return time.perf_counter() - began


def add_rows(
    table: Report, num_devices: int, rounds: Sequence[dict[str, float]], steps: int
) -> None:
    """Add what was measured on so many devices."""
    devices = "1_device" if num_devices == 1 else f"{num_devices}_devices"
    for what in rounds[0]:
        name = f"{what}_{devices}"
        peer = "jax_fused" if what.endswith("_fused") or what == "fused" else "jax"
        ratio = median(each[peer] / each[what] for each in rounds)
        aim = AIMS.get(name)
        table.add(
            f"{name}_per_s",
            steps / median(each[what] for each in rounds),
            "/s",
            target="" if aim is None else f"at least {aim:g} x jax",
            is_met=None if aim is None else ratio >= aim,
            ratio_to_jax=ratio,
        )
