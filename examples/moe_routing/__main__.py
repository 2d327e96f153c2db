"""Trains a mixture-of-experts language model on real text, over worker processes.

Run it with `python -m examples.moe_routing`; `--help` lists the options. With `--input
bytewax` a Bytewax dataflow reads and tokenises the text, to the same losses.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from examples.corpus import Corpus, load_corpus
from examples.moe_routing.config import Settings, data_shards_for
from examples.options import check_size, checked_picture
from timelyml.runtime.signals import HeldSignals

Mode = Literal["processes", "threads"]
Input = Literal["local", "bytewax"]

SMALL = {"d_model": 32, "d_ff": 48, "d_byte": 8, "batch": 256, "steps": 40}
TRAIN_BYTES = 4 << 20
HELD_OUT_BYTES = 1 << 19
_DEFAULT = Settings()


def main(
    *,
    experts: Annotated[int, typer.Option(help="experts")] = _DEFAULT.num_experts,
    top_k: Annotated[int, typer.Option(help="experts per token")] = _DEFAULT.top_k,
    workers: Annotated[int, typer.Option(help="worker processes")] = 2,
    data_shards: Annotated[
        int | None, typer.Option(help="shards of router and head; default: as workers")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="training steps")] = None,
    batch: Annotated[int | None, typer.Option(help="bytes learnt per step")] = None,
    d_model: Annotated[int | None, typer.Option(help="width of the model")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            exists=True, help="text, file or directory; default: Python's own sources"
        ),
    ] = None,
    input_from: Annotated[
        Input,
        typer.Option("--input", help="who makes the batches: workers, or Bytewax"),
    ] = "local",
    seed: Annotated[int, typer.Option(help="of weights and batches")] = 0,
    mode: Annotated[Mode, typer.Option(help="how workers run")] = "processes",
    picture: Annotated[Path, typer.Option(help="routing over time")] = Path(
        "out/moe_routing.png"
    ),
    small: Annotated[bool, typer.Option("--small", help="a toy, in seconds")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="compare with one dense JAX program")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the figures as one JSON object")
    ] = False,
) -> None:
    """Train a byte-level mixture-of-experts language model.

    Router and head are data parallel, experts are shards on worker processes, and
    every token crosses a sparse exchange on its way forward and back.
    """
    if input_from == "bytewax" and importlib.util.find_spec("bytewax") is None:
        raise typer.BadParameter(
            "--input bytewax needs Bytewax, which is not installed; install it, with a "
            "Python below 3.13, or take --input local"
        )
    chosen = {"d_model": d_model, "batch": batch, "steps": steps}
    sizes = {
        **(SMALL if small else {}),
        **{key: value for key, value in chosen.items() if value is not None},
    }
    if data_shards is None:
        data_shards = data_shards_for(workers, sizes.get("batch", Settings().batch))
    try:
        check_size("--workers", workers)
        settings = Settings(
            num_experts=experts,
            top_k=top_k,
            seed=seed,
            data_shards=data_shards,
            **sizes,
        )
        picture = checked_picture(picture)
        read = _reader(data, settings, shrink=8 if small else 1)
        corpus = read()
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    with HeldSignals():  # an interrupt breaks JAX while it loads, or gets lost in it
        from examples.moe_routing import program  # noqa: PLC0415  after what is quick
    program.run(
        settings,
        corpus,
        workers=workers,
        mode=mode,
        read=read if input_from == "bytewax" else None,
        picture=picture,
        verify=verify,
        as_json=as_json,
    )


def _reader(
    data: Path | None, settings: Settings, *, shrink: int
) -> Callable[[], Corpus]:
    return functools.partial(
        load_corpus,
        None if data is None else data.resolve(),
        window=settings.window,
        train_bytes=TRAIN_BYTES // shrink,
        held_out_bytes=HELD_OUT_BYTES // shrink,
    )


if __name__ == "__main__":
    typer.run(main)
