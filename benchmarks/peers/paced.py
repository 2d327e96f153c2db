"""Plain launches on paced devices: what nobody between a program and its devices can beat.

Stands where plain JAX stands on devices that compute: one loop in one process, which
knows of no other, with at most 32 launches under way.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from benchmarks.peers.plain_jax import MAX_UNFINISHED
from timelyml import ml
from timelyml.ml.hosts.paced import PacedExecutables


def named_step(name: str) -> Any:
    """Return a function of that name, by which paced devices know its time.

    It computes something of its own too: functions that compute the same are one.
    """
    number = int.from_bytes(name.encode()) % 9973

    def step(x: Any) -> Any:
        return x + number

    step.__name__ = step.__qualname__ = name
    return step


class PlainLaunches:
    """Launches functions on one paced device of this process.

    Args:
        times_s: Seconds that each holds the device, by its name.
    """

    def __init__(self, times_s: dict[str, float]) -> None:
        slice_ = ml.OfflineClient().slice({"x": 1})
        executables = PacedExecutables(times_s)
        self._first = np.zeros(1, np.float32)
        self._loaded = {
            name: executables.load(
                ml.jit(named_step(name), slice=slice_)
                .trace_call(self._first)
                .computation,
                jax.devices()[:1],
            )
            for name in times_s
        }

    def run(self, name: str, num_calls: int) -> float:
        """Run so many, each on what the one before it made; return the seconds."""
        run = self._loaded[name]
        x: Any = self._first
        began = time.perf_counter()
        for number in range(num_calls):
            (x,) = run(x)
            if number % MAX_UNFINISHED == MAX_UNFINISHED - 1:
                x.block_until_ready()
        x.block_until_ready()
        return time.perf_counter() - began
