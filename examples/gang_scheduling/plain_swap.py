"""Plain JAX: two processes of one cluster, two sums, launched in opposite orders.

Run by two processes with their rank and the address of the first. Collectives know each
other by the order in which they are launched, and nothing else: the numbers of one go
into the other, and nothing tells.
"""

from __future__ import annotations

import os
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ROUNDS = 5


def main(rank: int, address: str) -> None:
    """Sum ones and tens over the two processes, again and again."""
    jax.distributed.initialize(
        address, 2, rank, coordinator_bind_address=address, initialization_timeout=60
    )
    mesh = Mesh(np.array(jax.devices()), ("x",))
    cut = NamedSharding(mesh, P("x"))  # type: ignore[no-untyped-call]  # JAX is typed in part
    whole = NamedSharding(mesh, P())  # type: ignore[no-untyped-call]  # as above
    (device,) = jax.local_devices()

    def numbers(value: float) -> jax.Array:
        part = jax.device_put(np.array([value], np.float32), device)
        return jax.make_array_from_single_device_arrays((2,), cut, [part])

    ones, tens = numbers(1.0), numbers(10.0)
    sum_ones = jax.jit(lambda x: x.sum(), out_shardings=whole).lower(ones).compile()
    sum_tens = jax.jit(lambda x: x.sum() + 0, out_shardings=whole).lower(tens).compile()
    for _ in range(ROUNDS):
        if rank == 0:
            first = sum_ones(ones)
            second = sum_tens(tens)
        else:
            second = sum_tens(tens)
            first = sum_ones(ones)
        totals = [float(each.addressable_data(0)) for each in (first, second)]
        print(f"process {rank}: the sum of ones is {totals[0]}, of tens {totals[1]}")
    sys.stdout.flush()
    os._exit(0)  # processes that end one by one would be aborted by JAX


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
