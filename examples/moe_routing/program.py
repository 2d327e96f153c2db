"""Training and its report, once every argument was checked: what needs JAX."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import typer
from rich.console import Console

from examples.corpus import Corpus
from examples.moe_routing import judging, report, resuming, shares, training
from examples.moe_routing.config import Settings
from examples.moe_routing.flow import Job
from examples.moe_routing.inputs import TextFeed
from examples.moe_routing.picture import save_picture
from timelyml import Cluster
from timelyml.errors import CheckpointError, PeerError

JUDGED_BYTES = 32768
SAMPLE_BYTES = 200


def job_of(
    settings: Settings,
    reader: Callable[[Settings], Callable[[], Corpus]],
    *,
    given: Mapping[str, Any],
    checkpoints: Path | None,
    every: int,
    resume: bool,
    has_feed: bool,
) -> Job:
    """Read text and checkpoint, and say what is to be done.

    Args:
        settings: For a run from the beginning.
        reader: Gives what reads the text.
        given: Settings that the user gave; those of a checkpoint must not differ.
        checkpoints: Where to save, and to resume from.
        every: Steps from one checkpoint to the next.
        resume: Go on from the newest one.
        has_feed: Bytewax makes the batches.

    Raises:
        ValueError: The checkpoint is missing, damaged, or of another run.
    """
    checkpoint = None
    if resume and checkpoints is not None:
        checkpoint, settings = resuming.read(checkpoints)
        settings = resuming.continued(settings, given)
        resuming.check_unfinished(checkpoint, settings)
    read = reader(settings)
    corpus = read()
    if checkpoint is not None:
        resuming.check_text(checkpoint, corpus)
    return Job(
        settings,
        corpus,
        feed=TextFeed(settings, read, corpus.train.digest) if has_feed else None,
        checkpoints=(
            None
            if checkpoints is None
            else resuming.checkpoints_at(
                checkpoints, every, settings, corpus, resumed=checkpoint
            )
        ),
        resume=checkpoint,
    )


def run(
    job: Job,
    *,
    workers: int,
    mode: Literal["processes", "threads"],
    picture: Path,
    verify: bool,
    as_json: bool,
    trace: Path | None = None,
) -> None:
    """Train, show how it goes, and report.

    Args:
        job: What to learn, from where on, and what to save.
        workers: How many.
        mode: Where they live.
        picture: Where the load of experts over time is shown.
        verify: Compare with one dense JAX program.
        as_json: Print the figures as one JSON object; all else goes to stderr.
        trace: Where workers log their events, to show where the time goes.

    Raises:
        Exit: 1 where it failed or differs, 130 where it was interrupted.
    """
    console = Console(stderr=as_json)
    corpus = job.corpus
    _say(
        console,
        f"{corpus.train.num_bytes:,} bytes to train on, "
        f"{corpus.held_out.num_bytes:,} held out, from {corpus.source}",
    )
    figures: dict[str, Any] = {
        "workers": workers,
        "mode": mode,
        "input": "local" if job.feed is None else "bytewax",
        "first_step": job.todo.start,
    }
    with _ending_on_failures(console), Cluster(workers=workers, mode=mode) as cluster:
        if verify:
            verified = training.verify(cluster, job, console)
            figures["verify"] = verified
            _show_verified(verified, console)
        trained = training.train(cluster, job, console=console, event_log=trace)
    if not trained.history.losses:
        console.print("interrupted before the first step")
        raise typer.Exit(130)
    figures |= _figures(job, trained)
    if trace is not None:
        figures["shares_of_time"] = spent = shares.of_time(trace)
        told = ", ".join(f"{what} {share:.1%}" for what, share in spent.items())
        _say(console, f"time of the workers: {told}")
    report.show_tables(figures, trained.history, console)
    figures["picture"] = str(save_picture(trained.history, picture))
    _say(console, f"picture of the load of experts: {figures['picture']}")
    if trained.checkpoint is not None:
        _say(console, f"checkpoint of the last step: {trained.checkpoint}")
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
    if verify and not figures["verify"]["passed"]:
        raise typer.Exit(1)
    if trained.was_interrupted:
        raise typer.Exit(130)


def generate(checkpoints: Path, prompt: str, *, length: int, as_json: bool) -> None:
    """Continue a text with the newest model of a directory.

    Raises:
        BadParameter: There is none that can be read.
    """
    try:
        checkpoint, settings = resuming.read(checkpoints)
        weights = resuming.weights_in(checkpoint, settings)
    except (ValueError, CheckpointError) as error:
        raise typer.BadParameter(str(error)) from error
    text = judging.generate(settings, weights, prompt.encode(), num_bytes=length)
    if as_json:
        figures = {
            "step": checkpoint.step,
            "checkpoint": checkpoint.source,
            "prompt": prompt,
            "text": text.decode(errors="replace"),
        }
        sys.stdout.write(json.dumps(figures) + "\n")
    else:
        Console(stderr=True).print(f"step {checkpoint.step}", highlight=False)
        sys.stdout.write(prompt + text.decode(errors="replace") + "\n")


@contextlib.contextmanager
def _ending_on_failures(console: Console) -> Iterator[None]:
    """End with a line, if a peer is lost or a checkpoint cannot be written."""
    try:
        yield
    except (PeerError, CheckpointError) as error:
        _say(console, f"training failed: {error}")
        raise typer.Exit(1) from error


def _figures(job: Job, trained: training.Trained) -> dict[str, Any]:
    history, settings, weights = trained.history, job.settings, trained.weights
    windows = judging.judged_windows(settings, job.corpus, JUDGED_BYTES)
    prompt = windows[0, : settings.window // 2].tobytes()
    sample = judging.generate(settings, weights, prompt, num_bytes=SAMPLE_BYTES)
    by_layer = history.shares
    return {
        **settings.to_dict(),
        "steps": len(history.losses),
        "tokens": len(history.losses) * settings.tokens,
        "loss": history.losses[-1],
        "losses": history.losses,
        "train_bits_per_byte": history.recent_bits,
        "held_out_bits_per_byte": judging.bits_per_byte(settings, weights, windows),
        "order_2_bits_per_byte": judging.rival_bits_per_byte(
            settings, job.corpus, windows
        ),
        "train_s": trained.seconds,
        "tokens_per_s": history.tokens_per_s,
        "expert_shares": np.round(by_layer, 5).tolist(),
        "smallest_share": float(by_layer.min()),
        "largest_share": float(by_layer.max()),
        **trained.traffic(),
        "checkpoint": trained.checkpoint,
        "sample": [each.decode(errors="replace") for each in (prompt, sample)],
        "digest": trained.digest,
    }


def _say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, markup=False)


def _show_verified(verified: dict[str, Any], console: Console) -> None:
    outcome = "agrees with" if verified["passed"] else "DIFFERS from"
    console.print(
        f"the dataflow {outcome} one dense JAX program after {verified['steps']} steps: "
        f"losses within {verified['loss_difference']:.1e}, weights within "
        f"{verified['weight_difference']:.1e} (relative; allowed "
        f"{verified['tolerance']:.0e})"
    )
