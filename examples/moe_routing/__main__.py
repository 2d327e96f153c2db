"""Trains a mixture-of-experts language model on real text, over worker processes.

Run it with `python -m examples.moe_routing`; `--help` lists the options. With `--input
bytewax` a Bytewax dataflow reads and tokenises the text, to the same losses.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from examples.moe_routing import report, training
from examples.moe_routing.config import Settings, data_shards_for
from examples.moe_routing.data import Corpus, load_corpus
from examples.moe_routing.dense import bits_per_byte
from examples.moe_routing.inputs import TextFeed
from examples.moe_routing.ngram import OrderTwo
from timelyml import Cluster
from timelyml.errors import PeerError

Mode = Literal["processes", "threads"]
Input = Literal["local", "bytewax"]

SMALL = {"d_model": 32, "d_ff": 48, "d_byte": 8, "batch": 256, "steps": 40}
TRAIN_BYTES = 4 << 20
HELD_OUT_BYTES = 1 << 19
JUDGED_TOKENS = 32768
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
    console = Console(stderr=as_json)
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
        settings = Settings(
            num_experts=experts,
            top_k=top_k,
            seed=seed,
            data_shards=data_shards,
            **sizes,
        )
        read = _reader(data, settings, shrink=8 if small else 1)
        corpus = read()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    console.print(
        f"{corpus.train.num_bytes:,} bytes to train on, "
        f"{corpus.held_out.num_bytes:,} held out, from {corpus.source}"
    )
    figures: dict[str, Any] = {"workers": workers, "mode": mode, "input": input_from}
    feed = None
    if input_from == "bytewax":
        feed = TextFeed(settings, read, corpus.train.digest)
    with _ending_on_lost_peers(console), Cluster(workers=workers, mode=mode) as cluster:
        if verify:
            verified = training.verify(cluster, settings, corpus, console, feed)
            figures["verify"] = verified
            _show_verified(verified, console)
        trained = training.train(cluster, settings, corpus, console=console, feed=feed)
    figures |= _figures(settings, corpus, trained)
    report.show_tables(figures, trained.history, console)
    figures["picture"] = str(report.save_picture(trained.history, picture))
    console.print(f"picture of the routing: {figures['picture']}")
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


if __name__ == "__main__":
    typer.run(main)
