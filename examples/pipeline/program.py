"""Training and its report, once every argument was checked: what needs JAX."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from examples.corpus import Corpus
from examples.pipeline import report, training, unpipelined
from examples.pipeline.config import Settings
from timelyml.errors import PeerError
from timelyml.ml.pipeline import peak_by_stage

TOLERANCE = 1e-3
"""Float32 sums in another order, which Adam magnifies where gradients are small."""
COMPARED_STEPS = 10


def run(
    settings: Settings,
    corpus: Corpus,
    *,
    picture: Path | None,
    verify: bool,
    as_json: bool,
) -> None:
    """Train, show how it goes, and report.

    Args:
        settings: Sizes, schedule, steps, seed.
        corpus: What to learn.
        picture: Where stages over time are shown.
        verify: Compare the first steps with the model in one program.
        as_json: Print the figures as one JSON object; all else goes to stderr.

    Raises:
        Exit: 1 where it failed or differs.
    """
    console = Console(stderr=as_json)
    console.print(
        f"{corpus.train.num_bytes:,} bytes to train on, "
        f"{corpus.held_out.num_bytes:,} held out, from {corpus.source}",
        soft_wrap=True,
        markup=False,
    )
    compared = min(settings.steps, COMPARED_STEPS)
    reference = unpipelined.train(settings, corpus, steps=compared)
    try:
        with report.progress(settings, console) as show:
            trained = training.train(
                settings, corpus, compared=compared if verify else 0, on_step=show
            )
    except PeerError as error:
        console.print(f"training failed: {error}", soft_wrap=True, markup=False)
        raise typer.Exit(1) from error
    figures = _figures(settings, corpus, trained, reference)
    report.show_table(figures, console)
    if picture is not None:
        saved = report.save_picture(trained, picture)
        figures["picture"] = None if saved is None else str(saved)
        console.print(f"picture: {saved}", soft_wrap=True, markup=False)
    if verify:
        figures["verify"] = _verified(trained, reference)
        _show_verified(figures["verify"], console)
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
    if verify and not figures["verify"]["passed"]:
        raise typer.Exit(1)


def _verified(
    trained: training.Trained, reference: unpipelined.Reference
) -> dict[str, Any]:
    """Compare losses and weights after the first steps."""
    steps = len(reference.losses)
    early = trained.losses[:steps]
    losses = unpipelined.largest_difference(early, reference.losses)
    weights = unpipelined.largest_difference(trained.early, reference.params)
    return {
        "steps": steps,
        "loss_difference": losses,
        "weight_difference": weights,
        "tolerance": TOLERANCE,
        "passed": max(losses, weights) <= TOLERANCE,
    }


def _figures(
    settings: Settings,
    corpus: Corpus,
    trained: training.Trained,
    reference: unpipelined.Reference,
) -> dict[str, Any]:
    timeline = report.median_timeline(trained)
    return {
        **settings.to_dict(),
        "ranks": settings.ranks,
        "stage_sizes": list(trained.sizes),
        "loss": trained.losses[-1],
        "losses": trained.losses,
        "train_bits_per_byte": report.recent_bits(trained),
        "held_out_bits_per_byte": unpipelined.bits_per_byte(
            settings, trained.params, corpus
        ),
        "train_s": trained.times[-1],
        "tokens_per_s": report.tokens_per_s(settings, trained),
        "unpipelined_tokens_per_s": reference.tokens_per_s,
        "bubble": None if timeline is None else timeline.bubble_fraction,
        "expected_bubble": report.expected_bubble(trained),
        "peak_live": [held for _, held in sorted(trained.peak_live.items())],
        "expected_peak_live": list(peak_by_stage(trained.schedule)),
    }


def _show_verified(verified: dict[str, Any], console: Console) -> None:
    outcome = "agrees with" if verified["passed"] else "DIFFERS from"
    console.print(
        f"the pipeline {outcome} one JAX program after {verified['steps']} steps: "
        f"losses within {verified['loss_difference']:.1e}, weights within "
        f"{verified['weight_difference']:.1e} (relative; allowed "
        f"{verified['tolerance']:.0e})"
    )
