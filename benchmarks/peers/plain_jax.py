"""Plain JAX on virtual devices, in a process of its own: steps per second on demand.

Reads from stdin what to run, "step", "bare" or "fused", and how many steps, a line each
time, and answers with the seconds that they took; "bare" are steps launched by the
executable itself, past the checks that JAX makes of its arguments. At most 32 launches are under way: with more,
XLA hangs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from timelyml.ml.jax_private import quick_launch

MAX_UNFINISHED = 32
CHAIN = 128


def step(x: jax.Array) -> jax.Array:
    """Return, on every device, the mean over all devices and one more."""
    return jnp.broadcast_to(x.mean() + 1, x.shape)


def fused(x: jax.Array) -> jax.Array:
    """Take so many steps in one computation."""
    looped: jax.Array = jax.lax.fori_loop(0, CHAIN, lambda _, x: step(x), x)
    return looped


def prepare() -> tuple[jax.Array, dict[str, Callable[[jax.Array], jax.Array]]]:
    """Return zeros on all devices, a float32 on each, and what steps on them by name."""
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("x",))
    cut = NamedSharding(mesh, P("x"))  # type: ignore[no-untyped-call]  # JAX is typed in part
    first = jax.device_put(np.zeros(len(devices), np.float32), cut)
    return first, {
        each.__name__: jax.jit(each, out_shardings=cut).lower(first).compile()
        for each in (step, fused)
    }


def main() -> None:
    """Answer until stdin ends."""
    first, compiled = prepare()
    found = quick_launch(compiled["step"], 1)
    assert found is not None
    launch, handlers = found

    def bare(x: jax.Array) -> jax.Array:
        out: jax.Array = launch([x]).consume_with_handlers(handlers)[0]
        return out

    runs: dict[str, Callable[[jax.Array], jax.Array]] = {**compiled, "bare": bare}
    for line in sys.stdin:
        what, steps = line.split()
        run, launches = runs[what], int(steps)
        launches //= CHAIN if what == "fused" else 1
        x = first
        began = time.perf_counter()
        for number in range(launches):
            x = run(x)
            if number % MAX_UNFINISHED == MAX_UNFINISHED - 1:
                x.block_until_ready()
        x.block_until_ready()
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
