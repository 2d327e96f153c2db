"""What a run shows: progress while it trains, tables and a picture afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from examples.moe_routing.config import Settings
from examples.moe_routing.flow import REPORT

_NATS_PER_BIT = float(np.log(2))
_SHADES = " .:-=+*#%@"
_RECENT = 20
_LINE_EVERY_S = 10.0


@dataclass(slots=True)
class History:
    """The records of the steps so far, in order."""

    settings: Settings
    losses: list[float] = field(default_factory=list)
    balances: list[float] = field(default_factory=list)
    counts: list[NDArray[np.int64]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Seconds since the start at which each was seen here."""

    def add(self, record: Any, seconds: float) -> None:
        """Add the record of one step."""
        self.losses.append(float(record["loss"][0]))
        self.balances.append(float(record["balance"][0]))
        self.counts.append(np.asarray(record["counts"][0], np.int64))
        self.times.append(seconds)

    @property
    def recent_bits(self) -> float:
        """Bits per byte on the training text, over the last steps."""
        recent = self.losses[-_RECENT:]
        return float(np.mean(recent)) / _NATS_PER_BIT if recent else float("nan")

    @property
    def tokens_per_s(self) -> float:
        """Bytes learnt from per second, from the first step seen to the last."""
        if len(self.times) < 2 or self.times[-1] == self.times[0]:
            return 0.0
        steps = len(self.times) - 1
        return steps * self.settings.batch / (self.times[-1] - self.times[0])

    @property
    def state(self) -> str:
        """How far training is, in a few words."""
        if not self.losses:
            return "compiling"
        return (
            f"{self.recent_bits:.3f} bits per byte, {self.tokens_per_s:,.0f} tokens/s"
        )

    @property
    def shares(self) -> NDArray[np.float64]:
        """Each expert's share of all (token, choice) pairs."""
        total = np.sum(self.counts, axis=0)
        return np.asarray(total / total.sum())

    def shares_over_time(self, columns: int) -> NDArray[np.float64]:
        """Shares `(experts, columns)` in equal stretches of the run."""
        parts = np.array_split(np.array(self.counts), min(columns, len(self.counts)))
        sums = np.array([part.sum(axis=0) for part in parts], np.float64)
        shares: NDArray[np.float64] = sums / sums.sum(axis=1, keepdims=True)
        return shares.T


def follow(
    run: Any,
    history: History,
    *,
    steps: int,
    console: Console,
    is_unwanted: Callable[[], bool] = lambda: False,
) -> None:
    """Read the reports of a run as they come, and show how far it is.

    Returns when the run is over, in whatever way.

    Args:
        run: What to follow.
        history: Reports are added to it.
        steps: How many are expected.
        console: Where to show them.
        is_unwanted: Whether to stop the run; it then ends with a whole step.
    """
    began = time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    last_line = began
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("training", total=steps, state="compiling")
        is_stopping = False
        while True:
            is_over = run.done()
            if is_unwanted() and not is_stopping:
                is_stopping = True
                run.request_stop()
            now = time.perf_counter()
            for _, record in run.batches(REPORT)[len(history.losses) :]:
                history.add(record, now - began)
            progress.update(bar, completed=len(history.losses), state=history.state)
            if not console.is_terminal and now - last_line >= _LINE_EVERY_S:
                last_line = now
                console.print(f"step {len(history.losses)}/{steps}: {history.state}")
            if is_over:
                return
            time.sleep(0.1)


def show_tables(figures: dict[str, Any], history: History, console: Console) -> None:
    """Print what was learnt, how experts share the work, and what was moved."""
    results = Table(title="mixture of experts", show_header=False)
    held_out, rival = (
        figures["held_out_bits_per_byte"],
        figures["order_2_bits_per_byte"],
    )
    for label, text in (
        ("steps, tokens", f"{figures['steps']:,}, {figures['tokens']:,}"),
        ("training loss", f"{figures['loss']:.4f} nats"),
        ("bits per byte, training", f"{figures['train_bits_per_byte']:.3f}"),
        ("bits per byte, held-out files", f"{held_out:.3f}"),
        ("the same, order-2 model", f"{rival:.3f}"),
        ("training", f"{figures['train_s']:.1f} s"),
        ("speed", f"{figures['tokens_per_s']:,.0f} tokens/s"),
        ("bytes between workers", f"{figures['bytes_between_workers']:,}"),
        ("bytes within workers", f"{figures['bytes_within_workers']:,}"),
    ):
        results.add_row(label, text)
    console.print(results)
    edges = Table(title="bytes exchanged, per step")
    edges.add_column("edge")
    edges.add_column("bytes", justify="right")
    by_edge = sorted(figures["bytes_by_edge"].items(), key=lambda item: -item[1])
    for name, size in by_edge[:8]:
        edges.add_row(Text(name), f"{size // max(1, figures['steps']):,}")
    console.print(edges)
    experts = Table(title="tokens per expert")
    for heading in ("expert", "rows", "share", "smallest share in a tenth of the run"):
        experts.add_column(heading, justify="right")
    totals, tenths = np.sum(history.counts, axis=0), history.shares_over_time(10)
    for index, share in enumerate(history.shares):
        experts.add_row(
            str(index),
            f"{totals[index]:,}",
            f"{share:.1%}",
            f"{tenths[index].min():.1%}",
        )
    console.print(experts)
    console.print(heat_map(history.shares_over_time(64)), highlight=False, markup=False)


def heat_map(shares: NDArray[np.float64]) -> str:
    """Draw shares `(experts, columns)` as text: darker is busier."""
    top = max(float(shares.max()), 1e-9)
    levels = np.minimum(shares / top * len(_SHADES), len(_SHADES) - 1).astype(int)
    lines = [f"routing over time, darkest {top:.1%} of the tokens"]
    for index, row in enumerate(levels):
        lines.append(f"expert {index:>3} |{''.join(_SHADES[level] for level in row)}|")
    return "\n".join(lines)


def save_picture(history: History, path: Path) -> Path:
    """Save how tokens were shared among experts; as text without matplotlib.

    Returns:
        Where it was written; another suffix if it is text.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    shares = history.shares_over_time(200)
    try:
        import matplotlib as mpl  # noqa: PLC0415  optional, and slow to load
    except ImportError:
        path = path.with_suffix(".txt")
        path.write_text(heat_map(shares[:, :100]) + "\n")
        return path
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  after the backend is chosen

    steps = np.linspace(0, len(history.losses), shares.shape[1])
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(9, 6), sharex=True, height_ratios=(1, 2)
    )
    bits = np.array(history.losses) / _NATS_PER_BIT
    upper.plot(bits, linewidth=0.8)
    upper.set_ylabel("bits per byte")
    labels = [f"expert {index}" for index in range(len(shares))]
    lower.stackplot(steps, shares, labels=labels if len(labels) <= 16 else ())
    lower.set_ylabel("share of tokens")
    lower.set_xlabel("step")
    lower.set_ylim(0, 1)
    if len(labels) <= 16:
        lower.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def bytes_moved(metrics: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Give the bytes sent between workers and within them, by edge of the graph."""
    channels = metrics.get("channels", {})
    between, within = (
        {name: int(channel[figure]) for name, channel in channels.items()}
        for figure in ("bytes_remote", "bytes_local")
    )
    return between, within
