"""Loading: from a `Computation` to an executable on the devices of this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import Mesh, NamedSharding

from timelyml.errors import ComputationError, PlacementError, TimelyError
from timelyml.ml import jax_callbacks, jax_private
from timelyml.ml.functions.blame import callback_failure, check_failure, compile_error
from timelyml.ml.functions.callbacks import NUMBER_TYPE, Launches, guarded
from timelyml.ml.functions.checks import Checked, checks_of
from timelyml.ml.functions.computation import ArrayType, Checks, Computation, Spec
from timelyml.ml.functions.settings import applied
from timelyml.ml.functions.shipped import unship_function
from timelyml.ml.functions.specs import abstract_mesh, named_sharding
from timelyml.ml.functions.types import abstract_array, dtype_named, is_key, shaped


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What a computation takes on each of its devices, by XLA's own analysis.

    Attributes:
        argument_bytes: Of all arguments, those that are donated included.
        output_bytes: Of all outputs, those in donated memory included.
        aliased_bytes: Of outputs that lie in donated memory.
        temporary_bytes: While it runs.
    """

    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temporary_bytes: int

    @property
    def new_bytes(self) -> int:
        """What has to be free for it to run, beside its arguments."""
        return self.output_bytes - self.aliased_bytes + self.temporary_bytes


class Executable:
    """A computation, compiled for certain devices. Calling it only starts it.

    Attributes:
        computation: What was compiled.
        devices: In the order of the mesh.
        in_shardings: What arguments have to lie in.
        out_shardings: What results will lie in.
        memory: What it needs on each device.
        quick: What launches it in half the time, of arguments that lie as it wants them
            and are not donated (`jax_private.quick_launch`); None where a launch is more.
    """

    def __init__(
        self,
        computation: Computation,
        devices: tuple[jax.Device, ...],
        mesh: Mesh,
        compiled: Any,
        *,
        checks: Checks | None,
        launches: Launches | None,
    ) -> None:
        self.computation = computation
        self.devices = devices
        self.in_shardings = _shardings(mesh, computation.in_specs)
        self.out_shardings = _shardings(mesh, computation.out_specs)
        self.memory = _memory_needs(compiled)
        self._compiled = compiled
        self._checks = checks
        self._launches = launches  # under way, if callbacks can fail them
        self._whole = named_sharding(mesh, ()) if mesh.is_multi_process else None
        self.quick: tuple[Callable[[list[jax.Array]], Any], Any] | None = None
        types = enumerate(computation.out_types)
        self._empty = [i for i, each in types if 0 in each.shape and not each.key_impl]
        if not (
            computation.donated
            or computation.has_effects
            or _has_keys(computation)
            or self._empty
        ):
            count = len(computation.in_types)
            self.quick = jax_private.quick_launch(compiled, count)

    def pending(self, arrays: Sequence[jax.Array | None]) -> tuple[()]:
        """Nothing has to be computed to start it: it is started on all devices."""
        del arrays
        return ()

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        """Start the computation; return its outputs, which may not be ready yet.

        Args:
            arrays: One for each argument, in its sharding. Those that are donated are
                not to be used again.
        """
        if self.quick is not None:
            execute, handlers = self.quick
            # What is wrong is said below, by who looks at every argument.
            with contextlib.suppress(Exception):
                return list(execute(list(arrays)).consume_with_handlers(handlers))
        outputs: list[jax.Array]
        if self._launches is None:
            outputs = list(self._compiled(*arrays))
        else:
            outputs = launch = self._launches.begin()
            outputs.extend(self._compiled(self._numbered(launch.number), *arrays))
        for position in self._empty:
            of = self.computation.out_types[position]
            outputs[position] = _empty(of, self.out_shardings[position])
        return outputs

    def _numbered(self, number: np.int32) -> Any:
        """Return the number of a launch as the executable takes it.

        JAX would ask all processes whether they have the same before it took a plain one.
        """
        if self._whole is None:
            return number
        return jax.make_array_from_callback((), self._whole, lambda _: number)

    def check(self, outputs: Sequence[Any]) -> ComputationError | None:
        """Return what a callback raised, or a `checkify.check` found, or None.

        Waits until the outputs are computed.

        Args:
            outputs: What the call returned.
        """
        raised = None if self._launches is None else self._launches.end(outputs)
        if raised is not None:
            return callback_failure(self.computation.name, raised)
        failure = self._checks and self._checks.first_failure(outputs)
        return check_failure(self.computation.name, *failure) if failure else None


def load(computation: Computation, devices: Sequence[jax.Device]) -> Executable:
    """Compile a computation; takes tenths of a second at least.

    Args:
        computation: One with host callbacks brings code, which is run.
        devices: As many as its mesh has, in row-major order of its axes.

    Raises:
        PlacementError: There are more or fewer.
        TraceError: XLA refuses to compile it.
        ShippingError: Its code needs a module that is not here.
    """
    logical = computation.mesh
    if len(devices) != logical.size:
        raise PlacementError(
            f"computation {computation.name!r} cannot be placed; got {len(devices)} "
            f"devices; expected {logical.size} for mesh {logical}",
        )
    grid = np.array(devices, dtype=object).reshape(logical.axis_sizes)
    mesh = Mesh(grid, logical.axis_names, axis_types=abstract_mesh(logical).axis_types)
    try:
        with applied(computation.settings):
            lowered, checks, launches = _lowered(computation, mesh)
            compiled = lowered.compile()
            if any(map(_is_packed, computation.in_types)):
                jax_private.ignore_layouts(compiled)
    except TimelyError:
        raise
    except Exception as error:
        raise compile_error(computation.name, error) from error
    return Executable(
        computation,
        tuple(devices),
        mesh,
        compiled,
        checks=checks,
        launches=launches,
    )


def put(
    value: Any, array_type: ArrayType, sharding: jax.sharding.Sharding
) -> jax.Array:
    """Put a host array on devices as that type, whatever the settings of the process.

    Args:
        value: Of the type, or one that it is rounded to; of keys, their words.
        array_type: What it becomes.
        sharding: Where it goes.
    """
    physical = array_type.physical
    host = np.asarray(value, dtype_named(physical.dtype))
    with jax.enable_x64(True):  # or 64-bit elements would be cut
        placed: Any = host
        if array_type.key_impl is not None:
            words = jax.device_put(host, _first_device(sharding))
            placed = jax.random.wrap_key_data(words, impl=array_type.key_impl)
        array: jax.Array = jax.device_put(placed, sharding)
    return array


def to_host(array: jax.Array) -> np.ndarray[Any, Any]:
    """Return the elements of an array; of typed keys, their words. Waits for them."""
    if is_key(array.dtype):
        return np.asarray(jax.random.key_data(array))
    return np.asarray(array)


def _empty(array_type: ArrayType, sharding: Any) -> jax.Array:
    """Return an array without elements; XLA leaves its shards as large as the whole."""
    shape, dtype = array_type.shape, dtype_named(array_type.dtype)
    shard = np.zeros(sharding.shard_shape(shape), dtype)
    with jax.enable_x64(True):  # or 64-bit types would be cut
        return jax.make_array_from_callback(shape, sharding, lambda _: shard)


def _lowered(
    computation: Computation, mesh: Mesh
) -> tuple[Any, Checks | None, Launches | None]:
    """Lower for real devices; return the checks too, numbered as they are in there.

    Where a callback that raises would hang other devices, return who hears of it.
    """
    launches: Launches | None = None
    donated = computation.donated
    avals = [
        abstract_array(each, named_sharding(mesh, spec))
        for each, spec in zip(computation.in_types, computation.in_specs, strict=True)
    ]
    if computation.pickled_code is None:
        fun, checks = exported(computation).call, computation.checks
    else:
        jaxpr, checks = _traced_here(computation.pickled_code, avals, mesh)
        if mesh.size > 1:
            launches = Launches()
            jaxpr = jax_callbacks.with_callbacks(
                jaxpr, partial(guarded, launches), launches.goes_on
            )
            avals.insert(0, abstract_array(NUMBER_TYPE, named_sharding(mesh, ())))
            donated = tuple(position + 1 for position in donated)
        fun = jax_callbacks.flat_function(jaxpr)
    jitted = jax.jit(
        fun,
        out_shardings=tuple(_shardings(mesh, computation.out_specs)),
        donate_argnums=donated,
    )
    lowered = jitted.lower(*avals)
    if computation.pickled_code is not None:
        jax_callbacks.call_under(lowered, partial(applied, computation.settings))
    return lowered, checks, launches


def _traced_here(
    pickled_code: bytes, avals: Sequence[Any], mesh: Mesh
) -> tuple[Any, Checks | None]:
    """Trace a function that travelled as code; its checks get numbers of this process."""
    shipped = unship_function(pickled_code)
    with jax.set_mesh(mesh):
        traced = jax.jit(shipped).trace(*avals)
    checks = None
    if isinstance(shipped.fun, Checked):
        results, error = traced.out_tree.children()
        checks = checks_of(error, results.num_leaves)
    return traced.jaxpr, checks


def exported(computation: Computation) -> export.Exported:
    """Return a computation as JAX has what it exported; it can be called in others.

    Its arguments and results are flat.
    """
    mesh = abstract_mesh(computation.mesh)
    return jax_private.exported_of(
        name=computation.name,
        module=computation.stablehlo,
        calling_convention=computation.calling_convention,
        in_avals=list(map(shaped, computation.in_types)),
        out_avals=list(map(shaped, computation.out_types)),
        in_shardings=_shardings(mesh, computation.in_specs),
        out_shardings=_shardings(mesh, computation.out_specs),
        platform=computation.platform,
        num_devices=computation.mesh.size,
    )


def _has_keys(computation: Computation) -> bool:
    types = (*computation.in_types, *computation.out_types)
    return any(each.key_impl is not None for each in types)


def _is_packed(array_type: ArrayType) -> bool:
    """Whether elements take less than a byte, as those of int4."""
    if array_type.key_impl is not None:
        return False
    return jax.dtypes.itemsize_bits(dtype_named(array_type.dtype)) < 8


def _shardings(mesh: Any, specs: Sequence[Spec]) -> list[NamedSharding]:
    return [named_sharding(mesh, spec) for spec in specs]


def _first_device(sharding: jax.sharding.Sharding) -> jax.Device:
    devices: set[Any] = sharding.addressable_devices
    return min(devices, key=lambda device: int(device.id))


def _memory_needs(compiled: Any) -> MemoryNeeds:
    found = compiled.memory_analysis()
    return MemoryNeeds(
        found.argument_size_in_bytes,
        found.output_size_in_bytes,
        found.alias_size_in_bytes,
        found.temp_size_in_bytes,
    )
