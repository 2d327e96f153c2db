"""Trains a Transformer data-parallel over two islands, beside one of twice the devices.

Run it with `python -m examples.two_islands`; `--help` lists the options.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from examples.corpus import load_corpus
from examples.options import checked_picture
from examples.two_islands.config import Settings
from timelyml.runtime.signals import HeldSignals

SMALL = {"d_model": 32, "layers": 1, "length": 16, "batch": 8, "steps": 8}
SMALL |= {"chunks": 2}
TRAIN_BYTES = 4 << 20
HELD_OUT_BYTES = 1 << 16
_DEFAULT = Settings()


def main(
    *,
    devices: Annotated[
        int, typer.Option(help="of each of the two islands")
    ] = _DEFAULT.devices,
    hosts: Annotated[int, typer.Option(help="processes of an island")] = _DEFAULT.hosts,
    chunks: Annotated[
        int | None, typer.Option(help="parts whose gradients cross by themselves")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="training steps")] = None,
    d_model: Annotated[int | None, typer.Option(help="width of the model")] = None,
    layers: Annotated[
        int | None, typer.Option(help="blocks between embedding and head")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="sequences of a step")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            exists=True, help="text, file or directory; default: Python's own sources"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="of weights and batches")] = 0,
    picture: Annotated[
        Path | None, typer.Option(help="where to draw islands over time")
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="a toy, in seconds")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="end with 1 where losses differ")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the figures as one JSON object")
    ] = False,
) -> None:
    """Train a byte-level Transformer on two islands, on one, and in one JAX program.

    Gradients are added up within an island by XLA, and between islands over ZeroMQ,
    chunk by chunk, while those of the chunks below are still being computed.
    """
    chosen = {
        "chunks": chunks,
        "steps": steps,
        "d_model": d_model,
        "layers": layers,
        "batch": batch,
    }
    sizes = {
        **(SMALL if small else {}),
        **{key: value for key, value in chosen.items() if value is not None},
    }
    shrink = 8 if small else 1
    try:
        settings = Settings(devices=devices, hosts=hosts, seed=seed, **sizes)
        corpus = load_corpus(
            None if data is None else data.resolve(),
            window=settings.length + 1,
            train_bytes=TRAIN_BYTES // shrink,
            held_out_bytes=HELD_OUT_BYTES,
        )
        picture = None if picture is None else checked_picture(picture)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    with HeldSignals():  # an interrupt breaks JAX while it loads, or gets lost in it
        from examples.two_islands import report  # noqa: PLC0415  after what is quick
    figures = report.run(settings, corpus, picture=picture, to_stderr=as_json)
    if as_json:
        print(json.dumps(figures))
    if verify and not figures["agrees"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
