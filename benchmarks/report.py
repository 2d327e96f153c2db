"""How a benchmark shows its figures: a table, or one JSON object of named figures."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import quantiles

from rich.console import Console
from rich.table import Table


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
        extra = sorted({key for row in self.rows for key in row.more})
        table = Table(title=self.title, caption=machine())
        table.add_column("figure")
        for heading in ("value", "ratio", *extra):
            table.add_column(heading, justify="right")
        table.add_column("target")
        for row in self.rows:
            ratio = self.ratio(row)
            table.add_row(
                row.name,
                f"{row.value:,.4g} {row.unit}",
                "" if ratio is None else f"{ratio:.2f}",
                *(f"{row.more[key]:,.4g}" if key in row.more else "" for key in extra),
                row.verdict(),
            )
        Console().print(table)

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
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )
