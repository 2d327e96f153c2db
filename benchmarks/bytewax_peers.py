"""timelyml beside Bytewax: the same work on the same data, 1 worker and 2 processes.

The engines take turns, each run in fresh processes, and results are compared. Time
counts from the first read of a source to the end, so neither pays for its start. The
ratio is Bytewax's seconds by timelyml's: above 1, timelyml is ahead. The ratio of CPU
times is told too: other processes of the machine distort it less.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers import work
from benchmarks.peers.runs import Outcome, run
from benchmarks.report import Report

ENGINES = ("bytewax", "timelyml")
BARE_CASE = "keyed_sum_arrays"
QUEUE_CASE = "huge_epoch"
CREDIT_BYTES = 32 << 20
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of work: how much of it there is, and how far ahead to be."""

    name: str
    unit: str
    amount: Callable[[work.Size], int]
    aim: float | None = 1.0


CASES = (
    Case("word_count", "words", lambda size: 10 * size.lines, 5.0),
    Case("keyed_sum", "records", lambda size: size.records, 5.0),
    Case(BARE_CASE, "rows", lambda size: size.rows),
    Case("csv_keyed_sum", "records", lambda size: size.records),
    Case("map_and_redistribute", "records", lambda size: size.records),
    Case("epochs_pipelined", "epochs", lambda size: size.epochs, 5.0),
    Case("epochs_waiting", "epochs", lambda size: size.waits, 2.0),
    # How fast its slow sink is does not depend on the engine; what waits for it does.
    Case(QUEUE_CASE, "items", lambda size: size.items, None),
)


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table or one JSON object."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(
        prog="benchmarks bytewax_peers", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the work")
    parser.add_argument(
        "--small", action="store_true", help="a quarter of the work, in one round"
    )
    parser.add_argument("--case", nargs="*", choices=names, default=names)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    options = parser.parse_args(argv)
    scale, num_rounds = options.scale, options.rounds
    if options.small:
        scale, num_rounds = scale / 4, 1
    size = work.Size().scaled(scale)
    report = Report("timelyml beside Bytewax, same data, fresh processes")
    for case in CASES:
        if case.name in options.case:
            for num_processes in options.processes:
                measure(report, case, size, num_processes, num_rounds)
    report.show(as_json=options.json)
    return 0


def measure(
    report: Report, case: Case, size: work.Size, num_processes: int, num_rounds: int
) -> None:
    """Add the rows of one case and number of processes."""
    outcomes: dict[str, list[Outcome]] = {engine: [] for engine in ENGINES}
    bare: list[float] = []
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        data = Path(folder)
        work.store(case.name, size, data, num_processes)
        for _ in range(num_rounds):
            for engine in ENGINES:
                outcome = run(engine, case.name, size, num_processes, data)
                outcomes[engine].append(outcome)
            check_equal(case, [outcomes[engine][-1] for engine in ENGINES])
            if case.name == BARE_CASE and num_processes == 1:
                bare.append(bare_seconds(data))
    where = "1_worker" if num_processes == 1 else f"{num_processes}_processes"
    name = f"{case.name}_{where}"
    theirs, ours = (_seconds(outcomes[engine]) for engine in ENGINES)
    ratios = [
        a.seconds / b.seconds
        for a, b in zip(outcomes["bytewax"], outcomes["timelyml"], strict=True)
    ]
    amount, unit = case.amount(size), f"{case.unit}/s"
    cpu = {
        engine: median(outcome.cpu_seconds for outcome in outcomes[engine])
        for engine in ENGINES
    }
    cpu_ahead = cpu["bytewax"] / cpu["timelyml"]
    report.add(f"{name}.bytewax", amount / theirs, unit)
    report.add(
        name,
        amount / ours,
        unit,
        target="" if case.aim is None else f"{case.aim:g} x Bytewax",
        is_met=None if case.aim is None else median(ratios) >= case.aim,
        ahead=median(ratios),
        cpu_ahead=cpu_ahead,
    )
    if bare:
        _add_bare(report, name, amount / median(bare), ours / median(bare))
    if case.name == QUEUE_CASE:
        _add_queues(report, name, outcomes)


def check_equal(case: Case, outcomes: Sequence[Outcome]) -> None:
    """Refuse figures of engines that came to different results.

    Raises:
        ValueError: They did.
    """
    theirs, ours = (outcome.sums for outcome in outcomes)
    is_equal = theirs.keys() == ours.keys() and all(
        abs(value - ours[key]) <= 1e-9 * max(1.0, abs(value))
        for key, value in theirs.items()
    )
    if not is_equal:
        raise ValueError(f"the engines disagree on {case.name}")


def bare_seconds(data: Path) -> float:
    """How long the same sums take numpy, by itself and in one process."""
    blocks: list[dict[str, Any]] = list(work.stored(data, 0, 1))
    began = time.perf_counter()
    work.summed_by_key(blocks)
    return time.perf_counter() - began


def _seconds(outcomes: Sequence[Outcome]) -> float:
    return median(outcome.seconds for outcome in outcomes)


def _add_bare(report: Report, name: str, speed: float, ratio: float) -> None:
    report.add(
        f"{name}.bare_numpy",
        speed,
        "rows/s",
        target="timelyml within 2 x",
        is_met=ratio <= 2.0,
        ratio_of_timelyml=ratio,
    )


def _add_queues(report: Report, name: str, outcomes: dict[str, list[Outcome]]) -> None:
    for engine in ENGINES:
        queued = max(outcome.queued_bytes for outcome in outcomes[engine])
        memory = median(outcome.memory_bytes for outcome in outcomes[engine])
        is_ours = engine == "timelyml"
        report.add(
            f"{name}.queued_{engine}",
            queued / MIB,
            "MiB",
            target=f"within the credit of {CREDIT_BYTES // MIB} MiB" if is_ours else "",
            is_met=queued <= CREDIT_BYTES + 2 * work.ITEM_BYTES if is_ours else None,
            memory_mib=memory / MIB,
        )
