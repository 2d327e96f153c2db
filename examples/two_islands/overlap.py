"""Computation and transfer over time, per island: Figure 12 of the Pathways paper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from timelyml import ml

Interval = tuple[float, float]

COLOURS = {
    "forward": "#4c8dd6",
    "backward": "#57a773",
    "update": "#e0a458",
    "transfer": "#c94f4f",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that an island did from `start` to `end`, in seconds.

    Attributes:
        what: A key of `COLOURS`; a transfer belongs to the island that it goes to.
        size_bytes: Of a transfer.
    """

    island: str
    what: str
    start: float
    end: float
    size_bytes: int = 0


def bars_of(trace: ml.DeviceTrace) -> list[Bar]:
    """Return what islands computed, and what came to each from another."""
    bars = [
        Bar(each.island, kind_of(each.name), each.began_s, each.ended_s)
        for each in trace.launches
    ]
    bars += [
        Bar(each.island, "transfer", each.began_s, each.ended_s, each.size_bytes)
        for each in trace.transfers
        if each.source_island != each.island
    ]
    return sorted(bars, key=lambda each: each.start)


def kind_of(name: str) -> str:
    """Return what a launch does, by the names of its computations.

    >>> [kind_of(name) for name in ("chunk0_forward", "chunk3_turn", "update")]
    ['forward', 'backward', 'update']
    """
    if "update" in name:
        return "update"
    return "backward" if "_backward" in name or "_turn" in name else "forward"


def hidden_share(bars: Sequence[Bar]) -> float:
    """Return the share of transfer time in which the receiving island computes too."""
    whole = hidden = 0.0
    for island in {each.island for each in bars}:
        own = [each for each in bars if each.island == island]
        moves = union((x.start, x.end) for x in own if x.what == "transfer")
        busy = union((x.start, x.end) for x in own if x.what != "transfer")
        whole += sum(end - start for start, end in moves)
        hidden += sum(
            max(0.0, min(end, until) - max(start, since))
            for start, end in moves
            for since, until in busy
        )
    return hidden / whole if whole else 0.0


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Join what overlaps.

    >>> union([(3, 4), (0, 2), (1, 2.5)])
    [(0, 2.5), (3, 4)]
    """
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def text_chart(bars: Sequence[Bar], width: int = 100) -> str:
    """Draw two lines for each island; F, B, U are computations and T a transfer to it."""
    first = min(each.start for each in bars)
    scale = width / (max(each.end for each in bars) - first)
    lines = []
    for island in sorted({each.island for each in bars}):
        for is_transfer in (False, True):
            cells = ["."] * width
            for each in bars:
                if (each.island, each.what == "transfer") == (island, is_transfer):
                    start = min(width - 1, int((each.start - first) * scale))
                    end = max(start + 1, round((each.end - first) * scale))
                    cells[start:end] = each.what[0].upper() * (min(end, width) - start)
            head = "receives" if is_transfer else "computes"
            lines.append(f"{island} {head} |{''.join(cells)}|")
    return "\n".join(lines) + "\n"


def save_picture(bars: Sequence[Bar], path: Path) -> Path:
    """Draw two rows for each island; as text without matplotlib.

    Returns:
        Where it was written, with another suffix if it is text.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  an optional extra
    except ImportError:
        path = path.with_suffix(".txt")
        path.write_text(text_chart(bars, width=160))
        return path
    islands = sorted({each.island for each in bars})
    figure = Figure(figsize=(12, 0.8 * len(islands) + 1.5), layout="constrained")
    axes = figure.subplots()
    first = min(each.start for each in bars)
    for what, colour in COLOURS.items():
        chosen = [each for each in bars if each.what == what]
        rows = [2 * islands.index(x.island) + (what == "transfer") for x in chosen]
        axes.barh(
            rows,
            [(x.end - x.start) * 1e3 for x in chosen],
            left=[(x.start - first) * 1e3 for x in chosen],
            color=colour,
            edgecolor="white",
            linewidth=0.3,
            label=what,
        )
    labels = [f"{x} {y}" for x in islands for y in ("computes", "receives")]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    figure.legend(loc="outside upper right", ncols=len(COLOURS))
    figure.savefig(path)
    return path
