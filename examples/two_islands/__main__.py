"""Trains a Transformer data-parallel over two islands, beside one of twice the devices.

Run it with `python -m examples.two_islands`; `--help` lists the options.
"""

from __future__ import annotations

import json
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
    steps: Steps = None,
    d_model: Width = None,
    layers: Layers = None,
    batch: BatchSize = None,
    data: Data = None,
    seed: Seed = 0,
    picture: Picture = None,
    small: Small = False,
    verify: Verify = False,
    as_json: AsJson = False,
) -> None:
    """Train a byte-level Transformer on two islands, on one, and in one JAX program.

    Gradients are added up within an island by XLA, and between islands over ZeroMQ,
    chunk by chunk, while those of the chunks below are still being computed.
    """
    sizes = given(
        SMALL if small else None,
        chunks=chunks,
        steps=steps,
        d_model=d_model,
        layers=layers,
        batch=batch,
    )
    shrink = 8 if small else 1
    with usage_errors():
        settings = Settings(devices=devices, hosts=hosts, seed=seed, **sizes)
        corpus = load_corpus(
            data,
            window=settings.length + 1,
            train_bytes=TRAIN_BYTES // shrink,
            held_out_bytes=HELD_OUT_BYTES,
        )
        picture = None if picture is None else checked_picture(picture)
    with HeldSignals():  # an interrupt breaks JAX while it loads, or gets lost in it
        from examples.two_islands import report  # noqa: PLC0415  after what is quick
    figures = report.run(settings, corpus, picture=picture, to_stderr=as_json)
    if as_json:
        print(json.dumps(figures))
    if verify and not figures["agrees"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
