"""How a benchmark shows its figures: a table, or one JSON object of named figures."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Literal

from rich.console import Console
from rich.table import Table

from timelyml.progress import tracker


@dataclass(slots=True)
class Report:
    """Figures in the order they were measured, each with what it is compared to.

    Attributes:
        title: Heads the table.
        reference: Name of the figure that ratios refer to.
    """

    title: str
    reference: str | None = None
    rows: list[Row] = field(default_factory=list)

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        target: str = "",
        is_met: bool | None = None,
        **more: float,
    ) -> None:
        """Add a figure.

        Args:
            name: Key of the figure in the JSON object, e.g. `epoch_p50_us`.
            value: The figure itself.
            unit: Shown behind it.
            target: What was aimed for, in words.
            is_met: Whether it was reached; `None` where nothing was aimed for.
            **more: Further figures of the same row, by name.
        """
        self.rows.append(Row(name, value, unit, target, is_met, more))

    def value(self, name: str) -> float:
        """The figure of that name."""
        return next(row.value for row in self.rows if row.name == name)

    def ratio(self, row: Row) -> float | None:
        """A row's figure as a multiple of the reference's, if it has the same unit."""
        base = next((r for r in self.rows if r.name == self.reference), None)
        if base is None or base.unit != row.unit or not base.value:
            return None
        return row.value / base.value

    def show(self, *, as_json: bool) -> None:
        """Print to stdout."""
        if as_json:
            print(json.dumps(self.figures()))
            return
        table = Table(title=self.title, caption=machine())
        for heading, cells in self._columns():
            justify: Literal["left", "right"] = "right"
            if heading in ("figure", "target"):
                justify = "left"
            if any(cells):
                table.add_column(heading, justify=justify)
        columns = [cells for _, cells in self._columns() if any(cells)]
        for line in zip(*columns, strict=True):
            table.add_row(*line)
        console = Console()
        if not console.is_terminal:  # in a file nothing needs to be cut to 80 columns
            console = Console(width=160)
        console.print(table)

    def _columns(self) -> list[tuple[str, list[str]]]:
        """Headings, and what stands below them."""
        keys = dict.fromkeys(key for row in self.rows for key in row.more)
        ratios = [self.ratio(row) for row in self.rows]
        return [
            ("figure", [row.name for row in self.rows]),
            ("value", [f"{row.value:,.4g} {row.unit}" for row in self.rows]),
            ("ratio", ["" if r is None else f"{r:.2f}" for r in ratios]),
            *((key, [_cell(row.more.get(key)) for row in self.rows]) for key in keys),
            ("target", [row.verdict() for row in self.rows]),
        ]

    def figures(self) -> dict[str, float | bool | str]:
        """All figures by name, flat, for machines to read."""
        flat: dict[str, float | bool | str] = {"machine": machine()}
        for row in self.rows:
            flat[row.name] = row.value
            flat.update({f"{row.name}.{key}": value for key, value in row.more.items()})
            ratio = self.ratio(row)
            if ratio is not None:
                flat[f"{row.name}.ratio"] = ratio
            if row.is_met is not None:
                flat[f"{row.name}.is_met"] = row.is_met
        return flat


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of a report."""

    name: str
    value: float
    unit: str
    target: str
    is_met: bool | None
    more: dict[str, float]

    def verdict(self) -> str:
        """The target, and whether it is met."""
        if self.is_met is None:
            return self.target
        return f"{self.target}: {'met' if self.is_met else 'missed'}"


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"


def percentile(samples: Sequence[float], percent: int) -> float:
    """The given percentile, interpolated.

    >>> percentile([1.0, 2.0, 3.0], 50)
    2.0
    """
    if len(samples) == 1:
        return samples[0]
    return quantiles(samples, n=100, method="inclusive")[percent - 1]


def machine() -> str:
    """The machine in a few words: figures mean little without it."""
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores, load {load:.1f}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
        f"timelyml {'as sources' if tracker.__file__.endswith('.py') else 'compiled'}"
    )
