"""A stage's derivative as functions that a schedule can run apart from each other.

The forward pass hands on what the backward pass reads. The backward pass is cut at the
gradient for the stage below: the *input part* is what that gradient needs and no more,
the *weight part* is the rest. Every equation stands in one of them, so that together
they do the work of the whole, and neither repeats any of the forward pass.

Residuals that are weights or inputs go by reference. What follows from weights alone
without a product, such as a transposed matrix, is written out where it is used: kept
for each microbatch it would be a copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Var

from timelyml.ml.pipeline.dependence import Dependence, variables
from timelyml.ml.pipeline.flattening import evaluate, flattened, traced


@dataclass(frozen=True, slots=True)
class Split:
    """A stage's derivative in parts, each a traced function of flat arguments.

    `params`, `x` and `extra` are the flat arguments of the stage, `given` is those that
    whoever runs it keeps: all, or all but `x`. Gradients are of `params`, one each.

    Attributes:
        num_results: How many of the results of `forward` are the stage's own.
        forward: `(*params, *x, *extra) -> (*results, *saved)`.
        backward: `(*given, *saved, *dy) -> (*dx, *gradients)`; `dy` is for the floating
            results in order, `dx` for the floating inputs.
        input_part: `(*given, *saved, *dy) -> (*dx, *carried)`.
        weight_part: `(*given, *saved, *carried) -> gradients`.
        kept: Positions in `saved` of what the weight part still reads.
        num_dx: How many inputs have a gradient.
    """

    num_results: int
    forward: ClosedJaxpr
    backward: ClosedJaxpr
    input_part: ClosedJaxpr
    weight_part: ClosedJaxpr
    kept: tuple[int, ...]
    num_dx: int


def split(
    stage: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]],
    params: Sequence[Any],
    x: Sequence[Any],
    extra: Sequence[Any] = (),
    *,
    is_input_kept: bool = False,
    num_differentiated: int | None = None,
) -> Split:
    """Differentiate a stage and cut the result.

    Args:
        stage: Pure function of three flat lists, with a flat list of results.
        params: Types of the weights, all floating.
        x: Types of the input from the stage below; what is not floating has no
            gradient, and nothing goes back for it.
        extra: Types of what else it reads, such as targets.
        is_input_kept: Whether whoever runs it keeps `x` until the end; if not, `saved`
            holds what is needed of it.
        num_differentiated: How many of the results, from the first on, have a
            cotangent; all floating ones unless given.
    """
    forward, pullback = _differentiated(stage, params, x, extra, num_differentiated)
    arguments = forward.jaxpr.invars
    num_results = len(forward.out_avals) - pullback.num_residuals
    results = forward.jaxpr.outvars[:num_results]
    residuals = forward.jaxpr.outvars[num_results:]
    moving = () if is_input_kept else arguments[len(params) : len(params) + len(x)]
    given = [var for var in arguments if var not in moving]
    dependence = Dependence(forward)
    known = {*given, *forward.jaxpr.constvars}
    known |= dependence.following_freely(arguments[: len(params)])
    saved = list(dict.fromkeys(v for v in variables(residuals) if v not in known))
    whole = _whole_backward(dependence, [*given, *saved], residuals, pullback)
    first, second, kept = _halves(whole, len(params), len(given), pullback)
    return Split(
        num_results=num_results,
        forward=dependence.cut(arguments, [*results, *saved]),
        backward=whole,
        input_part=first,
        weight_part=second,
        kept=kept,
        num_dx=pullback.num_dx,
    )


@dataclass(frozen=True, slots=True)
class _Pullback:
    """`(*residuals, *dy) -> (*dx, *gradients)`, flattened."""

    jaxpr: ClosedJaxpr
    num_residuals: int
    num_dx: int

    @property
    def cotangents(self) -> Sequence[Any]:
        """Types of `dy`."""
        avals: Sequence[Any] = self.jaxpr.in_avals
        return avals[self.num_residuals :]

    @property
    def num_dy(self) -> int:
        """How many of them there are."""
        return len(self.cotangents)


def _differentiated(
    stage: Callable[..., Sequence[Any]],
    params: Sequence[Any],
    x: Sequence[Any],
    extra: Sequence[Any],
    num_differentiated: int | None,
) -> tuple[ClosedJaxpr, _Pullback]:
    floating = [i for i, each in enumerate(x) if _is_floating(each)]
    shape: dict[str, Any] = {}

    def forward(*flat: Any) -> list[Any]:
        weights = flat[: len(params)]
        inputs = list(flat[len(params) : len(params) + len(x)])
        others = flat[len(params) + len(x) :]

        def run(weights: Sequence[Any], moving: Sequence[Any]) -> Any:
            for position, value in zip(floating, moving, strict=True):
                inputs[position] = value
            results = list(stage(weights, list(inputs), others))
            limit = len(results) if num_differentiated is None else num_differentiated
            chosen = [i for i, r in enumerate(results[:limit]) if _is_floating(r)]
            return [results[i] for i in chosen], results

        outs, pull, results = jax.vjp(
            run, weights, [inputs[i] for i in floating], has_aux=True
        )
        leaves, shape["tree"] = jax.tree.flatten(pull)
        shape["outs"] = [jax.typeof(each) for each in outs]
        shape["residuals"] = len(leaves)
        return [*results, *leaves]

    whole = traced(forward, (*params, *x, *extra))
    residuals = whole.out_avals[len(whole.out_avals) - shape["residuals"] :]

    def backward(*flat: Any) -> list[Any]:
        pull = jax.tree.unflatten(shape["tree"], flat[: shape["residuals"]])
        gradients, dx = pull(list(flat[shape["residuals"] :]))
        return [*dx, *gradients]

    jaxpr = flattened(traced(backward, (*residuals, *shape["outs"])))
    return flattened(whole), _Pullback(jaxpr, shape["residuals"], len(floating))


def _is_floating(value: Any) -> bool:
    return bool(jax.numpy.issubdtype(value.dtype, jax.numpy.inexact))


def _whole_backward(
    forward: Dependence,
    known: Sequence[Var],
    residuals: Sequence[Any],
    pullback: _Pullback,
) -> ClosedJaxpr:
    """Return the backward pass of what the stage was given and what it saved."""
    rest = forward.cut(known, residuals)

    def run(*flat: Any) -> list[Any]:
        read = evaluate(rest, flat[: len(known)])
        return evaluate(pullback.jaxpr, [*read, *flat[len(known) :]])

    return flattened(traced(run, (*rest.in_avals, *pullback.cotangents)))


def _halves(
    whole: ClosedJaxpr, num_params: int, num_given: int, pullback: _Pullback
) -> tuple[ClosedJaxpr, ClosedJaxpr, tuple[int, ...]]:
    """Cut the backward pass at the gradients of the input."""
    dependence = Dependence(whole)
    invars = whole.jaxpr.invars
    given = invars[: len(invars) - pullback.num_dy]
    dx = whole.jaxpr.outvars[: pullback.num_dx]
    gradients = whole.jaxpr.outvars[pullback.num_dx :]
    # Without an input to differentiate, the way to the weights furthest from the loss
    # takes its place: the rest can wait as well as elsewhere.
    targets = variables(dx) or dependence.furthest(variables(gradients))
    free = dependence.following_freely(invars[:num_params])
    early = dependence.made_for(targets) - free
    carried = dependence.read_by(gradients, known={*given, *free}, until=early)
    second = dependence.cut([*given, *carried], gradients)
    read = Dependence(second).leaves(second.jaxpr.outvars)
    saved = second.jaxpr.invars[num_given : len(given)]
    return (
        dependence.cut(invars, [*dx, *carried]),
        second,
        tuple(i for i, var in enumerate(saved) if var in read),
    )
