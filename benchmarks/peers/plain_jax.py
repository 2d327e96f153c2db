"""Plain JAX on virtual devices, in a process of its own: steps per second on demand.

Reads a number of steps from stdin, a line each time, and answers with the seconds that
they took. At most 32 launches are under way: with more, XLA hangs.
"""

from __future__ import annotations

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

MAX_UNFINISHED = 32


def step(x: jax.Array) -> jax.Array:
    """Return, on every device, the mean over all devices and one more."""
    return jnp.broadcast_to(x.mean() + 1, x.shape)


def main() -> None:
    """Answer until stdin ends."""
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("x",))
    cut = NamedSharding(mesh, P("x"))  # type: ignore[no-untyped-call]  # JAX is typed in part
    first = jax.device_put(np.zeros(len(devices), np.float32), cut)
    run = jax.jit(step, out_shardings=cut).lower(first).compile()
    for line in sys.stdin:
        x = first
        began = time.perf_counter()
        for number in range(int(line)):
            x = run(x)
            if number % MAX_UNFINISHED == MAX_UNFINISHED - 1:
                x.block_until_ready()
        x.block_until_ready()
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
