"""How long a program of stages takes by parallel and by sequential dispatch (Figure 7).

Stages stand on two islands in turn, each a small computation that takes what the one
before it computed, so that there is little to hide the work of hosts behind. Each call is
waited for. Parallel: all hosts prepare at once. Sequential: a host hears of a stage once
the one before it is over. Both take turns on the same islands. Every message between
hosts, and between them and the controller, is held back for a millisecond, as a network
of a data centre would do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from benchmarks.report import Report
from timelyml import ml

AIM_STAGES = 16
AIM = 2.0


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(prog="benchmarks pipelines", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--delay-ms", type=float, default=1.0, help="of messages")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    options = parser.parse_args(argv)
    table = Report("A call of a program of stages, by kind of dispatch")
    with ml.local(islands=2, delay_s=options.delay_ms / 1e3) as client:
        slices = [client.slice({"x": 1}, island=f"island-{each}") for each in (0, 1)]
        stage = [ml.jit(lambda x: x * 2 - x, slice=each) for each in slices]
        whole = slices[0].sharding(P())  # type: ignore[no-untyped-call]  # JAX is typed in part
        first = client.put(np.ones(256, np.float32), whole)
        for num_stages in options.stages:

            def pipeline(x: Any, num_stages: int = num_stages) -> Any:
                for number in range(num_stages):
                    x = stage[number % 2](x)
                return x

            rounds = measure(pipeline, first, options.rounds)
            add_rows(table, num_stages, rounds)
    table.show(as_json=options.json)
    return 0


def measure(
    pipeline: Callable[[Any], Any], first: Any, num_rounds: int
) -> list[dict[str, float]]:
    """Return, for each round, the seconds of a call by kind of dispatch."""
    programs = {
        "parallel": ml.program(pipeline),
        "sequential": ml.program(pipeline, dispatch="sequential"),
    }
    for program in programs.values():
        program(first).block_until_ready()
    rounds = []
    for _ in range(num_rounds):
        found = {}
        for name, program in programs.items():
            began = time.perf_counter()
            program(first).block_until_ready()
            found[name] = time.perf_counter() - began
        rounds.append(found)
    return rounds


def add_rows(
    table: Report, num_stages: int, rounds: Sequence[dict[str, float]]
) -> None:
    """Add what was measured with so many stages."""
    ratio = median(each["sequential"] / each["parallel"] for each in rounds)
    is_aimed = num_stages == AIM_STAGES
    for name in ("sequential", "parallel"):
        is_parallel = name == "parallel"
        table.add(
            f"{name}_{num_stages}_stages_ms",
            median(each[name] for each in rounds) * 1e3,
            "ms",
            target=f"{AIM:g} x sequential" if is_aimed and is_parallel else "",
            is_met=ratio >= AIM if is_aimed and is_parallel else None,
            speed_up=ratio if is_parallel else 1.0,
        )
