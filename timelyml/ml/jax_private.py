"""All that is taken from JAX beyond its public interface, each with the reason.

A new version of JAX that breaks something breaks it here. What is public, and what is
ours, stands elsewhere; this module only hides names that JAX does not promise.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import export
from jax._src import callback, checkify, debugging, source_info_util
from jax._src.core import (
    ClosedJaxpr,
    Jaxpr,
    Primitive,
    ShapedArray,
    no_effects,
)
from jax._src.interpreters import mlir
from jax._src.named_sharding import UNSPECIFIED
from jax.extend.core import jaxpr_as_fun, subjaxprs
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import sdy, stablehlo

__all__ = [
    "UNSPECIFIED",
    "ShapedArray",
    "calls_host",
    "check_outputs",
    "exported_of",
    "fingerprint",
    "flat_function",
    "has_checks",
    "ignore_layouts",
    "propagated_shardings",
    "user_frame",
    "with_callbacks",
]

# `UNSPECIFIED` is how jit says "left open" of one leaf of a tree of shardings: None has
# another meaning there under a mesh. `ShapedArray` is what `jax.typeof` returns, with
# the weak types and key types that are needed to rebuild an `Exported`.

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

_PROPAGATE = "builtin.module(sdy-propagation-pipeline)"
_STRIP = "builtin.module(strip-debuginfo)"


def exported_of(
    *,
    name: str,
    module: bytes,
    calling_convention: int,
    in_avals: Sequence[ShapedArray],
    out_avals: Sequence[ShapedArray],
    in_shardings: Sequence[Any],
    out_shardings: Sequence[Any],
    platform: str,
    num_devices: int,
) -> export.Exported:
    """Rebuild an exported function of flat arguments and a flat tuple of outputs.

    Its own `serialize` needs the package flatbuffers and cannot name every type.
    """
    return export.Exported(
        fun_name=name,
        in_tree=jax.tree.structure((tuple(in_avals), {})),
        in_avals=tuple(in_avals),
        out_tree=jax.tree.structure(tuple(out_avals)),
        out_avals=tuple(out_avals),
        _has_named_shardings=True,
        _in_named_shardings=tuple(in_shardings),
        _out_named_shardings=tuple(out_shardings),
        in_shardings_hlo=(None,) * len(in_avals),
        out_shardings_hlo=(None,) * len(out_avals),
        nr_devices=num_devices,
        platforms=(platform,),
        ordered_effects=(),
        unordered_effects=(),
        disabled_safety_checks=(),
        mlir_module_serialized=module,
        calling_convention_version=calling_convention,
        module_kept_var_idx=tuple(range(len(in_avals))),
        uses_global_constants=False,
        _get_vjp=None,
    )


def propagated_shardings(
    module: bytes,
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Return how XLA would shard the arguments and results of an exported module.

    Runs the passes of Shardy that XLA runs when it compiles, but without devices.
    JAX tells of the shardings that XLA chose only after it has compiled.

    Returns:
        For each argument that the module takes, and each result, its axes by
        dimension: None, a name, or a tuple of names.
    """
    with mlir.make_ir_context() as context:
        parsed = stablehlo.deserialize_portable_artifact(context, module)
        passmanager.PassManager.parse(_PROPAGATE).run(parsed.operation)
        main = ir.SymbolTable(parsed.operation)["main"]
        return (
            [_axes(each) for each in _attributes(main, "arg_attrs", 0)],
            [_axes(each) for each in _attributes(main, "res_attrs", 1)],
        )


def fingerprint(module: bytes) -> bytes:
    """Return the exported module without the lines it came from, for a digest."""
    with mlir.make_ir_context() as context:
        parsed = stablehlo.deserialize_portable_artifact(context, module)
        passmanager.PassManager.parse(_STRIP).run(parsed.operation)
        file = io.BytesIO()
        parsed.operation.write_bytecode(file)
        return file.getvalue()


def calls_host(jaxpr: ClosedJaxpr) -> bool:
    """Whether a traced function calls Python on the host while it runs."""
    return any(each in _CALLBACKS for each in _primitives(jaxpr.jaxpr))


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


def ignore_layouts(compiled: Any) -> None:
    """Let a compiled function take arguments without a look at their layouts.

    Of elements smaller than a byte arrays say another layout than XLA does, though both
    give each a byte on CPUs; `jax.jit` calls what it compiled without comparing them,
    and what was compiled ahead of time refuses all such arguments.
    """
    executable = compiled._executable  # noqa: SLF001 - the check has no option
    layouts = executable._xla_in_layouts  # noqa: SLF001 - as above
    executable._xla_in_layouts = [None] * len(layouts)  # noqa: SLF001 - as above


def with_callbacks(
    jaxpr: ClosedJaxpr,
    wrap: Callable[[Callable[..., Any], tuple[ShapedArray, ...]], Callable[..., Any]],
) -> ClosedJaxpr:
    """Return a traced function with other callbacks in the place of its own.

    Args:
        jaxpr: The function.
        wrap: Takes a callback of flat arguments, and the types of what it has to return.
    """

    def wrapped(eqn: Any) -> Any:
        own = eqn.params.get("callback")
        if own is None:  # of debug.print, which calls nothing of the user's
            return eqn
        avals = tuple(var.aval for var in eqn.outvars)
        return eqn.replace(params={**eqn.params, "callback": wrap(own, avals)})

    return ClosedJaxpr(_replaced(jaxpr.jaxpr, wrapped), jaxpr.consts)


def has_checks(jaxpr: ClosedJaxpr) -> bool:
    """Whether `checkify.check` was called and nobody made values of the checks."""
    return any(isinstance(each, checkify.ErrorEffect) for each in jaxpr.effects)


def check_outputs(
    tree: Any, first: int
) -> Iterator[tuple[int, int, list[int], dict[int, tuple[str, tuple[str, ...], Any]]]]:
    """Take apart what `checkify.checkify` returned beside the results.

    Args:
        tree: The structure of its `Error`.
        first: Position of its first leaf among all outputs.

    Returns:
        For each kind of check the positions of its bool, its code and its values, and
        for each code the template of its message, names of keyword arguments, and
        traceback.
    """
    error = jax.tree.unflatten(tree, range(first, first + tree.num_leaves))
    messages = {}
    for code, structure in error._metadata.items():  # noqa: SLF001 - has no accessors
        count = structure.num_leaves
        found = jax.tree.unflatten(structure, [_Blank(i) for i in range(count)])
        names: tuple[str, ...] = ()
        template = (
            str(found) if not isinstance(found, checkify.FailedCheckError) else ""
        )
        if isinstance(found, checkify.FailedCheckError):
            template, names = found.fmt_string, tuple(sorted(found.kwargs))
        messages[int(code)] = template, names, found.traceback_info
    for effect, failed in error._pred.items():  # noqa: SLF001 - as above
        payload = jax.tree.leaves(error._payload[effect])  # noqa: SLF001 - as above
        yield failed, error._code[effect], payload, messages  # noqa: SLF001 - as above


def user_frame(traceback: Any) -> tuple[str, int, str] | None:
    """Return file, line and function of the user in a traceback that JAX kept."""
    frame = source_info_util.user_frame(traceback)
    if frame is None:
        return None
    return frame.file_name, frame.start_line, frame.function_name


class _Blank:
    """Stands in a message for a value that only the device knows."""

    def __init__(self, position: int) -> None:
        self._position = position

    def __getitem__(self, index: int) -> str:
        return f"{{{self._position}[{index}]}}"

    def __str__(self) -> str:
        return f"{{{self._position}}}"


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
    if isinstance(value, tuple):
        return tuple([_replaced_in(each, replace) for each in value])
    return value


def _kept(effects: Any) -> Any:
    return frozenset(each for each in effects if not isinstance(each, _EFFECTS))


def _primitives(jaxpr: Jaxpr) -> Iterator[Primitive]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive
    for inner in subjaxprs(jaxpr):
        yield from _primitives(inner)


def _attributes(main: Any, name: str, kind: int) -> list[Any]:
    """The attributes of each argument (kind 0) or result (kind 1) of a function."""
    types = main.type.inputs if kind == 0 else main.type.results
    given = main.attributes.get(name)
    return [ir.DictAttr(given[i]) if given else {} for i in range(len(types))]


def _axes(attributes: Any) -> tuple[Any, ...]:
    if "sdy.sharding" not in attributes:
        return ()
    dims = []
    for raw in sdy.TensorShardingAttr(attributes["sdy.sharding"]).dimension_shardings:
        refs = [sdy.AxisRefAttr(each) for each in sdy.DimensionShardingAttr(raw).axes]
        # A part of an axis has no name in a PartitionSpec; such a dimension stays whole.
        is_whole = all(ref.sub_axis_info is None for ref in refs)
        names = tuple(ref.name for ref in refs) if is_whole else ()
        dims.append(names[0] if len(names) == 1 else names or None)
    return tuple(dims)
