"""What one shard of a function computes, where shards have nothing to do with each other.

Such a function can be launched device by device, and where an operand says that there
is nothing to do, not at all. Both are found out by looking at it, so that a derivative
of such a function is as good as the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun, subjaxprs

from timelyml.ml.functions.computation import ArrayType, LogicalMesh, Spec
from timelyml.ml.functions.specs import spec_of
from timelyml.ml.functions.types import type_of

ONE_DEVICE = LogicalMesh(("shard",), (1,))
"""Where a shard is launched by itself."""


@dataclass(frozen=True, slots=True)
class Shard:
    """What each shard of a function computes by itself.

    Attributes:
        function: Of its parts of the operands; returns its parts of the results.
        types: Of its parts of the operands.
        in_specs: How these lie over the mesh.
        out_specs: How its parts of the results do.
        idle: The operand, one integer on each shard, that is zero only where all
            results are zeros.
    """

    function: Callable[..., Any]
    types: tuple[ArrayType, ...]
    in_specs: tuple[Spec, ...]
    out_specs: tuple[Spec, ...]
    idle: int


def shard_of(closed: ClosedJaxpr) -> Shard | None:
    """Return what each shard of a function computes; None if it needs the others.

    It needs them if it is more than one `jax.shard_map`, has a collective in it, asks
    which shard it is, or does more than compute; or if no operand says when a shard has
    nothing to do.
    """
    outer = closed.jaxpr
    eqn = outer.eqns[0] if len(outer.eqns) == 1 else None
    if eqn is None or eqn.primitive.name != "shard_map":
        return None
    inner: Jaxpr = eqn.params["jaxpr"]
    results, given = list(eqn.outvars), list(eqn.invars)
    is_whole = all(x in given for x in outer.invars) and all(
        isinstance(x, Var) and x in results for x in outer.outvars
    )
    idle = next(_idle_operands(inner, given, outer.invars), None)
    if not is_whole or idle is None or _has_effects(inner):
        return None
    constants = dict(zip(outer.constvars, closed.consts, strict=True))

    def function(*parts: Any) -> Any:
        known = {**constants, **dict(zip(outer.invars, parts, strict=True))}
        values = [x.val if isinstance(x, Literal) else known[x] for x in given]
        found = jaxpr_as_fun(ClosedJaxpr(inner, ()))(*values)
        return tuple(found[results.index(x)] for x in outer.outvars)

    operands = [given.index(x) for x in outer.invars]
    specs_in, specs_out = eqn.params["in_specs"], eqn.params["out_specs"]
    return Shard(
        function,
        tuple(type_of(inner.invars[i].aval) for i in operands),
        tuple(spec_of(specs_in[i]) for i in operands),
        tuple(spec_of(specs_out[results.index(x)]) for x in outer.outvars),
        operands.index(idle),
    )


def has_collectives(jaxpr: Jaxpr) -> bool:
    """Whether shards wait for each other in it; asking which one it is needs no wait."""
    own = (x.effects for x in jaxpr.eqns if x.primitive.name != "axis_index")
    return any(map(_names_an_axis, own)) or any(map(has_collectives, subjaxprs(jaxpr)))


def _names_an_axis(effects: Iterable[Any]) -> bool:
    return any(type(each).__name__ == "NamedAxisEffect" for each in effects)


def _has_effects(jaxpr: Jaxpr) -> bool:
    """Whether it, or anything in it, names an axis or does more than compute."""
    return bool(jaxpr.effects) or any(map(_has_effects, subjaxprs(jaxpr)))


def _idle_operands(
    inner: Jaxpr, given: Sequence[Any], operands: Sequence[Any]
) -> Iterator[int]:
    """Return which of what is given are operands that say when nothing is to be done."""
    for position, var in enumerate(inner.invars):
        is_count = str(type_of(var.aval)) in ("int32[1]", "int64[1]")
        is_operand = given[position] in operands
        if is_count and is_operand and _is_all_zeros(inner, position):
            yield position


def _is_all_zeros(jaxpr: Jaxpr, idle: int) -> bool:
    """Whether all results are zeros where an operand is zero."""
    are_zero = [position == idle for position in range(len(jaxpr.invars))]
    return all(_zeros_of(jaxpr, are_zero))


def _zeros_of(jaxpr: Jaxpr, are_zero: Sequence[bool]) -> list[bool]:
    """Say which results are sure to be zeros, by which operands are."""
    zeros = {
        var for var, is_zero in zip(jaxpr.invars, are_zero, strict=True) if is_zero
    }

    def is_zero(atom: Any) -> bool:
        if isinstance(atom, Literal):
            return not np.any(np.asarray(atom.val))
        return atom in zeros

    for eqn in jaxpr.eqns:
        given = list(map(is_zero, eqn.invars))
        found = zip(eqn.outvars, _outcome(eqn, given), strict=True)
        zeros.update(var for var, is_zero_ in found if is_zero_)
    return list(map(is_zero, jaxpr.outvars))


_KEEPING = frozenset(
    (
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "gt",
        "reshape",
        "slice",
        "squeeze",
        "transpose",
    )
)
"""What makes zeros of zeros alone: of two of them neither is greater."""


_ANYTHING = frozenset(("empty", "empty2"))
"""What may be anything, as nobody reads it: then it may be zeros too."""


def _outcome(eqn: Any, given: Sequence[bool]) -> list[bool]:
    """Say which results of an equation are sure to be zeros, by which operands are."""
    name, params = eqn.primitive.name, eqn.params
    if name in _KEEPING:
        return [all(given)]
    if name in ("clamp", "select_n"):  # the least, or which: then what it is of
        return [given[0] and given[1]]
    if name in _ANYTHING:
        return [True]
    if name == "cond" and given[0]:
        return _zeros_of(params["branches"][0].jaxpr, given[1:])
    if name in ("jit", "pjit"):
        return _zeros_of(params["jaxpr"].jaxpr, given)
    return [False] * len(eqn.outvars)
