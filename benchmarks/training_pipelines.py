"""Pipelined training beside the model in one piece, and bubbles: Table 2 and Figure 10.

A Transformer in 4 and 8 stages by 1F1B, four microbatches for each stage, on devices of
one island and of four, each step a program; beside it, in processes of plain JAX on the
same cores, the whole model on one device that uses all of them, as JAX does by itself, and
with its rows cut over as many devices as there are stages (SPMD). All take turns, of some
steps in a row; ratios are medians of the rounds' own. Then the
bubble of every schedule on up to 16 paced devices, where a forward pass and both parts of
a backward pass take so long each and nothing is computed, beside that of its formula. The
formula has values go from device to device in no time; here they take some milliseconds,
with each device's process on a share of the cores, so passes have to be long to that.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.peers import transformers
from benchmarks.peers.asked import asked_process
from benchmarks.report import Report
from benchmarks.training import Run, wait_for
from examples.pipeline import model
from timelyml import ml
from timelyml.ml.pipeline import simulate
from timelyml.runtime.environment import worker_environment

PER_STAGE = 4
"""Microbatches for each stage."""
MAX_ISLANDS = 4
MIN_SPEED, MIN_ISLANDS, MAX_OFF = 0.92, 0.97, 0.05

PACE_MS = 400.0
OPTIMISER = optax.sgd(0.1)
STARTUP_S = 300.0
PACED_PER_RANK = 1
"""Microbatches for each of the paced ranks."""
ONE_EACH, TWO_EACH = (
    ("gpipe", "1f1b", "zb-h1"),
    ("interleaved", "interleaved-zb", "zbv"),
)


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(
        prog="benchmarks training_pipelines", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of each figure, in a row")
    parser.add_argument("--stages", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--paced", type=int, nargs="*", default=[4, 16])
    parser.add_argument("--pace-ms", type=float, default=PACE_MS, help="of a pass")
    every = (*ONE_EACH, *TWO_EACH)
    parser.add_argument("--schedules", nargs="*", choices=every, default=every)
    options = parser.parse_args(argv)
    for stages in options.stages:
        if stages not in transformers.PIPELINED:
            parser.error(f"--stages: one of {sorted(transformers.PIPELINED)}")
    table = Report("Pipelined training")
    for stages in options.stages:
        add_speeds(table, stages, speeds(stages, options.rounds, options.steps))
    for ranks in options.paced:
        add_bubbles(table, ranks, options.pace_ms / 1e3, options.schedules)
    table.show(as_json=options.json)
    return 0


def speeds(num_stages: int, num_rounds: int, steps: int) -> list[dict[str, float]]:
    """Return, for each round, the seconds of a step by how it is trained."""
    spmd = worker_environment(os.environ, num_devices=num_stages)
    all_cores = {**worker_environment(os.environ), "XLA_FLAGS": ""}
    del all_cores["NPROC"]  # more threads than cores would slow it down
    name = f"pipe{num_stages}"
    with ExitStack() as stack:
        runs: dict[str, Run] = {}
        for what, environment in (("unpipelined", all_cores), ("spmd", spmd)):
            ask = stack.enter_context(asked_process("plain_training", environment))
            runs[what] = partial(ask, name)
        for islands in (1, min(MAX_ISLANDS, num_stages)):
            client = stack.enter_context(
                ml.local(islands=islands, devices_per_island=num_stages // islands)
            )
            what = "one_island" if islands == 1 else "islands"
            runs[what] = pipeline_on(client, num_stages, islands)
        for run in runs.values():
            run(2)
        gc.freeze()  # as in `benchmarks.training`
        return [
            {what: run(steps) / steps for what, run in runs.items()}
            for _ in range(num_rounds)
        ]


def pipeline_on(client: ml.Client, num_stages: int, islands: int) -> Run:
    """Return what trains in stages; neighbours share an island."""
    settings = transformers.PIPELINED[num_stages]
    layers, params = model.layers_of(settings), model.init(settings)
    inputs, target = transformers.batch_of(settings)
    costs = ml.estimated_costs(layers, params, inputs[: transformers.ROWS])
    cut = ml.partition(layers, num_stages, costs=costs)
    slices = [
        client.slice({"data": 1}, island=f"island-{rank * islands // num_stages}")
        for rank in range(num_stages)
    ]
    count = PER_STAGE * num_stages
    pipe = ml.pipeline(cut.stages, slices=slices, num_microbatches=count)
    step = pipe.train_step(model.loss_fn, model.optimiser(settings))
    held = [step.init(cut.params_of(params))]
    first, last = slices[0].sharding(), slices[-1].sharding()
    microbatches = [
        (client.put(x, first), client.put(y, last))
        for x, y in zip(np.split(inputs, count), np.split(target, count), strict=True)
    ]
    program = ml.program(step.on_microbatches)

    def run(num_steps: int) -> float:
        began = time.perf_counter()
        for _ in range(num_steps):
            held[0], _ = program(held[0], microbatches)
        wait_for(held[0].params)
        return time.perf_counter() - began

    return run


def add_speeds(
    table: Report, num_stages: int, rounds: Sequence[dict[str, float]]
) -> None:
    """Add the speed of each, and what the pipeline's is beside the others."""
    settings = transformers.PIPELINED[num_stages]
    tokens = settings.batch * settings.length
    for what in rounds[0]:
        ratios = {
            f"to_{other}": median(each[other] / each[what] for each in rounds)
            for other in ("unpipelined", "spmd", "one_island")
        }
        aims = {
            "one_island": ("to_unpipelined", MIN_SPEED, "of the unpipelined"),
            "islands": ("to_one_island", MIN_ISLANDS, "of one island"),
        }
        key, least, whose = aims.get(what, ("", 0.0, ""))
        table.add(
            f"{what}_{num_stages}_stages_tokens_per_s",
            tokens / median(each[what] for each in rounds),
            "/s",
            target=f"at least {least:g} {whose}" if key else "",
            is_met=ratios[key] >= least if key else None,
            **ratios,
        )


def layer(params: Any, x: Any) -> Any:
    """Stand for a stage; on paced devices only its name counts."""
    return jnp.tanh(x @ params["w"])


def loss_fn(y: Any, target: Any) -> tuple[Any, Any]:
    """Return a total and a count, as `ml.pipeline` wants them."""
    return jnp.sum((y - target) ** 2), jnp.float32(y.shape[0])


def add_bubbles(
    table: Report, num_ranks: int, pace_s: float, schedules: Sequence[str]
) -> None:
    """Add the bubble of schedules on so many paced devices."""
    paced_s = {
        "layer_forward": pace_s,
        "layer_backward": 2 * pace_s,
        "layer_input": pace_s,
        "layer_weight": pace_s,
        **dict.fromkeys(("begin", "loss", "update"), 1e-4),
    }
    with ml.local(
        islands=num_ranks, paced_s=paced_s, startup_timeout_s=STARTUP_S
    ) as client:
        slices = [
            client.slice({"data": 1}, island=f"island-{rank}")
            for rank in range(num_ranks)
        ]
        for group, per_rank in ((ONE_EACH, 1), (TWO_EACH, 2)):
            names = [name for name in group if name in schedules]
            if not names:
                continue
            pipe = ml.pipeline(
                [layer] * (num_ranks * per_rank), slices=slices, schedule=names[0],
                num_microbatches=1,
            )  # fmt: skip
            for name in names:  # all that is traced and loaded when it is first used
                bubble(pipe.with_schedule(name, 1))
            gc.collect()
            gc.freeze()  # or full collections of what was traced hold devices up
            for name in names:
                count = PACED_PER_RANK * num_ranks
                measured, expected = bubble(pipe.with_schedule(name, count))
                off = abs(measured / expected - 1)
                table.add(
                    f"bubble_{name}_{num_ranks}_ranks",
                    measured * 100,
                    "% (paced)",
                    target=f"within {MAX_OFF:.0%} of the formula",
                    is_met=off <= MAX_OFF,
                    formula=expected * 100,
                    off=off,
                )


def bubble(pipe: ml.Pipeline) -> tuple[float, float]:
    """Return the bubble of a step, and that of the formula of its schedule."""
    params = [{"w": np.zeros((4, 4), np.float32)}] * pipe.schedule.num_stages
    step = pipe.train_step(loss_fn, OPTIMISER)
    state = step.init(params)
    wait_for(state)
    record = ml.PipelineRecord()
    rows = np.zeros((pipe.schedule.num_microbatches, 4), np.float32)
    step(state, rows, rows, record=record)
    return record.timeline().bubble_fraction, simulate(pipe.schedule).bubble_fraction
