"""Trains a Transformer in stages on slices, on real text, over worker processes.

Run it with `python -m examples.pipeline`; `--help` lists the options.
"""

from __future__ import annotations

from typing import Annotated

import typer

from examples.corpus import load_corpus
from examples.options import (
    AsJson,
    BatchSize,
    Data,
    Layers,
    Picture,
    Seed,
    Small,
    Steps,
    Verify,
    Width,
    checked_picture,
    given,
    usage_errors,
)
from examples.pipeline.config import Settings
from timelyml.runtime.signals import HeldSignals

SMALL = {"d_model": 32, "layers": 2, "length": 16, "batch": 8, "steps": 8}
SMALL |= {"stages": 2, "microbatches": 4}
TRAIN_BYTES = 4 << 20
HELD_OUT_BYTES = 1 << 19
_DEFAULT = Settings()


def main(
    *,
    stages: Annotated[int | None, typer.Option(help="parts of the model")] = None,
    islands: Annotated[int, typer.Option(help="worker processes")] = _DEFAULT.islands,
    microbatches: Annotated[
        int | None, typer.Option(help="parts that a batch is cut into")
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(help="gpipe, 1f1b, interleaved, zb-h1, interleaved-zb or zbv"),
    ] = _DEFAULT.schedule,
    steps: Steps = None,
    d_model: Width = None,
    layers: Layers = None,
    batch: BatchSize = None,
    tied: Annotated[
        bool, typer.Option("--tied", help="embedding and head share their table")
    ] = False,
    data: Data = None,
    seed: Seed = 0,
    picture: Picture = None,
    small: Small = False,
    verify: Verify = False,
    as_json: AsJson = False,
) -> None:
    """Train a byte-level Transformer as a pipeline.

    The model is cut into stages of equal cost, each on its slice of an island; a
    schedule says which stage computes which microbatch when.
    """
    sizes = given(
        SMALL if small else None,
        stages=stages,
        microbatches=microbatches,
        steps=steps,
        d_model=d_model,
        layers=layers,
        batch=batch,
    )
    shrink = 8 if small else 1
    with usage_errors():
        settings = Settings(
            islands=islands, schedule=schedule, is_tied=tied, seed=seed, **sizes
        )
        corpus = load_corpus(
            data,
            window=settings.length + 1,
            train_bytes=TRAIN_BYTES // shrink,
            held_out_bytes=HELD_OUT_BYTES // shrink,
        )
        picture = None if picture is None else checked_picture(picture)
    with HeldSignals():  # an interrupt breaks JAX while it loads, or gets lost in it
        from examples.pipeline import program  # noqa: PLC0415  after what is quick
    program.run(settings, corpus, picture=picture, verify=verify, as_json=as_json)


if __name__ == "__main__":
    typer.run(main)
