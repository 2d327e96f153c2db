"""The same computations on islands, whose launches have one order and a limit."""

from __future__ import annotations

import threading

import numpy as np
from jax.sharding import PartitionSpec as P

from timelyml import ml


def tenant(
    client: ml.Client, rounds: int, *, tens_first: bool, wrong: list[str], size: int = 2
) -> None:
    """Sum ones and tens in one order or the other; note every wrong number."""
    slice_ = client.slice({"x": size})
    cut = slice_.sharding(P("x"))  # type: ignore[no-untyped-call]  # JAX is typed in part
    ones = client.put(np.full(size, 1.0, np.float32), cut)
    tens = client.put(np.full(size, 10.0, np.float32), cut)
    sum_ones = ml.jit(lambda x: x.sum(), slice=slice_)
    sum_tens = ml.jit(lambda x: x.sum() + 0, slice=slice_)
    found = []
    for _ in range(rounds):
        if tens_first:
            second = sum_tens(tens)
            first = sum_ones(ones)
        else:
            first = sum_ones(ones)
            second = sum_tens(tens)
        found.append((first, second))
    for number, (first, second) in enumerate(found):
        totals = float(first), float(second)
        if totals != (size, 10 * size):
            wrong.append(f"round {number} gave {totals}")


def many(launches: int, length: int) -> float:
    """Do what `plain_abort` does: collectives on eight devices of one process."""
    with ml.local(devices_per_island=8) as client:
        slice_ = client.slice({"x": 8})
        cut = slice_.sharding(P("x"))  # type: ignore[no-untyped-call]  # as above
        numbers = client.put(np.ones(8 * length, np.float32), cut)
        subtract = ml.jit(lambda x: x - x.sum(), slice=slice_)
        results = [subtract(numbers) for _ in range(launches)]
        return sum(float(each[0]) for each in results)


def opposite(rounds: int) -> list[str]:
    """Let two clients sum in opposite orders at once; return what was wrong."""
    wrong: list[str] = []
    with ml.local(devices_per_island=2, hosts_per_island=2) as client:
        other = client.another()
        threads = [
            threading.Thread(
                target=tenant,
                args=(each, rounds),
                kwargs={"tens_first": each is other, "wrong": wrong},
            )
            for each in (client, other)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        other.close()
    return wrong
