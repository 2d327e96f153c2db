"""Draws a timeline, simulated or measured: as text, as data, or as a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from timelyml.ml.pipeline.actions import Op
from timelyml.ml.pipeline.channels import Span
from timelyml.ml.pipeline.simulate import Timeline

COLOURS: Mapping[Op, str] = MappingProxyType(
    {
        Op.FORWARD: "#4c8dd6",
        Op.BACKWARD: "#57a773",
        Op.INPUT: "#8fcf9f",
        Op.WEIGHT: "#e0a458",
    }
)
"""Fill of each operation in a picture; microbatches and stages are in the label."""

_MAX_WIDTH = 400


def text_chart(timeline: Timeline, *, width: int | None = None) -> str:
    """Draw ranks as lines and time as columns; `.` is a bubble.

    Args:
        timeline: What ran when.
        width: Columns for the whole time; where a label does not fit, its
            operation's letter stands alone. By default
            wide enough for the label of the shortest computation, up to 400.

    Returns:
        One line per rank, each ending in a newline.
    """
    labels = _labels(timeline)
    start = min((span.start for span in timeline.spans), default=0)
    scale = _scale(timeline, labels, width)
    head = len(f"rank {timeline.num_ranks - 1} |")
    lines = [f"rank {rank} |".rjust(head) for rank in range(timeline.num_ranks)]
    columns: list[list[str]] = [[] for _ in lines]
    for span, label in zip(timeline.spans, labels, strict=True):
        first = round((span.start - start) * scale)
        size = round((span.end - start) * scale) - first
        line = columns[span.rank]
        line += ["."] * (first - len(line))
        line += _cell(label, span.action.op, size)
    whole = round(timeline.makespan * scale)
    return "".join(
        f"{line}{''.join(cells).ljust(whole, '.')}|\n"
        for line, cells in zip(lines, columns, strict=True)
    )


def bars(timeline: Timeline) -> list[dict[str, float | int | str]]:
    """Return one object per computation, ready for JSON or another plotting tool."""
    return [
        {
            "rank": span.rank,
            "start": span.start,
            "end": span.end,
            "stage": span.action.stage,
            "op": span.action.op.value,
            "microbatch": span.action.microbatch,
            "label": label,
        }
        for span, label in zip(timeline.spans, _labels(timeline), strict=True)
    ]


def draw(timeline: Timeline, path: Path | str, *, title: str = "") -> None:
    """Save a picture: ranks from top to bottom, time to the right.

    Needs matplotlib, which the extra `plot` brings.

    Args:
        timeline: What ran when.
        path: Where to; the ending chooses the format, as `.png` or `.svg`.
        title: Shown above, with the bubble's share.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra

    figure = Figure(figsize=(12, 0.6 * timeline.num_ranks + 1), layout="constrained")
    axes = figure.subplots()
    start = min((span.start for span in timeline.spans), default=0)
    for span, label in zip(timeline.spans, _labels(timeline), strict=True):
        axes.barh(
            span.rank,
            span.end - span.start,
            left=span.start - start,
            color=COLOURS[span.action.op],
            edgecolor="white",
            linewidth=0.5,
        )
        middle = (span.start + span.end) / 2 - start
        axes.text(middle, span.rank, label, ha="center", va="center", fontsize=6)
    axes.set_yticks(range(timeline.num_ranks), _names(timeline))
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.makespan or 1)
    axes.set_xlabel("time")
    bubble = f"bubble {timeline.bubble_fraction:.1%}"
    axes.set_title(f"{title}: {bubble}" if title else bubble)
    figure.savefig(path)


def _names(timeline: Timeline) -> list[str]:
    return [f"rank {rank}" for rank in range(timeline.num_ranks)]


def _labels(timeline: Timeline) -> list[str]:
    """Name computations; the stage only where a rank holds several."""
    stages: dict[int, set[int]] = defaultdict(set)
    for span in timeline.spans:
        stages[span.rank].add(span.action.stage)
    has_several = any(len(held) > 1 for held in stages.values())
    return [_label(span, has_several) for span in timeline.spans]


def _label(span: Span, has_several: bool) -> str:
    action = span.action
    return str(action) if has_several else f"{action.op.value}{action.microbatch}"


def _scale(timeline: Timeline, labels: list[str], width: int | None) -> float:
    if not timeline.makespan:
        return 1
    if width is not None:
        return width / timeline.makespan
    needs = [
        (len(label) + 1) / (span.end - span.start)
        for span, label in zip(timeline.spans, labels, strict=True)
        if span.end > span.start
    ]
    return min(max(needs), _MAX_WIDTH / timeline.makespan)


def _cell(label: str, op: Op, size: int) -> str:
    """Fill `size` columns: `B3`, `B3 ` or `B3-- `; if it does not fit, `B` or `BB`.

    A label cut short would name another microbatch.
    """
    if size < len(label):
        return op.value * size
    return label if size == len(label) else label.ljust(size - 1, "-") + " "
