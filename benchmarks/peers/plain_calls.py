"""Plain JAX on one device, in a process of its own: seconds of any number of calls.

Reads from stdin the name of a function and how often to call it, a line each time, each
call on what the one before returned, and answers with the seconds that they took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

MAX_UNFINISHED = 32
CHAIN = 128
SIDE = 256


def function_named(name: str) -> Callable[[jax.Array], jax.Array]:
    """Return "step", "fused", a loop of steps, or "work17", a loop of 17 matmuls."""

    def step(x: jax.Array) -> jax.Array:
        return x * 0.5 + x.mean()

    def fused(x: jax.Array) -> jax.Array:
        looped: jax.Array = jax.lax.fori_loop(0, CHAIN, lambda _, x: step(x), x)
        return looped

    def work(x: jax.Array) -> jax.Array:
        count = int(name.removeprefix("work"))
        looped: jax.Array = jax.lax.fori_loop(0, count, lambda _, x: jnp.sin(x @ x), x)
        return looped

    function = {"step": step, "fused": fused}.get(name, work)
    function.__name__ = name
    return function


def first_value() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return what the first call takes."""
    return np.eye(SIDE, dtype=np.float32)


def main() -> None:
    """Answer until stdin ends."""
    first = jax.device_put(first_value())
    compiled = {}
    for line in sys.stdin:
        name, count = line.split()
        if name not in compiled:
            compiled[name] = jax.jit(function_named(name)).lower(first).compile()
            compiled[name](first).block_until_ready()
        run, x = compiled[name], first
        began = time.perf_counter()
        for number in range(int(count)):
            x = run(x)
            if number % MAX_UNFINISHED == MAX_UNFINISHED - 1:
                x.block_until_ready()
        x.block_until_ready()
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
