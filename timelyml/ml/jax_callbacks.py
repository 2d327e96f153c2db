"""Traced functions that call Python on the host: how they are told, and rewritten.

As `jax_private`, it takes names from JAX that JAX does not promise: the primitives of
callbacks, and the parameters of those that functions are passed to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax._src import callback, debugging
from jax._src.core import (
    ClosedJaxpr,
    Jaxpr,
    Primitive,
    ShapedArray,
    Var,
    no_effects,
)
from jax._src.interpreters import mlir
from jax._src.named_sharding import UNSPECIFIED
from jax.extend.core import jaxpr_as_fun, subjaxprs
from jax.sharding import PartitionSpec

__all__ = ["call_under", "calls_host", "flat_function", "with_callbacks"]

Wrap: TypeAlias = Callable[
    [Callable[..., Any], tuple[ShapedArray, ...], bool], Callable[..., Any]
]

_CALLBACKS = (
    callback.pure_callback_p,
    callback.io_callback_p,
    debugging.debug_callback_p,
    debugging.debug_print_p,
)
"""What calls Python on the host. The primitives are not public, and nothing else tells
that a function cannot be exported before `export` fails."""

_EFFECTS = (
    debugging.DebugEffect,
    debugging.OrderedDebugEffect,
    callback.IOEffect,
    callback.OrderedIOEffect,
)


def calls_host(jaxpr: ClosedJaxpr | Jaxpr) -> bool:
    """Whether a traced function calls Python on the host while it runs."""
    inner = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    return any(each in _CALLBACKS for each in _primitives(inner))


def flat_function(
    jaxpr: ClosedJaxpr, *, has_callbacks: bool = True
) -> Callable[..., tuple[Any, ...]]:
    """Return a traced function, of flat arguments and with flat results.

    Args:
        jaxpr: The function.
        has_callbacks: If not, it has zeros where callbacks return. With callbacks it
            could not be lowered for a mesh without devices.
    """
    if not has_callbacks:
        jaxpr = ClosedJaxpr(_replaced(jaxpr.jaxpr, _silent), jaxpr.consts)
    flat = jaxpr_as_fun(jaxpr)

    def call(*arrays: Any) -> tuple[Any, ...]:
        return tuple(flat(*arrays))

    return call


def call_under(
    lowered: jax.stages.Lowered, context: Callable[[], AbstractContextManager[None]]
) -> None:
    """Have a lowered function call the host under settings of JAX, which are a thread's.

    XLA has threads of its own for callbacks. JAX would cut 64-bit elements there, also
    on their way to the user's code and from it.

    Args:
        lowered: The function, not compiled yet.
        context: Returns what to call each callback in.
    """

    def wrapped(callback: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with context():
                return callback(*args)

        return call

    given = lowered._lowering.compile_args  # noqa: SLF001  not in its interface
    given["host_callbacks"] = list(map(wrapped, given["host_callbacks"]))


def with_callbacks(
    jaxpr: ClosedJaxpr, wrap: Wrap, goes_on: Callable[[Any, Any], Any]
) -> ClosedJaxpr:
    """Return a traced function with other callbacks in the place of its own.

    Args:
        jaxpr: The function; what is returned takes an int32 before its arguments.
        wrap: Takes a callback of flat arguments, the types of what it has to return,
            and whether what replaces it gets that number before its arguments, as it
            does except in rules for derivatives of the user's.
        goes_on: From that number, and from whether a loop of unknown length that calls
            the host would go on, to whether it does. It is not asked within
            `shard_map`, where devices that wait for each other may have other answers.
    """
    return ClosedJaxpr(_numbered(jaxpr.jaxpr, _Wrapping(wrap, goes_on)), jaxpr.consts)


class _Wrapping(NamedTuple):
    wrap: Wrap
    goes_on: Callable[[Any, Any], Any] | None


_stand_in = Primitive("stand_in_for_callback")
_stand_in.multiple_results = True
_stand_in.def_abstract_eval(lambda *_, avals: avals)  # type: ignore[no-untyped-call]  # JAX is typed in part


def _lower_stand_in(context: Any, *_: Any, **__: Any) -> list[Any]:
    return [
        mlir.ir_constant(np.zeros(each.shape, each.dtype)) for each in context.avals_out
    ]


mlir.register_lowering(_stand_in, _lower_stand_in)


def _silent(eqn: Any) -> Any:
    avals = tuple(var.aval for var in eqn.outvars)
    return eqn.replace(primitive=_stand_in, params={"avals": avals}, effects=no_effects)


def _replaced(jaxpr: Jaxpr, replace: Callable[[Any], Any]) -> Jaxpr:
    """Replace all callbacks, and leave only the effects that there are then."""
    keep = _kept if replace is _silent else frozenset
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive in _CALLBACKS:
            eqns.append(replace(eqn))
        else:
            params = {
                name: _replaced_in(value, replace) for name, value in eqn.params.items()
            }
            eqns.append(eqn.replace(params=params, effects=keep(eqn.effects)))
    replaced: Jaxpr = jaxpr.replace(eqns=eqns, effects=keep(jaxpr.effects))  # type: ignore[no-untyped-call]  # JAX is typed in part
    return replaced


def _replaced_in(value: Any, replace: Callable[[Any], Any]) -> Any:
    if isinstance(value, ClosedJaxpr):
        return ClosedJaxpr(_replaced(value.jaxpr, replace), value.consts)
    if isinstance(value, Jaxpr):
        return _replaced(value, replace)
    if type(value) is tuple:  # and no subclass, such as the numbers of a scatter
        return tuple([_replaced_in(each, replace) for each in value])
    return value


def _numbered(jaxpr: Jaxpr, wrap: _Wrapping) -> Jaxpr:
    """Give a function a number as its first argument, which goes to its callbacks."""
    number = Var(ShapedArray((), np.dtype(np.int32)))
    eqns = [_numbered_eqn(eqn, number, wrap) for eqn in jaxpr.eqns]
    info, names = jaxpr.debug_info, jaxpr.debug_info.arg_names
    if names is not None:
        info = info._replace(arg_names=("number", *names))
    numbered: Jaxpr = jaxpr.replace(  # type: ignore[no-untyped-call]  # JAX is typed in part
        invars=[number, *jaxpr.invars], eqns=eqns, debug_info=info
    )
    return numbered


def _numbered_eqn(eqn: Any, number: Any, wrap: _Wrapping) -> Any:
    if eqn.primitive in _CALLBACKS:
        wrapped = _wrapped(eqn, wrap.wrap, is_numbered=True)
        if wrapped is eqn:
            return eqn
        return wrapped.replace(invars=[number, *eqn.invars])
    if eqn.primitive.name == "while":
        return _numbered_while(eqn, number, wrap)
    add = _ONE_ARGUMENT_MORE.get(eqn.primitive.name)
    if add is None or not any(map(_has_callbacks, eqn.params.values())):
        unnumbered = partial(_wrapped, wrap=wrap.wrap, is_numbered=False)
        return eqn.replace(
            params={k: _replaced_in(v, unnumbered) for k, v in eqn.params.items()}
        )
    if eqn.primitive.name == "shard_map":
        wrap = wrap._replace(goes_on=None)
    inner = {
        name: tuple(_closed(each, wrap) for each in value)
        if isinstance(value, tuple)
        else _closed(value, wrap)
        for name, value in eqn.params.items()
        if _has_callbacks(value)
    }
    first = 1 if eqn.primitive.name == "cond" else 0  # after which branch it is
    return eqn.replace(
        invars=[*eqn.invars[:first], number, *eqn.invars[first:]],
        params={**eqn.params, **add(eqn.params), **inner},
    )


def _numbered_while(eqn: Any, number: Any, wrap: _Wrapping) -> Any:
    """Give the number to the condition of a loop that calls the host, and to its body."""
    params, invars = dict(eqn.params), list(eqn.invars)
    parts = (("body", params["cond_nconsts"]), ("cond", 0))
    calling = [part for part, _ in parts if calls_host(params[f"{part}_jaxpr"])]
    for part, first in parts if calling else ():
        params[f"{part}_jaxpr"] = _closed(params[f"{part}_jaxpr"], wrap)
        params[f"{part}_nconsts"] += 1
        invars.insert(first, number)
    if calling and wrap.goes_on is not None:
        ended = _ended(params["cond_jaxpr"].jaxpr, wrap.goes_on, eqn.ctx)
        params["cond_jaxpr"] = ClosedJaxpr(ended, params["cond_jaxpr"].consts)
    return eqn.replace(invars=invars, params=params)


def _ended(cond: Jaxpr, goes_on: Callable[[Any, Any], Any], context: Any) -> Jaxpr:
    """Have the numbered condition of a loop ask whether it goes on."""
    would: Any = cond.outvars[0]
    shape: Any = jax.typeof(np.zeros(would.aval.shape, np.bool_))  # batched by `vmap`
    asked = jax.make_jaxpr(partial(jax.pure_callback, goes_on, shape))(
        np.int32(0), shape
    )
    does = Var(would.aval)
    ask = asked.eqns[0].replace(
        invars=[cond.invars[0], would], outvars=[does], ctx=context
    )
    ended: Jaxpr = cond.replace(eqns=[*cond.eqns, ask], outvars=[does])  # type: ignore[no-untyped-call]  # JAX is typed in part
    return ended


def _wrapped(eqn: Any, wrap: Wrap, *, is_numbered: bool) -> Any:
    own = eqn.params.get("callback")
    if own is None:  # of debug.print, which calls nothing of the user's
        return eqn
    avals = tuple(var.aval for var in eqn.outvars)
    callback = wrap(own, avals, is_numbered)
    return eqn.replace(params={**eqn.params, "callback": callback})


def _closed(jaxpr: Any, wrap: _Wrapping) -> Any:
    """Number an inner function, closed or, as that of `shard_map`, not."""
    if isinstance(jaxpr, Jaxpr):
        return _numbered(jaxpr, wrap)
    return ClosedJaxpr(_numbered(jaxpr.jaxpr, wrap), jaxpr.consts)


def _has_callbacks(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_callbacks, value))
    return isinstance(value, ClosedJaxpr | Jaxpr) and calls_host(value)


_ONE_ARGUMENT_MORE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "cond": lambda _: {},
    "jit": lambda params: {
        "in_shardings": (UNSPECIFIED, *params["in_shardings"]),
        "in_layouts": (None, *params["in_layouts"]),
        "donated_invars": (False, *params["donated_invars"]),
    },
    "scan": lambda params: {
        "num_consts": params["num_consts"] + 1,
        **({"linear": (False, *params["linear"])} if "linear" in params else {}),
    },
    "shard_map": lambda params: {
        "in_specs": (PartitionSpec(), *params["in_specs"]),  # type: ignore[no-untyped-call]  # JAX is typed in part
    },
}
"""What else changes of a primitive that takes one argument more, before all others."""


def _kept(effects: Any) -> Any:
    return frozenset(each for each in effects if not isinstance(each, _EFFECTS))


def _primitives(jaxpr: Jaxpr) -> Iterator[Primitive]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive
    for inner in subjaxprs(jaxpr):
        yield from _primitives(inner)
