"""Compiled functions for derivatives: made once for calls that are alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import use_abstract_mesh

from timelyml.errors import TimelyError
from timelyml.ml.functions import (
    JitFunction,
    Options,
    SliceLike,
    Spec,
    TracedCall,
    abstract_mesh,
    applied,
    partition_spec,
)
from timelyml.ml.functions.blame import trace_error
from timelyml.ml.functions.settings import settings_key
from timelyml.ml.functions.types import dtype_named
from timelyml.ml.gradients.derivatives import (
    Backward,
    Derivative,
    Forward,
    Turn,
    added,
)
from timelyml.ml.programs import Value


class Maker:
    """Makes the functions of gradients, and keeps them."""

    def __init__(self) -> None:
        self._made: dict[Any, JitFunction] = {}
        self._known: dict[Any, Derivative] = {}

    def traced(self, call: TracedCall, derivative: Derivative) -> Derivative:
        """Return an equal derivative whose residual is known.

        Raises:
            TraceError: The function has no derivative; it names the user's line.
        """
        computation = call.computation
        key = derivative, computation.mesh, computation.settings
        found = self._known.setdefault(key, derivative)
        if found.keeps:
            mesh = abstract_mesh(computation.mesh)
            try:
                with applied(computation.settings), use_abstract_mesh(mesh):
                    _ = found.residual
            except TimelyError:
                raise
            except Exception as error:
                raise trace_error(found.name, error) from error
        return found

    def forward(
        self, call: TracedCall, derivative: Derivative, returned: tuple[int, ...]
    ) -> JitFunction:
        """Return the function for the way there."""
        num_saved = 0
        if derivative.keeps and derivative.live:
            num_saved = len(derivative.residual.saved)
        outs = (*_results(call), *_operands(call, returned), *(None,) * num_saved)
        return self._jit(call, "forward", derivative, returned, outs)

    def turn(
        self, call: TracedCall, derivative: Derivative, returned: tuple[int, ...]
    ) -> JitFunction:
        """Return the function for both ways at once."""
        positions = (*returned, *derivative.wanted)
        outs = (*_results(call), *_operands(call, positions))
        return self._jit(call, "turn", derivative, returned, outs)

    def backward(
        self, call: TracedCall, derivative: Derivative, num_parts: Sequence[int]
    ) -> JitFunction:
        """Return the function for the way back.

        Args:
            call: What goes the way there.
            derivative: Of its function.
            num_parts: How many parts the cotangent of each live result has.
        """
        results = _results(call)
        parts = tuple(
            (results[position],) * count
            for position, count in zip(derivative.live, num_parts, strict=True)
        )
        operands = _operands(call, derivative.operands_read)
        kept = tuple(results[position] for position in derivative.results_read)
        return self._once(
            ("backward", derivative, parts, *_key(call)),
            call.slice,
            lambda: Backward(derivative),
            Options(
                in_shardings=(operands, kept, None, parts),
                out_shardings=_operands(call, derivative.wanted),
            ),
        )

    def sum(self, value: Value, slice_: SliceLike, num_parts: int) -> JitFunction:
        """Return the function that adds up parts of a gradient, on its slice."""
        options = Options(out_shardings=(partition_spec(value.spec or ()),))
        key = "sum", value.type, value.spec, num_parts, slice_.mesh, slice_.platform
        return self._once(key, slice_, lambda: sum_gradients, options)

    def zeros(self, value: Value, slice_: SliceLike) -> JitFunction:
        """Return the function that gives a gradient of zeros, on a slice."""
        options = Options(out_shardings=(partition_spec(value.spec or ()),))
        key = "zeros", value.type, value.spec, slice_.mesh, slice_.platform

        def zero_gradient() -> tuple[Any]:
            return (jnp.zeros(value.type.shape, dtype_named(value.type.dtype)),)

        return self._once(key, slice_, lambda: zero_gradient, options)

    def _jit(
        self,
        call: TracedCall,
        kind: str,
        derivative: Derivative,
        returned: tuple[int, ...],
        outs: tuple[Any, ...],
    ) -> JitFunction:
        computation = call.computation
        make = Forward if kind == "forward" else Turn
        return self._once(
            (kind, derivative, returned, computation.donated, *_key(call)),
            call.slice,
            lambda: make(derivative, returned),
            Options(
                in_shardings=_operands(call, range(len(computation.in_specs))),
                out_shardings=outs,
                donate_argnums=computation.donated,
            ),
        )

    def _once(
        self,
        key: Any,
        slice_: SliceLike,
        make: Callable[[], Callable[..., Any]],
        options: Options,
    ) -> JitFunction:
        if key not in self._made:
            self._made[key] = JitFunction(make(), slice_, options)
        return self._made[key].on(slice_)


def sum_gradients(*parts: Any) -> tuple[Any]:
    """Add up the parts of a gradient."""
    return (added(*parts),)


def _key(call: TracedCall) -> tuple[Any, ...]:
    computation = call.computation
    shardings: tuple[tuple[Spec, ...], ...] = (
        computation.in_specs,
        computation.out_specs,
    )
    return (*shardings, computation.mesh, computation.platform, settings_key())


def _operands(call: TracedCall, positions: Sequence[int]) -> tuple[Any, ...]:
    return tuple(partition_spec(call.computation.in_specs[i]) for i in positions)


def _results(call: TracedCall) -> tuple[Any, ...]:
    computation = call.computation
    return tuple(map(partition_spec, computation.out_specs[: computation.num_results]))
