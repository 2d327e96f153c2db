"""Traced functions without calls inside: every equation stands by itself.

What is inside a nested `jit`, or in the body of a loop, can only be taken or left whole.
Before a backward pass is cut in two, its calls are written out and its loops unrolled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import (
    ClosedJaxpr,
    DebugInfo,
    DropVar,
    Jaxpr,
    Literal,
    Var,
    jaxpr_as_fun,
)

MAX_UNROLLED = 64
"""Iterations up to which a `scan` is unrolled; a longer one stays whole."""

UNNAMED = DebugInfo("timelyml.pipeline", "part of a stage", None, None)
"""What parts of functions say of themselves: their arguments have no names."""

_CALLS = {
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
    "remat2": "jaxpr",
}
"""Primitives that only call, and the parameter that holds what they call."""

_PRODUCTS = ("dot_general", "conv_general_dilated")


def flattened(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Return the same function with calls written out and short loops unrolled.

    >>> import jax.numpy as jnp
    >>> call = jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(x) + 1)(1.0)
    >>> [eqn.primitive.name for eqn in flattened(call).eqns]
    ['sin', 'add']
    """
    return traced(functools.partial(_evaluate, jaxpr), jaxpr.in_avals)


def traced(function: Callable[..., Sequence[Any]], avals: Iterable[Any]) -> ClosedJaxpr:
    """Trace a function of flat arguments and with flat results."""
    arguments = [
        jax.ShapeDtypeStruct(each.shape, each.dtype, weak_type=each.weak_type)  # type: ignore[no-untyped-call]  # JAX is typed in part
        for each in avals
    ]
    return jax.make_jaxpr(lambda *flat: list(function(*flat)))(*arguments)


def num_products(eqns: Iterable[Any]) -> int:
    """Count products of matrices and convolutions, those in loops every time.

    >>> import jax.numpy as jnp
    >>> square = jnp.ones((2, 2))
    >>> num_products(jax.make_jaxpr(lambda x: x @ x @ x)(square).eqns)
    2
    """
    total = 0
    for eqn in eqns:
        total += eqn.primitive.name in _PRODUCTS
        inner = sum(
            num_products(each.eqns) for each in inner_functions(eqn.params.values())
        )
        total += inner * int(eqn.params.get("length", 1) or 1)
    return total


def evaluate(jaxpr: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
    """Compute what a traced function of flat arguments returns."""
    return list(jaxpr_as_fun(jaxpr)(*arguments))


def inner_functions(values: Iterable[Any]) -> Iterable[ClosedJaxpr | Jaxpr]:
    """Return the functions among the parameters of an equation."""
    for value in values:
        if isinstance(value, (ClosedJaxpr, Jaxpr)):
            yield value
        elif isinstance(value, tuple):
            yield from inner_functions(value)


def interpreted(
    jaxpr: ClosedJaxpr | Jaxpr,
    arguments: Sequence[Any],
    apply: Callable[[Jaxpr, Any, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Evaluate a function one equation after the other.

    Args:
        jaxpr: A function; one that is not closed has no constants.
        arguments: Flat.
        apply: Returns the results of an equation, given what that is part of, the
            equation, and its arguments.
    """
    closed = jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())
    inner = closed.jaxpr
    values: dict[Var, Any] = dict(zip(inner.constvars, closed.consts, strict=True))
    values.update(zip(inner.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in inner.eqns:
        results = apply(inner, eqn, [read(each) for each in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(each) for each in inner.outvars]


def _evaluate(jaxpr: ClosedJaxpr | Jaxpr, *arguments: Any) -> list[Any]:
    """Interpret a function, going into calls and loops."""
    return interpreted(jaxpr, arguments, _apply)


def _apply(jaxpr: Jaxpr, eqn: Any, arguments: list[Any]) -> Sequence[Any]:
    name = eqn.primitive.name
    if name in _CALLS:
        return _evaluate(eqn.params[_CALLS[name]], *arguments)
    if name == "scan" and eqn.params["length"] <= MAX_UNROLLED:
        return unrolled(eqn.params, arguments, _evaluate)
    return alone(jaxpr, eqn, arguments)


def alone(jaxpr: Jaxpr, eqn: Any, arguments: Sequence[Any]) -> list[Any]:
    """Run one equation, under the settings that it was traced with."""
    places = [i for i, v in enumerate(eqn.invars) if not isinstance(v, Literal)]
    first = {eqn.invars[i]: i for i in reversed(places)}  # a variable may come twice
    wanted = [var for var in eqn.outvars if not isinstance(var, DropVar)]
    only: Jaxpr = jaxpr.replace(  # type: ignore[no-untyped-call]  # JAX is typed in part
        constvars=[],
        invars=list(first),
        outvars=wanted,
        eqns=[eqn],
        effects=eqn.effects,
        debug_info=UNNAMED,
    )
    given = [arguments[i] for i in first.values()]
    results = iter(evaluate(ClosedJaxpr(only, []), given))
    return [None if isinstance(v, DropVar) else next(results) for v in eqn.outvars]


def unrolled(
    params: dict[str, Any], arguments: list[Any], run: Callable[..., list[Any]]
) -> list[Any]:
    """Run the body of a `scan` once for each iteration, by `run(body, *arguments)`."""
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    length, body = params["length"], params["jaxpr"]
    consts = arguments[:num_consts]
    carry = arguments[num_consts : num_consts + num_carry]
    stacked = arguments[num_consts + num_carry :]
    rows: dict[int, list[Any]] = {}
    order = range(length - 1, -1, -1) if params["reverse"] else range(length)
    for index in order:
        here = [jax.lax.index_in_dim(each, index, keepdims=False) for each in stacked]
        results = run(body, *consts, *carry, *here)
        carry, rows[index] = results[:num_carry], results[num_carry:]
    if not length:
        avals = body.out_avals[num_carry:]
        return carry + [jax.numpy.empty((0, *a.shape), a.dtype) for a in avals]
    columns = zip(*(rows[index] for index in range(length)), strict=True)
    return carry + [jax.numpy.stack(each) for each in columns]
