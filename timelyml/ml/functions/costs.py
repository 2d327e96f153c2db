"""What a traced function costs, roughly and always the same: operations on elements.

Decisions that change results, such as what is fused, must not depend on measurements:
they would differ from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr


def flops_of(jaxpr: ClosedJaxpr) -> int:
    """Return about how many operations on elements a function takes.

    Matrix products and convolutions count their multiplications and additions, all
    else its largest operand or result; a loop of unknown length counts once.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
    >>> flops_of(jax.jit(jnp.dot).trace(x, x).jaxpr)
    1024
    """
    return _of_jaxpr(jaxpr.jaxpr)


def _of_jaxpr(jaxpr: Jaxpr) -> int:
    return sum(map(_of_equation, jaxpr.eqns))


def _of_equation(eqn: Any) -> int:
    inner = [_of_jaxpr(each) for each in _inner(eqn.params.values())]
    if inner:
        if eqn.primitive.name == "cond":
            return max(inner)
        return sum(inner) * int(eqn.params.get("length", 1))
    result: int = max((_size(var) for var in eqn.outvars), default=0)
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape: tuple[int, ...] = eqn.invars[0].aval.shape
        return 2 * result * math.prod(int(shape[dim]) for dim in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        kernel: tuple[int, ...] = eqn.invars[1].aval.shape
        out_features: int = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * result * math.prod(kernel) // out_features
    return max([result, *(_size(var) for var in eqn.invars)])


def _inner(values: Iterable[Any]) -> Iterable[Jaxpr]:
    for value in values:
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
        elif isinstance(value, tuple):
            yield from _inner(value)


def _size(var: Any) -> int:
    return math.prod(getattr(var.aval, "shape", ()))
