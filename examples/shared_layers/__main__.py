"""Two clients fine-tune a task each, on layers that they share with each other.

Run it with `python -m examples.shared_layers`; `--help` lists the options.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from examples.corpus import load_corpus
from examples.options import (
    AsJson,
    Data,
    Seed,
    Small,
    Steps,
    Verify,
    Width,
    given,
    usage_errors,
)
from examples.shared_layers.config import Settings
from timelyml.runtime.signals import HeldSignals

SMALL = {"steps": 6, "rows": 8, "layers": 1, "d_model": 16, "length": 8}
SMALL |= {"pretraining_steps": 4}
TRAIN_BYTES = 1 << 20
HELD_OUT_BYTES = 1 << 16
ALLOWED = 1e-4
"""How far losses may be off those of one program, relative to the largest."""
_DEFAULT = Settings()


def main(
    *,
    steps: Steps = None,
    pretraining_steps: Annotated[
        int | None, typer.Option(help="steps of the shared layers before")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="examples of each task")] = None,
    layers: Annotated[int | None, typer.Option(help="shared blocks")] = None,
    d_model: Width = None,
    length: Annotated[int | None, typer.Option(help="bytes of an example")] = None,
    data: Data = None,
    seed: Seed = 0,
    small: Small = False,
    verify: Verify = False,
    as_json: AsJson = False,
) -> None:
    """Fine-tune two tasks at once; the shared layers see their examples as one batch."""
    sizes = given(
        SMALL if small else None,
        steps=steps,
        pretraining_steps=pretraining_steps,
        rows=rows,
        layers=layers,
        d_model=d_model,
        length=length,
    )
    with usage_errors():
        settings = Settings(seed=seed, **sizes)
        corpus = load_corpus(
            data,
            window=settings.length + 1,
            train_bytes=TRAIN_BYTES,
            held_out_bytes=HELD_OUT_BYTES,
        )
    with HeldSignals():  # an interrupt breaks JAX while it loads, or gets lost in it
        from examples.shared_layers import training  # noqa: PLC0415  after what is quick
    trained = training.train(settings, corpus)
    figures = training.figures_of(settings, trained)
    worst = training.off_reference(settings, corpus, trained) if verify else 0.0
    if verify:
        figures["off_one_program"] = worst
    _show(figures, as_json=as_json)
    if worst > ALLOWED:
        raise typer.Exit(1)


def _show(figures: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name.replace('_', ' ')}: {value}")


if __name__ == "__main__":
    typer.run(main)
