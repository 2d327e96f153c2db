"""Training of Transformers beside plain JAX, and over two islands: Table 1, Figure 12.

A step of about 20, 100 and 500 ms is one compiled function, its rows cut over two virtual
devices of one worker, called for each step or in programs of several; beside it the same
function by plain JAX on two devices of a process of its own. Then replicas on two islands of one device, whose gradients cross chunk by
chunk (`examples.two_islands`), beside the same on one island of two devices. All take
turns; each ratio is the median of the rounds' own ratios. Steps are started ahead of
replies, and compiled before.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from benchmarks.peers import transformers
from benchmarks.peers.asked import asked_process
from benchmarks.report import Report
from examples.pipeline import model
from examples.pipeline.config import Settings
from examples.two_islands.replicas import AXIS, Replicas
from timelyml import ml
from timelyml.runtime.environment import worker_environment

MODELS = ["20", "100", "500"]
NUM_DEVICES = 2
MIN_PLAIN = 0.97
MIN_ISLANDS = 0.95
CHUNKS = 4
IN_PROGRAM = 8
"""Steps that one program makes."""

Run = Callable[[int], float]
"""Trains for so many steps; returns the seconds."""


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(prog="benchmarks training", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each figure")
    parser.add_argument("--models", nargs="*", default=MODELS, help="by step in ms")
    parser.add_argument("--small", action="store_true", help="a smoke run")
    options = parser.parse_args(argv)
    table = Report("Training steps")
    for name in options.models:
        if name not in transformers.BY_STEP:
            parser.error(f"--models: some of {', '.join(transformers.BY_STEP)}")
    names = ["tiny"] if options.small else options.models
    for name, rounds in beside_plain(names, options.rounds, options.seconds).items():
        add_rows(table, f"step_{name}", transformers.named(name), rounds, MIN_PLAIN)
    settings = transformers.TINY_ISLANDS if options.small else transformers.ISLANDS
    rounds = on_islands(settings, options.rounds, options.seconds)
    add_rows(table, "two_islands", settings, rounds, MIN_ISLANDS)
    table.show(as_json=options.json)
    return 0


def beside_plain(
    names: Sequence[str], num_rounds: int, seconds: float
) -> dict[str, list[dict[str, float]]]:
    """Return, for each model and round, the seconds of a step, ours and plain JAX's."""
    environment = worker_environment(os.environ, num_devices=NUM_DEVICES)
    with (
        asked_process("plain_training", environment) as plain,
        ml.local(devices_per_island=NUM_DEVICES) as client,
    ):
        found = {}
        for name in names:
            runs: dict[str, Run] = {
                "reference": partial(plain, name),
                "ours": one_function(client, transformers.named(name)),
                "programs": one_function(
                    client, transformers.named(name), in_program=IN_PROGRAM
                ),
            }
            found[name] = in_turn(runs, num_rounds, seconds)
    return found


def one_function(client: ml.Client, settings: Settings, *, in_program: int = 1) -> Run:
    """Return what trains by calls of one function on all devices.

    Args:
        client: Of one island.
        settings: Of the model.
        in_program: How many steps are called as one program; the rest of a number of
            steps that is no multiple are called one by one.
    """
    slice_ = client.slice({AXIS: NUM_DEVICES})
    whole, cut = P(), P(AXIS)  # type: ignore[no-untyped-call]  # JAX is typed in part
    optimiser = model.optimiser(settings)
    step = ml.jit(
        transformers.step_of(settings, optimiser),
        slice=slice_,
        in_shardings=(whole, whole, cut, cut),
        out_shardings=whole,
        donate_argnums=(0, 1),
    )
    params = model.init(settings)
    held = client.put((params, optimiser.init(params)), slice_.sharding(whole))
    batch = client.put(transformers.batch_of(settings), slice_.sharding(cut))

    def several(params: Any, state: Any, batches: Sequence[Any]) -> Any:
        losses = []
        for each in batches:
            params, state, loss = step(params, state, *each)
            losses.append(loss)
        return params, state, losses

    program = ml.program(several)

    def run(num_steps: int) -> float:
        nonlocal held
        began = time.perf_counter()
        num_programs = num_steps // in_program if in_program > 1 else 0
        for _ in range(num_programs):
            *held, _ = program(*held, [batch] * in_program)
        for _ in range(num_steps - num_programs * in_program):
            *held, _ = step(*held, *batch)
        wait_for(held)
        return time.perf_counter() - began

    return run


def on_islands(
    settings: Settings, num_rounds: int, seconds: float
) -> list[dict[str, float]]:
    """Return, for each round, the seconds of a step on two islands and on one."""
    with ExitStack() as stack:
        runs = {}
        for name, num_islands in (("reference", 1), ("ours", 2)):
            client = stack.enter_context(
                ml.local(
                    islands=num_islands, devices_per_island=NUM_DEVICES // num_islands
                )
            )
            runs[name] = replicas_on(client, settings, num_islands)
        return in_turn(runs, num_rounds, seconds)


def replicas_on(client: ml.Client, settings: Settings, num_islands: int) -> Run:
    """Return what trains a replica on each island."""
    slices = [
        client.slice({AXIS: NUM_DEVICES // num_islands}, island=f"island-{index}")
        for index in range(num_islands)
    ]
    layers, params = model.layers_of(settings), model.init(settings)
    inputs, target = transformers.batch_of(settings)
    costs = ml.estimated_costs(layers, params, inputs)
    cut = ml.partition(layers, min(CHUNKS, len(layers)), costs=costs)
    optimiser = model.optimiser(settings)
    weights = cut.params_of(params)
    replicas = Replicas(cut.stages, weights, model.loss_fn, optimiser, slices)
    held = [replicas.init()]
    batch, count = replicas.put(inputs, target), np.float32(target.size)

    def run(num_steps: int) -> float:
        began = time.perf_counter()
        for _ in range(num_steps):
            held[0], _ = replicas(held[0], batch, count)
        wait_for(held)
        return time.perf_counter() - began

    return run


def wait_for(tree: Any) -> None:
    """Wait until all of a tree of handles is computed."""
    for leaf in jax.tree.leaves(tree):
        leaf.block_until_ready()


def in_turn(
    runs: dict[str, Run], num_rounds: int, seconds: float
) -> list[dict[str, float]]:
    """Return, for each round, the seconds of a step of each, measured one after another."""
    for name, run in runs.items():  # compiles, and finds its pace
        run(2 * IN_PROGRAM if name == "programs" else 2)
    gc.freeze()  # or full collections look through all that was traced, for 0.2 s each
    steps = max(2, round(seconds / (runs["reference"](2) / 2)))
    if "programs" in runs:
        steps = -(-steps // IN_PROGRAM) * IN_PROGRAM
    return [
        {name: run(steps) / steps for name, run in runs.items()}
        for _ in range(num_rounds)
    ]


def add_rows(
    table: Report,
    name: str,
    settings: Settings,
    rounds: Sequence[dict[str, float]],
    aim: float,
) -> None:
    """Add the reference and ours, in tokens per second, and whether the aim is met."""
    tokens = settings.batch * settings.length
    suffixes = {"reference": "_reference", "ours": "", "programs": "_in_programs"}
    for what in rounds[0]:
        seconds = median(each[what] for each in rounds)
        ratio = median(each["reference"] / each[what] for each in rounds)
        is_ours = what != "reference"
        table.add(
            f"{name}{suffixes[what]}_tokens_per_s",
            tokens / seconds,
            "/s",
            target=f"at least {aim:g}" if is_ours else "",
            is_met=ratio >= aim if is_ours else None,
            ratio=ratio,
            step_ms=seconds * 1e3,
        )
