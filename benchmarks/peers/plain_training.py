"""Training by plain JAX on the devices of a process of its own, on demand.

Reads from stdin which model, by the names of `transformers`, and how many steps, a line
each time, and answers with the seconds that they took. Rows are cut over all devices.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.peers import transformers
from benchmarks.peers.plain_jax import MAX_UNFINISHED
from examples.pipeline import model


def main() -> None:
    """Answer until stdin ends."""
    runs: dict[str, Callable[[int], float]] = {}
    for line in sys.stdin:
        name, steps = line.split()
        if name not in runs:
            runs[name] = training(name)
        print(runs[name](int(steps)), flush=True)


def training(name: str) -> Callable[[int], float]:
    """Compile; return what trains on, for so many steps."""
    settings = transformers.named(name)
    optimiser = model.optimiser(settings)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    whole, cut = (NamedSharding(mesh, P(*axes)) for axes in ((), ("data",)))  # type: ignore[no-untyped-call]  # JAX is typed in part
    params = jax.device_put(model.init(settings), whole)
    state = jax.device_put(optimiser.init(params), whole)
    batch = jax.device_put(transformers.batch_of(settings), cut)
    step = transformers.step_of(settings, optimiser)
    compiled = (
        jax.jit(step, donate_argnums=(0, 1), out_shardings=whole)
        .lower(params, state, *batch)
        .compile()
    )
    held = [params, state]

    def run(num_steps: int) -> float:
        began = time.perf_counter()
        for number in range(num_steps):
            held[0], held[1], loss = compiled(*held, *batch)
            if number % MAX_UNFINISHED == MAX_UNFINISHED - 1:
                loss.block_until_ready()
        jax.block_until_ready(held)  # type: ignore[no-untyped-call]  # JAX is typed in part
        return time.perf_counter() - began

    return run


if __name__ == "__main__":
    main()
