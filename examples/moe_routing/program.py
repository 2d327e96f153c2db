"""Training and its report, once every argument was checked: what needs JAX."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import typer
from rich.console import Console

from examples.corpus import Corpus
from examples.moe_routing import report, training
from examples.moe_routing.config import Settings
from examples.moe_routing.dense import bits_per_byte
from examples.moe_routing.inputs import TextFeed
from examples.moe_routing.ngram import OrderTwo
from timelyml import Cluster
from timelyml.errors import PeerError

JUDGED_TOKENS = 32768


def run(
    settings: Settings,
    corpus: Corpus,
    *,
    workers: int,
    mode: Literal["processes", "threads"],
    read: Callable[[], Corpus] | None,
    picture: Path,
    verify: bool,
    as_json: bool,
) -> None:
    """Train, show how it goes, and report.

    Args:
        settings: Sizes, steps, seed.
        corpus: What to learn.
        workers: How many.
        mode: Where they live.
        read: For Bytewax, which then reads the text itself; None: workers make batches.
        picture: Where the routing over time is shown.
        verify: Compare with one dense JAX program.
        as_json: Print the figures as one JSON object; all else goes to stderr.

    Raises:
        Exit: 1 where it failed or differs, 130 where it was interrupted.
    """
    console = Console(stderr=as_json)
    console.print(
        f"{corpus.train.num_bytes:,} bytes to train on, "
        f"{corpus.held_out.num_bytes:,} held out, from {corpus.source}",
        soft_wrap=True,
        markup=False,
    )
    figures: dict[str, Any] = {
        "workers": workers,
        "mode": mode,
        "input": "local" if read is None else "bytewax",
    }
    feed = None if read is None else TextFeed(settings, read, corpus.train.digest)
    with _ending_on_lost_peers(console), Cluster(workers=workers, mode=mode) as cluster:
        if verify:
            verified = training.verify(cluster, settings, corpus, console, feed)
            figures["verify"] = verified
            _show_verified(verified, console)
        trained = training.train(cluster, settings, corpus, console=console, feed=feed)
    if not trained.history.losses:
        console.print("interrupted before the first step")
        raise typer.Exit(130)
    figures |= _figures(settings, corpus, trained)
    report.show_tables(figures, trained.history, console)
    figures["picture"] = str(report.save_picture(trained.history, picture))
    console.print(
        f"picture of the routing: {figures['picture']}", soft_wrap=True, markup=False
    )
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
    if verify and not figures["verify"]["passed"]:
        raise typer.Exit(1)
    if trained.was_interrupted:
        raise typer.Exit(130)


@contextlib.contextmanager
def _ending_on_lost_peers(console: Console) -> Iterator[None]:
    """End the program with a line, if a worker or the Bytewax process is lost."""
    try:
        yield
    except PeerError as error:
        console.print(f"training failed: {error}", soft_wrap=True, markup=False)
        raise typer.Exit(1) from error


def _figures(
    settings: Settings, corpus: Corpus, trained: training.Trained
) -> dict[str, Any]:
    history = trained.history
    judged = corpus.judged(JUDGED_TOKENS, seed=settings.seed)
    rival = OrderTwo(corpus.train).bits_per_byte(judged["context"], judged["target"])
    shares = history.shares
    return {
        **settings.to_dict(),
        "steps": len(history.losses),
        "tokens": len(history.losses) * settings.batch,
        "loss": history.losses[-1],
        "train_bits_per_byte": history.recent_bits,
        "held_out_bits_per_byte": bits_per_byte(settings, trained.weights, judged),
        "order_2_bits_per_byte": rival,
        "train_s": trained.seconds,
        "tokens_per_s": history.tokens_per_s,
        "expert_shares": [round(float(share), 5) for share in shares],
        "smallest_share": float(shares.min()),
        **trained.traffic(),
        "digest": trained.digest,
    }


def _show_verified(verified: dict[str, Any], console: Console) -> None:
    outcome = "agrees with" if verified["passed"] else "DIFFERS from"
    console.print(
        f"the dataflow {outcome} one dense JAX program after {verified['steps']} steps: "
        f"losses within {verified['loss_difference']:.1e}, weights within "
        f"{verified['weight_difference']:.1e} (relative; allowed "
        f"{verified['tolerance']:.0e})"
    )
