"""Paced devices, for experiments only: they take stated times and compute nothing.

A machine with two cores cannot run sixteen hosts that compute, but it can run all that
keeps them busy: processes, sockets, messages, the scheduler, buffers. On paced devices a
computation holds its devices for the time that is stated for the function's name, begins
when they are free and its arguments are there, and returns zeros. Hosts of an island do
not wait for each other within a computation.

Figures that were measured so say it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from timelyml.errors import ConfigError
from timelyml.ml.functions import (
    ArrayType,
    Computation,
    MemoryNeeds,
    abstract_mesh,
    named_sharding,
)
from timelyml.ml.functions.types import dtype_named

_NS_PER_S = 1_000_000_000


class PacedArray:
    """Zeros that are there from a certain time on; otherwise an array like any other."""

    def __init__(self, array: jax.Array, ready_ns: int) -> None:
        self._array = array
        self.ready_ns = ready_ns

    def is_ready(self) -> bool:
        """Whether its time has come."""
        return time.monotonic_ns() >= self.ready_ns

    def block_until_ready(self) -> PacedArray:
        """Wait for its time."""
        while (left_ns := self.ready_ns - time.monotonic_ns()) > 0:
            time.sleep(left_ns / _NS_PER_S)
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self.block_until_ready()
        return np.array(self._array, dtype, copy=copy)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)


class PacedOutputs(list[Any]):
    """What a launch returns, also to who takes it as XLA's own results are taken."""

    def consume_with_handlers(self, handlers: object) -> list[Any]:
        """Return the arrays, which need no handlers."""
        del handlers
        return self


class PacedExecutable:
    """A computation on paced devices.

    Args:
        computation: What it stands for.
        devices: Of the whole slice, in the order of its mesh.
        duration_ns: How long it holds them.
        free_ns: When each device is free; shared by all that is launched there.
    """

    memory = MemoryNeeds(0, 0, 0, 0)

    def __init__(
        self,
        computation: Computation,
        devices: Sequence[jax.Device],
        duration_ns: int,
        free_ns: dict[int, int],
    ) -> None:
        self.computation = computation
        self._duration_ns = duration_ns
        self._free_ns = free_ns
        rank = jax.process_index()
        self._own = [each.id for each in devices if each.process_index == rank]
        logical = computation.mesh
        grid = np.array(devices, dtype=object).reshape(logical.axis_sizes)
        axis_types = abstract_mesh(logical).axis_types
        mesh = Mesh(grid, logical.axis_names, axis_types=axis_types)
        results = zip(computation.out_types, computation.out_specs, strict=True)
        self._zeros = [_zeros(of, named_sharding(mesh, spec)) for of, spec in results]
        # As of what computes: where nobody looks at it in between, it is launched so.
        self.quick: tuple[Callable[[list[jax.Array]], Any], Any] | None
        self.quick = self._hold, None

    def pending(self, arrays: Sequence[Any]) -> tuple[()]:
        """Nothing is looked at before it starts."""
        del arrays
        return ()

    def __call__(self, *arrays: Any) -> list[Any]:
        """Hold the devices once they are free and the arguments there."""
        return self._hold(arrays)

    def _hold(self, arrays: Sequence[Any]) -> PacedOutputs:
        free_ns = self._free_ns
        begin_ns = max(
            time.monotonic_ns(),
            *(free_ns.get(device, 0) for device in self._own),
            *(getattr(each, "ready_ns", 0) for each in arrays),
        )
        end_ns = begin_ns + self._duration_ns
        free_ns.update(dict.fromkeys(self._own, end_ns))
        return PacedOutputs([PacedArray(each, end_ns) for each in self._zeros])

    def check(self, outputs: Sequence[Any]) -> None:
        """Nothing can fail that is not computed."""


class PacedExecutables:
    """Executables of a process with paced devices.

    Args:
        times_s: Seconds for which a function holds its devices, by its name.
    """

    def __init__(self, times_s: Mapping[str, float]) -> None:
        self._times_s = times_s
        self._free_ns: dict[int, int] = {}

    def forget(self, identity: str) -> None:
        """Nothing: what stands for a computation is made anew each time."""

    def load(
        self, computation: Computation, devices: Sequence[jax.Device]
    ) -> PacedExecutable:
        """Return what stands for a computation.

        Raises:
            ConfigError: No time is stated for it, or it has typed keys.
        """
        duration_s = self._times_s.get(computation.name)
        has_keys = any(each.key_impl is not None for each in computation.out_types)
        if duration_s is None or has_keys:
            raise ConfigError(
                f"paced devices cannot run function {computation.name!r}; got times for "
                f"{sorted(self._times_s)}; expected one for it, and results that are no "
                f"typed keys; state it, or run on devices that compute",
                option="paced_s",
            )
        duration_ns = round(duration_s * _NS_PER_S)
        return PacedExecutable(computation, devices, duration_ns, self._free_ns)


def _zeros(of: ArrayType, sharding: jax.sharding.NamedSharding) -> jax.Array:
    whole = np.zeros(of.shape, dtype_named(of.dtype))
    array: jax.Array = jax.make_array_from_callback(
        of.shape, sharding, lambda index: whole[index]
    )
    return array
