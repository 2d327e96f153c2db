"""Clipping by the norm of all stages' gradients: one number goes from each to all.

Each stage divides its gradients and sums their squares; one slice adds up the sums; each
stage scales its own, as `optax.clip_by_global_norm` would for the whole model.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from timelyml.ml.client.slices import Slice
from timelyml.ml.functions import JitFunction, jit
from timelyml.ml.pipeline.tying import without
from timelyml.ml.pipeline.updating import applied, mean_of, specs_of


def mean(
    slice_: Slice,
    borrowed: set[int],
    params: Any,
    summed: Callable[[Any], Any],
    *,
    keeps_given: bool,
) -> JitFunction:
    """Return `(given, count) -> (mean, squares)` of one stage.

    Arguments are those of `updating.update`. The mean has no leaves where weights are
    borrowed; `squares` is a scalar, the sum over its leaves.
    """
    specs = without(specs_of(params), borrowed)

    def mean(given: Any, count: Any) -> tuple[Any, Any]:
        found = mean_of(summed(given), count, borrowed)
        squares = [jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(found)]
        return found, functools.reduce(operator.add, squares, jnp.float32(0))

    donated = () if keeps_given else (0,)
    function: JitFunction = jit(
        mean, slice=slice_, donate_argnums=donated, out_shardings=(specs, None)
    )
    return function


def norm(slice_: Slice) -> JitFunction:
    """Return the function of sums of squares that gives the norm over all of them."""

    def norm(squares: Sequence[Any]) -> Any:
        return jnp.sqrt(functools.reduce(operator.add, squares))

    function: JitFunction = jit(norm, slice=slice_)
    return function


def clipped_update(
    slice_: Slice,
    optimiser: optax.GradientTransformation,
    borrowed: set[int],
    params: Any,
    limit: float,
) -> JitFunction:
    """Return the function that ends a step of one stage, given the norm over all.

    `(params, state, mean, norm) -> (params, state, zeros)`. All but the norm are
    destroyed.
    """
    specs = specs_of(params)

    def end(params: Any, state: Any, mean: Any, norm: Any) -> tuple[Any, Any, Any]:
        def scaled(leaf: Any) -> Any:
            shorter = leaf / norm.astype(leaf.dtype) * limit
            return jnp.where(norm < limit, leaf, shorter)

        return applied(optimiser, borrowed, params, state, jax.tree.map(scaled, mean))

    end.__name__ = end.__qualname__ = "update"
    function: JitFunction = jit(
        end, slice=slice_, donate_argnums=(0, 1, 2), out_shardings=(specs, None, specs)
    )
    return function
