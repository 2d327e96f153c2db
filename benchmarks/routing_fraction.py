"""What share of a training step goes into routing and progress tracking, by its trace.

Trains `examples/moe_routing` at its default size on two worker processes, which log their
turns, and divides the time of all of them after the first quarter of the run. Routing is
the turns of routers, of the sums of what experts gave back, and of the router's losses.
Progress is all that workers do between turns: progress tracking, frames, and looking for
messages. What a turn of the model does to send and receive rows counts as the model.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.report import Report
from examples.corpus import load_corpus
from examples.moe_routing import shares, training
from examples.moe_routing.config import Settings
from examples.moe_routing.flow import Job
from timelyml import Cluster

AIM = 0.2
SMALL: dict[str, Any] = {
    "num_experts": 4,
    "layers": 1,
    "d_model": 16,
    "d_ff": 24,
    "window": 8,
    "batch": 8,
}


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(
        prog="benchmarks routing_fraction", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--small", action="store_true", help="a toy model")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(argv)
    settings = Settings(steps=options.steps, **(SMALL if options.small else {}))
    spent = measure(settings, options.workers)
    report(settings, spent, is_full=not options.small).show(as_json=options.json)
    return 0


def measure(settings: Settings, num_workers: int) -> dict[str, float]:
    """Give shares of the time of all workers; together they are 1."""
    corpus = load_corpus(
        None,
        window=settings.window,
        train_bytes=settings.train_bytes,
        held_out_bytes=settings.held_out_bytes,
    )
    with (
        tempfile.TemporaryDirectory() as directory,
        Cluster(workers=num_workers, mode="processes") as cluster,
    ):
        trace = Path(directory) / "trace"
        quiet = Console(quiet=True)
        training.train(cluster, Job(settings, corpus), console=quiet, event_log=trace)
        return shares.of_time(trace)


def report(settings: Settings, spent: dict[str, float], *, is_full: bool) -> Report:
    """Show shares in per cent, of all time and of what workers did not wait."""
    table = Report(
        f"Time of a step: {settings.tokens} tokens, {settings.layers} layers of "
        f"{settings.num_experts} experts"
    )
    busy = 1 - spent.get("waiting", 0)
    together = spent.get("routing", 0) + spent.get("progress", 0)
    table.add(
        "routing_and_progress",
        100 * together,
        "%",
        target=f"below {AIM:.0%}" if is_full else "",
        is_met=together < AIM if is_full else None,
        of_busy=100 * together / busy,
    )
    for what, share in spent.items():
        name = what.replace(" ", "_")
        if what == "waiting":
            table.add(name, 100 * share, "%")
        else:
            table.add(name, 100 * share, "%", of_busy=100 * share / busy)
    return table
