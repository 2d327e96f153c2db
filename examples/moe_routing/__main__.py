"""Trains a mixture-of-experts Transformer on real text, over worker processes.

Run it with `python -m examples.moe_routing`; `--help` lists the options, README.md says
what to look for.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from examples.corpus import Corpus, load_corpus
from examples.moe_routing.config import Settings, data_shards_for, expert_shards_for
from examples.options import (
    AsJson,
    Data,
    Small,
    Steps,
    Verify,
    Width,
    check_size,
    checked_picture,
    given,
    usage_errors,
)
from timelyml.runtime.signals import HeldSignals

Mode = Literal["processes", "threads"]
Input = Literal["local", "bytewax"]

SMALL = {
    "d_model": 32,
    "d_ff": 48,
    "window": 16,
    "batch": 16,
    "steps": 40,
    "train_bytes": 1 << 19,
    "held_out_bytes": 1 << 16,
}
_DEFAULT = Settings()


def main(
    *,
    experts: Annotated[int | None, typer.Option(help="experts in each layer")] = None,
    top_k: Annotated[int | None, typer.Option(help="experts per token")] = None,
    layers: Annotated[int | None, typer.Option(help="layers of the model")] = None,
    heads: Annotated[int | None, typer.Option(help="heads of attention")] = None,
    workers: Annotated[int, typer.Option(help="worker processes")] = 2,
    data_shards: Annotated[
        int | None, typer.Option(help="shards of attention and head; as workers")
    ] = None,
    expert_shards: Annotated[
        int | None, typer.Option(help="shards of the experts of a layer")
    ] = None,
    replicate: Annotated[
        list[int] | None,
        typer.Option(help="a busy expert that stands on two shards; several times"),
    ] = None,
    steps: Steps = None,
    batch: Annotated[int | None, typer.Option(help="sequences per step")] = None,
    window: Annotated[int | None, typer.Option(help="bytes per sequence")] = None,
    d_model: Width = None,
    data: Data = None,
    input_from: Annotated[
        Input,
        typer.Option("--input", help="who makes the batches: workers, or Bytewax"),
    ] = "local",
    seed: Annotated[int | None, typer.Option(help="of weights and batches")] = None,
    mode: Annotated[Mode, typer.Option(help="how workers run")] = "processes",
    checkpoints: Annotated[
        Path | None, typer.Option(help="directory for what was learnt")
    ] = None,
    every: Annotated[
        int, typer.Option(help="steps from a checkpoint to the next")
    ] = 50,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the newest of --checkpoints")
    ] = False,
    generate: Annotated[
        str | None,
        typer.Option(help="continue this text with the newest of --checkpoints"),
    ] = None,
    length: Annotated[int, typer.Option(help="bytes to generate")] = 300,
    trace: Annotated[
        Path | None,
        typer.Option(help="new directory for events; shows where the time goes"),
    ] = None,
    picture: Annotated[Path, typer.Option(help="load of experts over time")] = Path(
        "out/moe_routing.png"
    ),
    small: Small = False,
    verify: Verify = False,
    as_json: AsJson = False,
) -> None:
    """Train a byte-level mixture-of-experts Transformer.

    Attention and head are data parallel, experts are shards on worker processes, and
    every token crosses a sparse exchange on its way forward and back, in each layer.
    """
    asked = given(
        num_experts=experts,
        top_k=top_k,
        layers=layers,
        heads=heads,
        data_shards=data_shards,
        expert_shards=expert_shards,
        replicate=tuple(replicate) if replicate else None,
        steps=steps,
        batch=batch,
        window=window,
        d_model=d_model,
        seed=seed,
    )
    with usage_errors():
        _check_input(input_from)
        _check_directories(trace, checkpoints, resume=resume, generate=generate)
        check_size("--workers", workers)
        check_size("--length", length)
        check_size("--every", every)
        settings = _settings({**SMALL, **asked} if small else asked, workers)
        picture = checked_picture(picture)
    if trace is not None:  # or the next to read a result pays for who computed it
        os.environ["JAX_CPU_ENABLE_ASYNC_DISPATCH"] = "false"
    with HeldSignals():  # an interrupt breaks JAX while it loads, or gets lost in it
        from examples.moe_routing import program  # noqa: PLC0415  after what is quick
    if checkpoints is not None and generate is not None:
        program.generate(checkpoints, generate, length=length, as_json=as_json)
        return
    with usage_errors():
        job = program.job_of(
            settings,
            functools.partial(_reader, data),
            given=asked,
            checkpoints=checkpoints,
            every=every,
            resume=resume,
            has_feed=input_from == "bytewax",
        )
    program.run(
        job,
        workers=workers,
        mode=mode,
        picture=picture,
        trace=trace,
        verify=verify,
        as_json=as_json,
    )


def _check_input(input_from: Input) -> None:
    if input_from == "bytewax" and importlib.util.find_spec("bytewax") is None:
        raise ValueError(
            "--input bytewax needs Bytewax, which is not installed; install it, with a "
            "Python below 3.13, or take --input local"
        )


def _check_directories(
    trace: Path | None, checkpoints: Path | None, *, resume: bool, generate: str | None
) -> None:
    if trace is not None and trace.exists():
        raise ValueError(
            f"--trace is there already; got {str(trace)!r}; expected a new directory; "
            "name another"
        )
    if checkpoints is None and (resume or generate is not None):
        raise ValueError(
            f"{'--resume' if resume else '--generate'} needs a trained model; got no "
            "--checkpoints; expected the directory that a run was given; name it"
        )


def _settings(chosen: dict[str, Any], workers: int) -> Settings:
    shards = data_shards_for(workers, chosen.get("batch", _DEFAULT.batch))
    experts = expert_shards_for(max(1, chosen.get("num_experts", _DEFAULT.num_experts)))
    return Settings(**{"data_shards": shards, "expert_shards": experts, **chosen})


def _reader(data: Path | None, settings: Settings) -> Callable[[], Corpus]:
    return functools.partial(
        load_corpus,
        None if data is None else data.resolve(),
        window=settings.window,
        train_bytes=settings.train_bytes,
        held_out_bytes=settings.held_out_bytes,
    )


if __name__ == "__main__":
    typer.run(main)
