"""What a run shows: progress while it trains, tables and a picture afterwards."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.pipeline.config import Settings
from examples.pipeline.training import Trained
from timelyml.ml.pipeline import Timeline, draw, simulate, text_chart

NATS_PER_BIT = float(np.log(2))
_LINE_EVERY_S = 10.0
_RECENT = 20


def tokens_per_s(settings: Settings, trained: Trained) -> float:
    """Give the bytes learnt from per second.

    The first two steps compile, and those at the end that were timed do not overlap.
    """
    times = trained.times[1 : len(trained.times) - trained.num_recorded]
    if len(times) < 2:
        return 0.0
    tokens = (len(times) - 1) * settings.batch * settings.length
    return tokens / (times[-1] - times[0])


def recent_bits(trained: Trained) -> float:
    """Give bits per byte on the training text over the last steps."""
    return float(np.mean(trained.losses[-_RECENT:])) / NATS_PER_BIT


def median_timeline(trained: Trained) -> Timeline | None:
    """Give the recorded step whose bubble is the middle one."""
    found = sorted(trained.timelines, key=lambda each: each.bubble_fraction)
    return found[len(found) // 2] if found else None


@contextlib.contextmanager
def progress(
    settings: Settings, console: Console
) -> Iterator[Callable[[Trained], None]]:
    """Show how far training is, as long as the block runs."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("training", total=settings.steps, state="compiling")
        last_line = time.perf_counter()

        def show(trained: Trained) -> None:
            nonlocal last_line
            done = len(trained.losses)
            speed = tokens_per_s(settings, trained)
            state = f"{recent_bits(trained):.3f} bits per byte, {speed:,.0f} tokens/s"
            bars.update(bar, completed=done, state=state)
            now = time.perf_counter()
            if not console.is_terminal and now - last_line >= _LINE_EVERY_S:
                last_line = now
                console.print(f"step {done}/{settings.steps}: {state}")

        yield show


def expected_bubble(trained: Trained) -> float:
    """Give the bubble of the schedule if all parts took equally long."""
    return simulate(trained.schedule).bubble_fraction


def show_table(figures: dict[str, Any], console: Console) -> None:
    """Print what was learnt, how fast, and how well the stages were used."""
    table = Table(title=f"pipeline, {figures['schedule']}", show_header=False)
    peaks = ", ".join(map(str, figures["peak_live"]))
    for label, text in (
        ("layers of each stage", ", ".join(map(str, figures["stage_sizes"]))),
        ("slices, islands", f"{figures['ranks']}, {figures['islands']}"),
        ("steps, microbatches", f"{figures['steps']:,}, {figures['microbatches']}"),
        ("training loss", f"{figures['loss']:.4f} nats"),
        ("bits per byte, training", f"{figures['train_bits_per_byte']:.3f}"),
        ("bits per byte, held-out files", f"{figures['held_out_bits_per_byte']:.3f}"),
        ("speed", f"{figures['tokens_per_s']:,.0f} tokens/s"),
        ("the same, in one program", f"{figures['unpipelined_tokens_per_s']:,.0f}"),
        ("bubble, measured", _percent(figures["bubble"])),
        ("bubble, by the formula", _percent(figures["expected_bubble"])),
        ("microbatches held, by stage", f"{peaks or '-'}"),
    ):
        table.add_row(label, text)
    console.print(table)


def save_picture(trained: Trained, path: Path) -> Path | None:
    """Save stages over time in one recorded step; as text without matplotlib.

    Returns:
        Where it was written, with another suffix if it is text; None if no step was
        recorded.
    """
    timeline = median_timeline(trained)
    if timeline is None:
        return None
    try:
        draw(timeline, path, title=trained.schedule.name)
    except ImportError:
        path = path.with_suffix(".txt")
        path.write_text(text_chart(timeline, width=160))
    return path


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
