"""All that is taken from JAX beyond its public interface, each with the reason.

A new version of JAX that breaks something breaks it here. What is public, and what is
ours, stands elsewhere; this module only hides names that JAX does not promise.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import export
from jax._src import checkify, source_info_util
from jax._src.core import ClosedJaxpr, ShapedArray
from jax._src.interpreters import mlir
from jax._src.interpreters.pxla import ExecuteReplicated
from jax._src.named_sharding import UNSPECIFIED
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import sdy, stablehlo

__all__ = [
    "UNSPECIFIED",
    "ShapedArray",
    "check_outputs",
    "exported_of",
    "fingerprint",
    "has_checks",
    "ignore_layouts",
    "is_ready",
    "propagated_shardings",
    "quick_launch",
    "scopes_of",
    "user_frame",
]

# `UNSPECIFIED` is how jit says "left open" of one leaf of a tree of shardings: None has
# another meaning there under a mesh. `ShapedArray` is what `jax.typeof` returns, with
# the weak types and key types that are needed to rebuild an `Exported`.

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


def ignore_layouts(compiled: Any) -> None:
    """Let a compiled function take arguments without a look at their layouts.

    Of elements smaller than a byte arrays say another layout than XLA does, though both
    give each a byte on CPUs; `jax.jit` calls what it compiled without comparing them,
    and what was compiled ahead of time refuses all such arguments.
    """
    executable = compiled._executable  # noqa: SLF001 - the check has no option
    layouts = executable._xla_in_layouts  # noqa: SLF001 - as above
    executable._xla_in_layouts = [None] * len(layouts)  # noqa: SLF001 - as above


def is_ready(array: Any) -> bool:
    """Whether an array, perhaps of typed keys, is computed; those have no such method."""
    return bool(getattr(array, "_base_array", array).is_ready())


def quick_launch(
    compiled: Any, num_arguments: int
) -> tuple[Callable[[list[jax.Array]], Any], Any] | None:
    """Return what launches a compiled function of arrays that lie as it wants them.

    That is a function and what its result is to `consume_with_handlers`, which returns
    the outputs. They take half as long as a call of the compiled function, which first
    looks at trees and shardings. None where a launch is more than that: with effects,
    callbacks, state, or arguments that are not used.
    """
    found = compiled._executable.unsafe_call  # noqa: SLF001 - nothing public launches
    is_plain = (
        isinstance(found, ExecuteReplicated)
        and not (found.ordered_effects or found.has_unordered_effects)
        and not (found.has_host_callbacks or found.mut)
        and found.kept_var_idx == set(range(num_arguments))
    )
    if not is_plain:
        return None
    return found.xla_executable.execute_sharded, found.out_handler.handlers


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


def scopes_of(eqn: Any) -> tuple[str, ...]:
    """Return the names of `jax.named_scope`s that an equation is in, outermost first."""
    stack = eqn.source_info.name_stack.stack
    return tuple(e.name for e in stack if isinstance(e, source_info_util.Scope))


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
