"""Runs all three, compares them, and shows what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from examples.corpus import Corpus
from examples.pipeline import unpipelined
from examples.two_islands import overlap, training
from examples.two_islands.config import ISLANDS, Settings
from timelyml.errors import PeerError

ALLOWED = 1e-3
"""How far losses may be apart at a step, relative to the largest: float32 sums in another
order, which Adam magnifies where gradients are small."""


def run(
    settings: Settings, corpus: Corpus, *, picture: Path | None, to_stderr: bool
) -> dict[str, Any]:
    """Train on two islands, on one and in one program; return figures, and show them.

    Raises:
        Exit: 1 where a worker was lost.
    """
    console = Console(stderr=to_stderr)
    console.print(
        f"{corpus.train.num_bytes:,} bytes to train on, from {corpus.source}",
        soft_wrap=True,
        markup=False,
    )
    reference = unpipelined.train(settings.model, corpus, steps=settings.steps)
    try:
        two = training.train(settings, corpus, num_islands=ISLANDS)
        one = training.train(settings, corpus, num_islands=1)
    except PeerError as error:
        console.print(f"training failed: {error}", soft_wrap=True, markup=False)
        raise typer.Exit(1) from error
    figures = _figures(settings, two, one, reference)
    _show(figures, console)
    if picture is not None:
        saved = overlap.save_picture(two.bars, picture)
        figures["picture"] = str(saved)
        console.print(f"picture: {saved}", soft_wrap=True, markup=False)
    else:
        chart = overlap.text_chart(two.bars)
        console.print(chart, soft_wrap=True, markup=False, highlight=False)
    return figures


def largest_difference(losses: list[float], reference: list[float]) -> float:
    """Return how far losses are apart at a step, at most, relative to the largest."""
    apart = np.abs(np.subtract(losses, reference)).max()
    return float(apart / np.abs(reference).max())


def _figures(
    settings: Settings,
    two: training.Trained,
    one: training.Trained,
    reference: unpipelined.Reference,
) -> dict[str, Any]:
    off = {
        "one_island": largest_difference(two.losses, one.losses),
        "one_program": largest_difference(two.losses, reference.losses),
    }
    moves = [each for each in two.bars if each.what == "transfer"]
    num_traced = min(training.TRACED, settings.steps - 1)
    speeds = [each.tokens_per_s(settings) for each in (two, one)]
    return {
        **settings.to_dict(),
        "losses": two.losses,
        "losses_one_island": one.losses,
        "losses_one_program": reference.losses,
        "off": off,
        "allowed": ALLOWED,
        "agrees": max(off.values()) <= ALLOWED,
        "tokens_per_s": speeds[0],
        "tokens_per_s_one_island": speeds[1],
        "tokens_per_s_one_program": reference.tokens_per_s,
        "bytes_between_islands": sum(each.size_bytes for each in moves)
        // max(num_traced, 1),
        "transfers_hidden": overlap.hidden_share(two.bars),
    }


def _show(figures: dict[str, Any], console: Console) -> None:
    table = Table(title="two islands", show_header=False)
    speeds = [
        f"{figures[f'tokens_per_s{which}']:,.0f} tokens/s"
        for which in ("", "_one_island", "_one_program")
    ]
    off = figures["off"]
    for label, text in (
        (
            "devices of each island, chunks",
            f"{figures['devices']}, {figures['chunks']}",
        ),
        ("steps", f"{figures['steps']:,}"),
        ("loss, first and last", "{:.4f}, {:.4f}".format(*_ends(figures["losses"]))),
        ("off one island, at most", f"{off['one_island']:.1e}"),
        ("off one JAX program, at most", f"{off['one_program']:.1e}"),
        ("speed of two islands", speeds[0]),
        ("of one with twice the devices", speeds[1]),
        ("of one JAX program", speeds[2]),
        ("between islands, a step", f"{figures['bytes_between_islands']:,} bytes"),
        ("of that time, hidden", f"{figures['transfers_hidden']:.0%}"),
    ):
        table.add_row(label, text)
    console.print(table)
    verdict = "agree" if figures["agrees"] else "DIFFER"
    console.print(f"losses {verdict} at every step (allowed {figures['allowed']:.0e})")


def _ends(losses: list[float]) -> tuple[float, float]:
    return losses[0], losses[-1]
