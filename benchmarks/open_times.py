"""What one progress change costs, by the number of times that are open.

Opens and closes timestamps in random order, and oldest first, with 1, 100 and
10,000 of them open: ints, and products (epoch, iteration). A cost that stays flat
is the claim; for products it may grow with the width of the frontier only.

    python -m benchmarks open_times [--changes N] [--json]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.report import Report
from timelyml.progress import (
    MutableAntichain,
    ReachabilityGraph,
    Summary,
    Timestamp,
    Tracker,
)

OPEN_TIMES = (1, 100, 10_000)
MAX_RATIO = 2  # a heap of 10,000 is 13 levels deep, and falls out of the cache
BLOCK = 200  # changes between two readings of the clock
Step = Callable[[Timestamp, int], object]


@dataclass(frozen=True)
class Figure:
    """Median cost of a change, and the mean width of the frontier meanwhile."""

    median_us: float
    width: float


def antichain(_: int) -> tuple[Step, Callable[[], int]]:
    """Return a step on one multiset, and what tells the width of its frontier."""
    multiset = MutableAntichain()
    return (
        lambda time, delta: multiset.update(((time, delta),)),
        lambda: len(multiset.elements),
    )


def tracker(depth: int) -> tuple[Step, Callable[[], int]]:
    """Return a step on a tracker of five ports; at depth 1 they form a loop."""
    identity = Summary.identity(depth)
    edges = [(place, place + 1, identity) for place in range(4)]
    if depth:
        edges.append((4, 0, Summary.advance(depth)))
    tracked = Tracker(ReachabilityGraph([depth] * 5, edges))

    def step(time: Timestamp, delta: int) -> None:
        tracked.update(2, time, delta)
        tracked.propagate()

    return step, lambda: len(tracked.frontier(2).elements)


def fresh_times(
    depth: int, num_open: int, rng: random.Random, *, is_random: bool
) -> Iterator[Timestamp]:
    """Yield distinct times: ever later ones, or at random among ten times as many."""
    seen: set[Timestamp] = set()
    for index in range(10**9):
        epoch = rng.randrange(10 * num_open + 10**6) if is_random else index
        time = (epoch, rng.randrange(1000)) if depth else epoch
        if time not in seen:
            seen.add(time)
            yield time


def measure(
    make: Callable[[int], tuple[Step, Callable[[], int]]],
    depth: int,
    num_open: int,
    num_changes: int,
    *,
    is_random: bool,
) -> Figure:
    """Keep `num_open` times open while closing one and opening another in turn."""
    rng = random.Random(1)
    step, width = make(depth)
    times = fresh_times(depth, num_open, rng, is_random=is_random)
    opened = [next(times) for _ in range(num_open)]
    for opening in opened:
        step(opening, 1)
    coming = [next(times) for _ in range(num_changes // 2)]
    closing = opened + coming  # oldest first
    if is_random:
        for index in range(len(coming)):  # one that is open when its turn comes
            other = rng.randrange(index, index + num_open)
            closing[index], closing[other] = closing[other], closing[index]
    costs, widths = [], []
    for start in range(0, len(coming), BLOCK // 2):
        turns = list(
            zip(closing[start:], coming[start : start + BLOCK // 2], strict=False)
        )
        before = time.perf_counter()
        for old, new in turns:
            step(new, 1)
            step(old, -1)
        costs.append((time.perf_counter() - before) / (2 * len(turns)))
        widths.append(width())
    return Figure(statistics.median(costs) * 1e6, statistics.mean(widths))


def add_case(
    report: Report, name: str, costs: list[Figure], *, target: str = ""
) -> None:
    """Add one row per number of open times; ratios are to the case with one."""
    for num_open, cost in zip(OPEN_TIMES, costs, strict=True):
        ratio = cost.median_us / costs[0].median_us
        is_judged = bool(target) and num_open == OPEN_TIMES[-1]
        report.add(
            f"{name}_{num_open}",
            cost.median_us,
            "us",
            target=target if is_judged else "",
            is_met=ratio <= MAX_RATIO if is_judged else None,
            to_1_open=ratio,
            width=cost.width,
        )


def main(argv: list[str] | None = None) -> int:
    """Measure every case; print a table, or one JSON object of named figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=20_000, help="changes per case")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    report = Report("One progress change, by open times (median)")
    for make in (antichain, tracker):
        for depth, kind in ((0, "ints"), (1, "products")):
            for is_random, order in ((True, "random"), (False, "oldest_first")):
                costs = [
                    measure(make, depth, n, options.changes, is_random=is_random)
                    for n in OPEN_TIMES
                ]
                target = f"at most {MAX_RATIO} x that of 1" if depth == 0 else ""
                name = f"{make.__name__}_{kind}_{order}"
                add_case(report, name, costs, target=target)
    report.show(as_json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
