"""Computations that are launched device by device, where there is something to do.

Where shards need nothing of each other, each has an executable of its own, and is not
launched if there are no rows (the paper's section 6.3): its results are zeros, which
whoever reads them finds there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from timelyml.errors import ComputationError
from timelyml.ml import jax_private
from timelyml.ml.functions.computation import ArrayType, Computation
from timelyml.ml.functions.loading import Executable, MemoryNeeds, load
from timelyml.ml.functions.specs import abstract_mesh, named_sharding
from timelyml.ml.functions.types import dtype_named


class Outputs(list[jax.Array]):
    """What a launch returned.

    Attributes:
        num_left_out: On how many devices nothing was launched.
    """

    num_left_out = 0


class ExecutableByDevice:
    """A computation whose shards are launched each for itself, if they have work.

    How much that is was computed earlier, and has to be known; whoever launches it waits
    for that. It comes without anything of later launches, as what is launched was ordered
    before, on all hosts alike.

    Attributes:
        computation: What was compiled; `shard` of it is what each device runs.
        memory: What it needs on each device.
        quick: None, as somebody has to look at what there is to do.
    """

    quick: tuple[Callable[[list[jax.Array]], Any], Any] | None = None

    def __init__(
        self,
        computation: Computation,
        devices: Sequence[jax.Device],
        parts: Sequence[tuple[Executable, Callable[[], Any]]],
    ) -> None:
        logical = computation.mesh
        grid = np.array(devices, dtype=object).reshape(logical.axis_sizes)
        mesh = jax.sharding.Mesh(
            grid, logical.axis_names, axis_types=abstract_mesh(logical).axis_types
        )
        self.computation = computation
        self._parts = tuple(parts)
        self._out_shardings = [
            named_sharding(mesh, spec) for spec in computation.out_specs
        ]

    @property
    def memory(self) -> MemoryNeeds:
        """What it needs on each device."""
        return self._parts[0][0].memory

    def pending(self, arrays: Sequence[jax.Array | None]) -> tuple[jax.Array, ...]:
        """Return what says which devices have something to do, unless it is computed."""
        counts = arrays[self.computation.idle]
        return () if counts is None or jax_private.is_ready(counts) else (counts,)

    def __call__(self, *arrays: jax.Array) -> Outputs:
        """Start it on the devices that have something to do; on all if none can say.

        Args:
            arrays: One for each argument, in its sharding. Those that are donated are
                not to be used again.
        """
        outputs, found = Outputs(), []
        is_known = not self.pending(arrays)
        # All at once, as the first launch may take the memory of one.
        by_array = [_shards(each, len(self._parts)) for each in arrays]
        for (part, fill), *given in zip(self._parts, *by_array, strict=True):
            if not is_known or np.asarray(given[self.computation.idle]).any():
                found.append(part(*given))
                continue
            outputs.num_left_out += 1
            found.append(fill())
        for position in self.computation.donated:
            arrays[position].delete()
        shapes = [each.shape for each in self.computation.out_types]
        whole = zip(shapes, self._out_shardings, zip(*found, strict=True), strict=True)
        outputs.extend(
            jax.make_array_from_single_device_arrays(shape, sharding, list(own))
            for shape, sharding, own in whole
        )
        return outputs

    def check(self, outputs: Sequence[Any]) -> ComputationError | None:
        """Return what a part found in its outputs: None, as it has no checks."""
        return self._parts[0][0].check(outputs)


def load_by_device(
    computation: Computation, devices: Sequence[jax.Device]
) -> ExecutableByDevice:
    """Compile what each shard computes for each device of this process, side by side.

    Raises:
        TimelyError: As `load`.
    """
    shard = computation.shard
    assert shard is not None  # noqa: S101 - for the type
    own = [each for each in devices if each.process_index == jax.process_index()]
    with ThreadPoolExecutor(len(own), "timelyml-compile-shard") as pool:
        loaded = pool.map(lambda device: load(shard, [device]), own)
        fillers = pool.map(lambda device: _filler(shard.out_types, device), own)
        parts = list(zip(loaded, fillers, strict=True))
    return ExecutableByDevice(computation, devices, parts)


def _shards(array: jax.Array, count: int) -> list[jax.Array]:
    """Return what of an array lies on each device of this process, in their order."""
    if array.is_fully_replicated:  # or JAX would give that of the first for all
        return [each.data for each in array.addressable_shards]
    return [array.addressable_data(number) for number in range(count)]


def _filler(types: Sequence[ArrayType], device: jax.Device) -> Callable[[], Any]:
    """Return what fills memory of a device with zeros, for arrays of these types.

    A tenth of the time in which zeros of the host get there.
    """

    def zeros() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(x.shape, dtype_named(x.dtype)) for x in types)

    there = jax.sharding.SingleDeviceSharding(device)
    with jax.enable_x64(True):  # or 64-bit types would be cut
        compiled = jax.jit(zeros, out_shardings=there).lower().compile()
    quick = jax_private.quick_launch(compiled, 0)
    if quick is None:
        return compiled
    execute, handlers = quick
    return lambda: execute([]).consume_with_handlers(handlers)
