"""Checkpoints of this program: what they say of themselves, and going on from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from examples.corpus import Corpus
from examples.moe_routing import model
from examples.moe_routing.config import Settings
from timelyml.errors import CheckpointError
from timelyml.ml import Checkpoint, Checkpoints, load_checkpoint
from timelyml.ml.sharded import restored


def checkpoints_at(
    directory: Path,
    every: int,
    settings: Settings,
    corpus: Corpus,
    *,
    resumed: Checkpoint | None,
) -> Checkpoints:
    """Say where and how often to save, and what decides how it goes on.

    Raises:
        ValueError: Those of another run are there.
    """
    about = {"settings": settings.to_dict(), "text": corpus.train.digest}
    made = Checkpoints(directory, every, about=about)
    try:
        made.check_free(resumed)
    except CheckpointError as error:
        raise ValueError(f"--checkpoints: {error}") from error
    return made


def read(directory: Path) -> tuple[Checkpoint, Settings]:
    """Give the newest checkpoint of a directory and the settings that it is of.

    Raises:
        ValueError: There is none, it is damaged, or another program wrote it.
    """
    try:
        checkpoint = load_checkpoint(directory)
    except CheckpointError as error:
        raise ValueError(f"--checkpoints: {error}") from error
    return checkpoint, Settings.of(checkpoint.about.get("settings", {}))


def continued(settings: Settings, given: Mapping[str, Any]) -> Settings:
    """Give the settings to go on with: where busy experts stand may change.

    Raises:
        ValueError: Another option differs from what is resumed.
    """
    moved = {name: given[name] for name in given if name == "replicate"}
    known = replace(settings, **moved)
    for name, value in given.items():
        if name not in moved and getattr(known, name) != value:
            raise ValueError(
                f"--resume goes on with {name} {getattr(known, name)}; got {value}; "
                "expected what the run began with; leave the option away, or begin anew"
            )
    return known


def check_unfinished(checkpoint: Checkpoint, settings: Settings) -> None:
    """Refuse to go on where nothing is left to do.

    Raises:
        ValueError: All steps were learnt from.
    """
    if checkpoint.step >= settings.steps:
        raise ValueError(
            f"--resume has nothing to do; got step {checkpoint.step} of "
            f"{settings.steps} in {checkpoint.source!r}; expected an earlier one; pass "
            "--generate to use the model, or train anew"
        )


def check_text(checkpoint: Checkpoint, corpus: Corpus) -> None:
    """Refuse to go on with another text.

    Raises:
        ValueError: It is another one.
    """
    known = checkpoint.about.get("text")
    if corpus.train.digest != known:
        raise ValueError(
            f"the training text has changed; got digest {corpus.train.digest}; expected "
            f"{known}, as it was when {checkpoint.source!r} was written; pass the same "
            "--data"
        )


def weights_in(checkpoint: Checkpoint, settings: Settings) -> dict[str, Any]:
    """Give the weights in the form of `model.init_all`."""
    weights: dict[str, Any] = restored(model.init_all(settings), checkpoint)
    return weights
