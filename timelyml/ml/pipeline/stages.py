"""A stage on its slice: the compiled functions that the actions of a schedule call.

They are made once for each shape of microbatch. All take the weights by reference; what
else the backward pass reads lies on the slice, as results of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import use_abstract_mesh

from timelyml.errors import ConfigError, TimelyError
from timelyml.ml.client.slices import Slice
from timelyml.ml.functions import (
    JitFunction,
    abstract_mesh,
    jit,
    logical_mesh,
    partition_spec,
    type_of,
)
from timelyml.ml.functions.blame import name_of, trace_error
from timelyml.ml.functions.settings import settings_key
from timelyml.ml.functions.types import abstract_array
from timelyml.ml.pipeline.flattening import evaluate
from timelyml.ml.pipeline.splitting import Split, split


@dataclass(frozen=True, slots=True)
class StageFunctions:
    """What one stage does with microbatches of one shape; each returns a tick last.

    A tick is a scalar that comes with the rest, for whoever wants to see when.

    Attributes:
        forward: `(params, x, extra) -> (y, saved, tick)`.
        backward: `(given, saved, dy, gradients) -> (dx, gradients, tick)`; `given` is
            `(params, extra)`, or `(params, x, extra)` on the first stage; it destroys
            the gradients so far.
        input_part: `(given, saved, dy) -> (dx, carried, tick)`.
        weight_part: `(given, kept, carried, gradients) -> (gradients, tick)`.
        kept: Positions, in what was saved, of what the weight part reads.
    """

    forward: JitFunction
    backward: JitFunction
    input_part: JitFunction
    weight_part: JitFunction
    kept: tuple[int, ...]

    def on(self, slice_: Slice) -> StageFunctions:
        """Return the functions on another slice, traced once if its mesh is the same."""
        return StageFunctions(
            self.forward.on(slice_),
            self.backward.on(slice_),
            self.input_part.on(slice_),
            self.weight_part.on(slice_),
            self.kept,
        )


class Stage:
    """One stage of the model, placed.

    Args:
        function: `function(params, x) -> y`.
        slice_: Where it runs.
        known: Functions made before, by what makes them; stages that are alike share
            what is traced.
        loss_fn: On the last stage, `loss_fn(y, target) -> (total, count)`.
        is_first: Whether its input comes from the client and is kept on the slice.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        slice_: Slice,
        known: dict[Any, StageFunctions],
        *,
        loss_fn: Callable[..., Any] | None,
        is_first: bool,
    ) -> None:
        self.slice = slice_
        self.is_first = is_first
        self._function = function
        self._known = known
        self._loss_fn = loss_fn
        self._shaped: dict[Any, StageFunctions] = {}

    def functions_for(self, params: Any, x: Any, extra: Any) -> StageFunctions:
        """Return the compiled functions for arguments like these.

        Raises:
            TraceError: The stage or the loss cannot be traced for them.
            ConfigError: The loss is no pair of a total and a count.
        """
        leaves, tree = jax.tree.flatten((params, x, extra))
        key = tree, tuple(map(type_of, leaves)), tuple(map(_spec_of, leaves))
        found = self._shaped.get(key)
        if found is None:
            found = self._shaped[key] = self._found(key, params, x, extra)
        return found

    def _found(self, key: Any, params: Any, x: Any, extra: Any) -> StageFunctions:
        slice_ = self.slice
        alike = self._function, self._loss_fn, self.is_first, slice_.mesh
        whole = *alike, slice_.platform, settings_key(), key
        if whole not in self._known:
            self._known[whole] = self._make(params, x, extra)
        return self._known[whole].on(slice_)

    def _make(self, params: Any, x: Any, extra: Any) -> StageFunctions:
        mesh = abstract_mesh(logical_mesh(self.slice.mesh))
        try:
            with use_abstract_mesh(mesh):
                return _Maker(self, params, x, extra).functions()
        except TimelyError:
            raise
        except Exception as error:
            raise trace_error(name_of(self._function), error) from error

    def apply(self, params: Any, x: Any, extra: Any) -> Any:
        """Compute the stage as it stands, or its loss; for tracing."""
        y = self._function(params, x)
        if self._loss_fn is None:
            return y
        (target,) = extra
        loss = self._loss_fn(y, target)
        is_pair = isinstance(loss, tuple) and len(loss) == 2
        if not is_pair or any(jnp.shape(each) for each in loss):
            raise ConfigError(
                f"loss function {name_of(self._loss_fn)!r} returns what is no pair of "
                f"scalars; got {jax.tree.map(jnp.shape, loss)!r}; expected (total, "
                f"count), the sum over what counts and how much that is; do not divide, "
                f"as microbatches may count unequally much",
                option="loss_fn",
            )
        return loss

    @property
    def has_loss(self) -> bool:
        """Whether it is the last one, and yields the loss."""
        return self._loss_fn is not None

    def name(self, part: str) -> str:
        """Name one of its functions, for traces and errors."""
        return f"{name_of(self._function)}_{part}"


class _Maker:
    """Makes the functions of a stage for one shape of microbatch."""

    def __init__(self, stage: Stage, params: Any, x: Any, extra: Any) -> None:
        self._stage = stage
        self._trees = [jax.tree.structure(each) for each in (params, x, extra)]
        avals = [_abstract(each) for each in (params, x, extra)]
        self._split: Split = split(
            self._flat_stage,
            *avals,
            is_input_kept=stage.is_first,
            num_differentiated=1 if stage.has_loss else None,
        )
        self._param_specs = jax.tree.map(_spec_of, params)

    def functions(self) -> StageFunctions:
        parts = self._split
        accumulated = self._param_specs
        return StageFunctions(
            forward=self._jit("forward", self._forward),
            backward=self._jit(
                "backward",
                self._backward,
                donate_argnums=3,
                out_shardings=(None, accumulated, None),
            ),
            input_part=self._jit("input", self._input_part),
            weight_part=self._jit(
                "weight",
                self._weight_part,
                donate_argnums=3,
                out_shardings=(accumulated, None),
            ),
            kept=parts.kept,
        )

    def _flat_stage(
        self, params: Sequence[Any], x: Sequence[Any], extra: Sequence[Any]
    ) -> list[Any]:
        trees = zip(self._trees, (params, x, extra), strict=True)
        results = self._stage.apply(*(jax.tree.unflatten(t, v) for t, v in trees))
        leaves, self._y_tree = jax.tree.flatten(results)
        return leaves

    def _forward(self, params: Any, x: Any, extra: Any) -> Any:
        flat = evaluate(self._split.forward, jax.tree.leaves((params, x, extra)))
        cut = self._split.num_results
        y = jax.tree.unflatten(self._y_tree, flat[:cut])
        return y, tuple(flat[cut:]), _tick()

    def _backward(self, given: Any, saved: Any, dy: Any, gradients: Any) -> Any:
        dx, fresh = self._evaluated(self._split.backward, given, saved, self._dy(dy))
        return dx, _added(gradients, fresh), _tick()

    def _input_part(self, given: Any, saved: Any, dy: Any) -> Any:
        part = self._split.input_part
        dx, carried = self._evaluated(part, given, saved, self._dy(dy))
        return dx, carried, _tick()

    def _weight_part(self, given: Any, kept: Any, carried: Any, gradients: Any) -> Any:
        saved_types = self._split.weight_part.in_avals[len(jax.tree.leaves(given)) :]
        known = dict(zip(self._split.kept, kept, strict=True))
        num_saved = len(saved_types) - len(carried)
        saved = [
            known[i] if i in known else jnp.zeros(of.shape, of.dtype)  # not read
            for i, of in enumerate(saved_types[:num_saved])
        ]
        flat = jax.tree.leaves((given, saved, carried))
        fresh = evaluate(self._split.weight_part, flat)
        return _added(gradients, fresh), _tick()

    def _evaluated(
        self, part: ClosedJaxpr, given: Any, saved: Any, dy: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        flat = evaluate(part, jax.tree.leaves((given, saved, dy)))
        return tuple(flat[: self._split.num_dx]), tuple(flat[self._split.num_dx :])

    def _dy(self, dy: Any) -> Any:
        """Return the cotangents; the loss begins with one of 1."""
        if not self._stage.has_loss:
            return dy
        total = self._split.backward.in_avals[-1]
        return (jnp.ones(total.shape, total.dtype),)

    def _jit(self, part: str, function: Callable[..., Any], **options: Any) -> Any:
        def named(*arguments: Any) -> Any:
            return function(*arguments)

        named.__name__ = named.__qualname__ = self._stage.name(part)
        return jit(named, slice=self._stage.slice, **options)


def _abstract(tree: Any) -> list[Any]:
    return [abstract_array(type_of(each)) for each in jax.tree.leaves(tree)]


def _spec_of(leaf: Any) -> Any:
    return partition_spec(getattr(leaf, "spec", None) or ())


def _added(gradients: Any, fresh: Sequence[Any]) -> Any:
    leaves, tree = jax.tree.flatten(gradients)
    sums = [old + new for old, new in zip(leaves, fresh, strict=True)]
    return jax.tree.unflatten(tree, sums)


def _tick() -> jax.Array:
    return jnp.zeros((), jnp.int8)
