"""What a run shows: progress while it trains, tables and a picture afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from examples.moe_routing.config import Settings
from examples.moe_routing.flow import REPORT, layer_of

NATS_PER_BIT = float(np.log(2))
_SHADES = " .:-=+*#%@"
_RECENT = 20
_LINE_EVERY_S = 10.0


@dataclass(slots=True)
class History:
    """The records of the steps so far, in order."""

    settings: Settings
    first: int = 0
    """The step that the first record is of."""
    losses: list[float] = field(default_factory=list)
    balances: list[float] = field(default_factory=list)
    counts: list[NDArray[np.int64]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Seconds since the start at which each was seen here."""

    def add(self, record: Any, seconds: float) -> None:
        """Add the record of one step."""
        self.losses.append(float(record["loss"][0]))
        self.balances.append(float(record["balance"][0]))
        counts = np.asarray(record["counts"][0], np.int64)  # (layers, experts)
        self.counts.append(counts)
        self.times.append(seconds)

    @property
    def recent_bits(self) -> float:
        """Bits per byte on the training text, over the last steps."""
        recent = self.losses[-_RECENT:]
        return float(np.mean(recent)) / NATS_PER_BIT if recent else float("nan")

    @property
    def tokens_per_s(self) -> float:
        """Bytes learnt from per second, from the first step seen to the last."""
        if len(self.times) < 2 or self.times[-1] == self.times[0]:
            return 0.0
        steps = len(self.times) - 1
        return steps * self.settings.tokens / (self.times[-1] - self.times[0])

    @property
    def state(self) -> str:
        """How far training is, in a few words."""
        if not self.losses:
            return "compiling"
        return (
            f"{self.recent_bits:.3f} bits per byte, {self.tokens_per_s:,.0f} tokens/s"
        )

    @property
    def names(self) -> list[str]:
        """What experts are called: those on several shards by their number, too."""
        shards = layer_of(self.settings).placement.shards()
        return [
            f"{index} x{len(shards[index])}" if index in shards else str(index)
            for index in range(self.settings.num_experts)
        ]

    @property
    def shares(self) -> NDArray[np.float64]:
        """Each expert's share of its layer's (token, choice) pairs; (layers, experts)."""
        total = np.sum(self.counts, axis=0)
        return np.asarray(total / total.sum(axis=1, keepdims=True))

    def shares_over_time(self, columns: int) -> NDArray[np.float64]:
        """Shares `(layers, experts, columns)` in equal stretches of the run."""
        parts = np.array_split(np.array(self.counts), min(columns, len(self.counts)))
        sums = np.array([part.sum(axis=0) for part in parts], np.float64)
        shares: NDArray[np.float64] = sums / sums.sum(axis=2, keepdims=True)
        return np.moveaxis(shares, 0, 2)


def follow(
    run: Any,
    history: History,
    *,
    last: int,
    console: Console,
    is_unwanted: Callable[[], bool] = lambda: False,
) -> None:
    """Read the reports of a run as they come, and show how far it is.

    Returns when the run is over, in whatever way.

    Args:
        run: What to follow.
        history: Reports are added to it.
        last: The step after the last one that is expected.
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
        bar = progress.add_task("training", total=last, state="compiling")
        is_stopping = False
        while True:
            is_over = run.done()
            if is_unwanted() and not is_stopping:
                is_stopping = True
                run.request_stop()
            now = time.perf_counter()
            for _, record in run.batches(REPORT)[len(history.losses) :]:
                history.add(record, now - began)
            step = history.first + len(history.losses)
            progress.update(bar, completed=step, state=history.state)
            if not console.is_terminal and now - last_line >= _LINE_EVERY_S:
                last_line = now
                console.print(f"step {step}/{last}: {history.state}")
            if is_over:
                return
            time.sleep(0.1)


def show_tables(figures: dict[str, Any], history: History, console: Console) -> None:
    """Print what was learnt, how experts share the work, and what was moved."""
    console.print(_results(figures))
    console.print(_edges(figures["bytes_by_edge"], len(history.losses)))
    console.print(_experts(history))
    drawn = heat_map(history.shares_over_time(64), history.names)
    console.print(drawn, highlight=False, markup=False)


def _results(figures: dict[str, Any]) -> Table:
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
        ("sizes compiled per expert function", f"{figures['compiled_sizes']}"),
        ("bytes between workers", f"{figures['bytes_between_workers']:,}"),
        ("bytes within workers", f"{figures['bytes_within_workers']:,}"),
    ):
        results.add_row(label, text)
    return results


def _edges(bytes_by_edge: dict[str, int], num_steps: int) -> Table:
    edges = Table(title="bytes exchanged, per step")
    edges.add_column("edge")
    edges.add_column("bytes", justify="right")
    by_edge = sorted(bytes_by_edge.items(), key=lambda item: -item[1])
    for name, size in by_edge[:8]:
        edges.add_row(Text(name), f"{size // num_steps:,}")
    return edges


def _experts(history: History) -> Table:
    experts = Table(title="tokens per expert")
    headings = (
        "layer",
        "expert",
        "shards",
        "rows",
        "share",
        "smallest share in a tenth of the run",
    )
    for heading in headings:
        experts.add_column(heading, justify="right")
    totals, tenths = np.sum(history.counts, axis=0), history.shares_over_time(10)
    placement = layer_of(history.settings).placement
    several = placement.shards()
    for (layer, index), share in np.ndenumerate(history.shares):
        experts.add_row(
            str(layer),
            str(index),
            ", ".join(map(str, several.get(index, (index // placement.per_shard,)))),
            f"{totals[layer, index]:,}",
            f"{share:.1%}",
            f"{tenths[layer, index].min():.1%}",
        )
    return experts


def heat_map(shares: NDArray[np.float64], names: Sequence[str]) -> str:
    """Draw shares `(layers, experts, columns)` as text: darker is busier."""
    width = max(3, *map(len, names))
    top = max(float(shares.max()), 1e-9)
    levels = np.minimum(shares / top * len(_SHADES), len(_SHADES) - 1).astype(int)
    lines = [f"routing over time, darkest {top:.1%} of the tokens"]
    for layer, index in np.ndindex(*shares.shape[:2]):
        drawn = "".join(_SHADES[level] for level in levels[layer, index])
        lines.append(f"layer {layer} expert {names[index]:>{width}} |{drawn}|")
    return "\n".join(lines)


def bytes_moved(metrics: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Give the bytes sent between workers and within them, by edge of the graph."""
    channels = metrics.get("channels", {})
    between, within = (
        {name: int(channel[figure]) for name, channel in channels.items()}
        for figure in ("bytes_remote", "bytes_local")
    )
    return between, within


def compiled_sizes(metrics: dict[str, Any]) -> int:
    """Give for how many numbers of rows an expert function was compiled at most."""
    sizes = [
        figures.get("compiled_sizes_peak", 0)
        for name, figures in metrics.get("operators", {}).items()
        if "experts" in name
    ]
    return int(max(sizes, default=0))
