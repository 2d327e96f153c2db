"""The update of a stage: gradients of all replicas, summed, are divided once and applied.

Each stage runs the optimiser on its own weights, where they are. That equals the
optimiser over the whole model only if no update of a stage looks at another stage's
gradients; a transformation that does is refused. Clipping by the global norm, which few
models can do without, is done in `clipping.py`, from a norm over all stages.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Var

from timelyml.errors import ConfigError
from timelyml.ml.client.slices import Slice
from timelyml.ml.functions import JitFunction, jit, partition_spec, type_of
from timelyml.ml.functions.types import abstract_array
from timelyml.ml.pipeline.dependence import Dependence, variables
from timelyml.ml.pipeline.flattening import flattened
from timelyml.ml.pipeline.tying import without


def tally(slice_: Slice) -> JitFunction:
    """Return the function of lists of totals and counts that gives `(loss, count)`."""

    def loss(totals: Sequence[Any], counts: Sequence[Any]) -> tuple[Any, Any]:
        total, count = sum(totals), sum(counts)
        return total / jnp.maximum(count, 1), count

    function: JitFunction = jit(loss, slice=slice_)
    return function


def start(
    slice_: Slice, optimiser: optax.GradientTransformation, borrowed: set[int]
) -> JitFunction:
    """Return the function of weights that gives optimiser state and zero gradients."""

    def begin(params: Any) -> tuple[Any, Any]:
        state = optimiser.init(without(params, borrowed))
        return state, jax.tree.map(jnp.zeros_like, params)

    function: JitFunction = jit(begin, slice=slice_)
    return function


def update(
    slice_: Slice,
    optimiser: optax.GradientTransformation,
    borrowed: set[int],
    params: Any,
    summed: Callable[[Any], Any],
    *,
    keeps_given: bool,
) -> JitFunction:
    """Return the function that ends a step of one stage.

    `(params, state, given, count) -> (params, state, zeros)`, where `summed(given)` are
    the gradients of all replicas. Weights and state are destroyed, and what is given
    unless it is kept for others.
    """
    specs = specs_of(params)

    def end(params: Any, state: Any, given: Any, count: Any) -> tuple[Any, Any, Any]:
        mean = mean_of(summed(given), count, borrowed)
        return applied(optimiser, borrowed, params, state, mean)

    end.__name__ = end.__qualname__ = "update"
    donated = (0, 1) if keeps_given else (0, 1, 2)
    function: JitFunction = jit(
        end, slice=slice_, donate_argnums=donated, out_shardings=(specs, None, specs)
    )
    return function


def added(gradients: Any, shared: Mapping[int, Sequence[Any]]) -> Any:
    """Add to the gradients of a stage those that others have of weights that it owns.

    Args:
        gradients: Its own.
        shared: Those of others, by the position of the weight.
    """
    leaves, tree = jax.tree.flatten(gradients)
    for position, others in shared.items():
        leaves[position] = functools.reduce(operator.add, others, leaves[position])
    return jax.tree.unflatten(tree, leaves)


def mean_of(summed: Any, count: Any, borrowed: set[int]) -> Any:
    """Divide summed gradients by what counts, and drop borrowed ones."""
    divided = jax.tree.map(
        lambda leaf: leaf / jnp.maximum(count, 1).astype(leaf.dtype), summed
    )
    return without(divided, borrowed)


def applied(
    optimiser: optax.GradientTransformation,
    borrowed: set[int],
    params: Any,
    state: Any,
    mean: Any,
) -> tuple[Any, Any, Any]:
    """Run the optimiser; return weights, its state, and zeros in place of gradients."""
    own = without(params, borrowed)
    changes, state = optimiser.update(mean, state, own)
    fresh = iter(jax.tree.leaves(optax.apply_updates(own, changes)))
    leaves, tree = jax.tree.flatten(params)
    new = [leaf if i in borrowed else next(fresh) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(tree, new), state, jax.tree.map(jnp.zeros_like, params)


def specs_of(params: Any) -> Any:
    """Return how weights given as handles are cut."""
    return jax.tree.map(lambda leaf: partition_spec(leaf.spec or ()), params)


def check_optimiser(
    optimiser: optax.GradientTransformation, params: Sequence[Any]
) -> None:
    """Raise unless the optimiser treats every stage as if it were alone.

    Args:
        optimiser: Of the whole model.
        params: The weights of each stage, or what has their types.

    Raises:
        ConfigError: What becomes of one stage depends on the gradients of another.
    """
    types = [
        jax.tree.map(lambda each: abstract_array(type_of(each)), p) for p in params
    ]
    leaves, tree = jax.tree.flatten(types)
    stage_of = [s for s, p in enumerate(types) for _ in jax.tree.leaves(p)]

    def changes(*gradients: Any) -> Any:
        weights = jax.tree.map(lambda each: jnp.ones(each.shape, each.dtype), types)
        state = optimiser.init(weights)
        given = jax.tree.unflatten(tree, gradients)
        return jax.tree.leaves(optimiser.update(given, state, weights)[0])

    whole = flattened(jax.make_jaxpr(changes)(*leaves))
    dependence = Dependence(whole)
    for position, out in enumerate(whole.jaxpr.outvars):
        read = dependence.leaves(variables([out]))
        _refuse_others(stage_of, position, read, whole.jaxpr.invars)


def _refuse_others(
    stage_of: Sequence[int], position: int, read: Sequence[Var], invars: Sequence[Var]
) -> None:
    stages = {stage_of[invars.index(var)] for var in read}
    mine = stage_of[position]
    if stages - {mine}:
        raise ConfigError(
            f"the optimiser cannot run stage by stage; got one whose update of stage "
            f"{mine} depends on gradients of stages {sorted(stages - {mine})}, as when "
            f"clipping by the global norm; expected one that treats leaves or stages "
            f"alone; leave that clipping to clip_norm=, and other such rules out",
            option="optimiser",
        )


def copied(slice_: Slice, specs: Any = None) -> Callable[[Any], Any]:
    """Return the function that brings values to a slice, to lie there by these specs."""

    def copy(value: Any) -> Any:
        return value

    function: Callable[[Any], Any] = jit(copy, slice=slice_, out_shardings=specs)
    return function
