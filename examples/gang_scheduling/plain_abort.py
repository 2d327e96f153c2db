"""Plain JAX: a collective on eight virtual devices of a process, launched 100 times.

XLA's CPU client has one thread for each core. The devices of a collective wait for each
other, each in a thread; with many launches under way all threads wait for some that have
none, and after a while XLA aborts the process.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LAUNCHES = 100
LENGTH = 1024


def main() -> None:
    """Subtract a sum over all devices, 100 times side by side."""
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("x",))
    cut = NamedSharding(mesh, P("x"))  # type: ignore[no-untyped-call]  # JAX is typed in part
    numbers = jax.device_put(np.ones(LENGTH * len(devices), np.float32), cut)
    subtract = jax.jit(lambda x: x - x.sum())
    results = [subtract(numbers) for _ in range(LAUNCHES)]
    print(sum(float(each[0]) for each in results))


if __name__ == "__main__":
    main()
