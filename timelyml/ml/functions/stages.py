"""A compiled function on its way to devices, stage by stage, as in `jax.stages`.

`f.trace(*args)`, `.lower()`, `.compile()`: the first two take place in the client, which
has no devices; the last asks the hosts of the slice, and waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax

from timelyml.errors import ProgramError, TraceError
from timelyml.ml.functions.calls import SliceLike, TracedCall
from timelyml.ml.functions.computation import Computation
from timelyml.ml.functions.loading import MemoryNeeds, exported
from timelyml.ml.functions.settings import applied
from timelyml.ml.functions.specs import abstract_mesh, named_sharding
from timelyml.ml.functions.types import abstract_array


@runtime_checkable
class Compiler(Protocol):
    """Who has computations compiled: a client."""

    def compiled(
        self, computation: Computation, slice_: Any, timeout_s: float | None
    ) -> MemoryNeeds:
        """Have a computation compiled for a slice; wait, and return what it takes."""


class Jitted(Protocol):
    """A function on a slice, as its stages know it: a `JitFunction`."""

    @property
    def name(self) -> str:
        """The name of the function."""

    @property
    def slice(self) -> SliceLike:
        """Where it runs."""

    def trace_call(self, *args: Any, **kwargs: Any) -> TracedCall:
        """Trace the function for arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Start the function."""


class _Stage:
    """What is known of a function from when it is traced."""

    def __init__(self, function: Jitted, call: TracedCall) -> None:
        self._function = function
        self._call = call

    @property
    def out_info(self) -> Any:
        """Shapes, types and shardings of the results, in the tree that it returns."""
        computation = self._call.computation
        mesh = abstract_mesh(computation.mesh)
        pairs = zip(computation.out_types, computation.out_specs, strict=True)
        found = [
            abstract_array(each, named_sharding(mesh, spec)) for each, spec in pairs
        ]
        return self._call.results(found[: computation.num_results])

    def cost_analysis(self) -> dict[str, float]:
        """Return how many operations on elements it takes, by its trace: "flops"."""
        return {"flops": float(self._call.computation.flops)}

    def __repr__(self) -> str:
        function = self._function
        return f"{type(self).__name__}({function.name!r} on {function.slice.name!r})"


class TracedFunction(_Stage):
    """A function that is traced for certain arguments."""

    @property
    def jaxpr(self) -> Any:
        """What JAX makes of it, for the arguments that it uses."""
        call = self._call
        computation = call.computation
        mesh = abstract_mesh(computation.mesh)
        pairs = zip(computation.in_types, computation.in_specs, strict=True)
        types = [
            abstract_array(each, named_sharding(mesh, spec)) for each, spec in pairs
        ]
        traced: Callable[..., Any] = jax.make_jaxpr(call.flat)
        with applied(computation.settings), jax.sharding.use_abstract_mesh(mesh):
            return traced(*types)

    def lower(self) -> LoweredFunction:
        """Return it as StableHLO, which it is by now."""
        return LoweredFunction(self._function, self._call)


class LoweredFunction(_Stage):
    """A function as StableHLO, for the mesh and the platform of its slice."""

    def as_text(self) -> str:
        """Return the StableHLO.

        Host callbacks travel as code and are lowered by hosts; what is here calls others
        in their place.
        """
        return str(exported(self._call.computation).mlir_module())

    def compile(self, timeout_s: float | None = None) -> CompiledFunction:
        """Have it compiled for the slice, unless it is, and wait until it is.

        Args:
            timeout_s: How long; None: without end.

        Raises:
            TraceError: XLA refuses it.
            DeadlineError: It is not compiled in time.
            ProgramError: The client has no cluster.
            TimelyError: The slice, or the client, is gone.
        """
        slice_ = self._function.slice
        client = slice_.client
        if not isinstance(client, Compiler):
            raise ProgramError(
                f"function {self._function.name!r} cannot be compiled; got a client "
                f"without a cluster; expected one from ml.local or ml.connect; offline, "
                f"functions can only be traced and lowered"
            )
        needs = client.compiled(self._call.computation, slice_, timeout_s)
        return CompiledFunction(self._function, self._call, needs)


class CompiledFunction(_Stage):
    """A function that hosts have compiled for where its slice stands.

    It can be called with arguments of the types and shardings that it was traced for. A
    slice that moves has it compiled where it goes.
    """

    def __init__(self, function: Jitted, call: TracedCall, needs: MemoryNeeds) -> None:
        super().__init__(function, call)
        self._needs = needs

    def memory_analysis(self) -> MemoryNeeds:
        """Return what it takes on each device, as XLA says where it takes most."""
        return self._needs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Start the function; return its results, whose values may come later.

        Raises:
            TraceError: Types, shardings, structure or static values of the arguments
                are others than it was compiled for.
        """
        call = self._function.trace_call(*args, **kwargs)
        known = self._call.computation
        if call.computation.identity != known.identity:
            raise TraceError(
                f"function {self._function.name!r} is called with what it was not "
                f"compiled for; got arguments {list(call.computation.in_types)} with "
                f"shardings {list(call.computation.in_specs)}; expected "
                f"{list(known.in_types)} with {list(known.in_specs)}, and the same "
                f"structure and static values; call the function itself",
                function=self._function.name,
            )
        return self._function(*args, **kwargs)
