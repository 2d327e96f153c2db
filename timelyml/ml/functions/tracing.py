"""Tracing: from a Python function and types of arguments to a `Computation`.

The function is traced for a mesh without devices and exported as StableHLO. Shardings
that the user left open are found by the passes that XLA would run, so that they are
known before anything is compiled, and then fixed. A function that calls the host while
it runs cannot be exported: its code travels, and workers trace it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import export
from jax.sharding import AbstractMesh, use_abstract_mesh

from timelyml.errors import TimelyError
from timelyml.ml import jax_callbacks, jax_private
from timelyml.ml.functions.blame import name_of, trace_error
from timelyml.ml.functions.checks import Checked, checks_of
from timelyml.ml.functions.computation import (
    ArrayType,
    Checks,
    Computation,
    LogicalMesh,
    Settings,
    Spec,
)
from timelyml.ml.functions.costs import flops_of
from timelyml.ml.functions.flat import FlatFunction
from timelyml.ml.functions.options import Arguments, Options, Splitter
from timelyml.ml.functions.settings import applied
from timelyml.ml.functions.shards import ONE_DEVICE, Shard, shard_of
from timelyml.ml.functions.shipped import ship_function
from timelyml.ml.functions.specs import (
    abstract_mesh,
    check_spec,
    fits,
    named_sharding,
    partition_spec,
    spec_of,
    specs_for,
)
from timelyml.ml.functions.types import abstract_array, type_of

# Custom calls that JAX may change from version to version: both sides run the same one.
_ANY_CUSTOM_CALL = export.DisabledSafetyCheck.custom_call("ALL")


@dataclass(frozen=True, slots=True)
class Traced:
    """A computation, and the structures that its user sees.

    Attributes:
        in_tree: Of `(args, kwargs)` without those that are static.
        out_tree: Of the results.
        used: Positions, among the leaves of `in_tree`, of the computation's arguments.
        flat: The Python function, of the computation's arguments.
    """

    computation: Computation
    in_tree: Any
    out_tree: Any
    used: tuple[int, ...]
    flat: FlatFunction


def trace(
    fun: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    mesh: LogicalMesh,
    settings: Settings,
    options: Options | None = None,
    platform: str = "cpu",
) -> Traced:
    """Trace a function once; no device is needed, and none of the mesh has to exist.

    Args:
        fun: As for `jax.jit`. A `checkify.check` in it becomes part of the computation.
        args: Arrays, or what only has their types. A leaf that has a `spec` keeps it
            where the options leave its sharding open.
        kwargs: As `args`, by name.
        mesh: What shardings and `shard_map` speak of; inside, it is the mesh of the
            context, as under `jax.set_mesh`.
        settings: Under which it is traced and will run.
        options: As those of `jax.jit`.
        platform: What it is lowered for: "cpu", "cuda" or "tpu".

    Raises:
        TraceError: The function cannot be traced, lowered or shipped; it names the
            user's line.
        ConfigError: A sharding does not fit the mesh or a shape.
    """
    options = options or Options()
    split = Splitter(fun, options)(tuple(args), kwargs or {})
    try:
        with applied(settings), use_abstract_mesh(abstract_mesh(mesh)):
            attempt = _Attempt(fun, split, mesh, options, platform)
            found = attempt.run(settings)
        return found if attempt.shard is None else _with_shard(found, attempt.shard)
    except TimelyError:
        raise
    except Exception as error:
        raise trace_error(name_of(fun), error) from error


class _Attempt:
    """One tracing, from the arguments to the computation.

    Attributes:
        shard: What each shard computes by itself, if it does, once it was run.
    """

    shard: Shard | None = None

    def __init__(
        self,
        fun: Callable[..., Any],
        split: Arguments,
        mesh: LogicalMesh,
        options: Options,
        platform: str,
    ) -> None:
        self._fun = fun
        self._split = split
        self._logical_mesh = mesh
        self._mesh: AbstractMesh = abstract_mesh(mesh)
        self._options = options
        self._platform = platform
        leaves, self._in_tree = jax.tree.flatten((split.args, split.kwargs))
        self._in_types = tuple(map(type_of, leaves))
        self._name = name_of(fun)
        self._who = f"function {self._name!r}:"
        self._wanted = self._wanted_arguments(leaves)

    def run(self, settings: Settings) -> Traced:
        """Trace, lower, and find the shardings that were left open."""
        fun, traced, checks = self._traced_with_checks()
        out_tree = traced.out_tree if checks is None else traced.out_tree.children()[0]
        wanted = self._wanted_results(out_tree, traced)
        donated = _donated(traced)
        has_callbacks = jax_callbacks.calls_host(traced.jaxpr)
        exported = self._export(traced.jaxpr, wanted, donated, has_callbacks)
        in_specs, out_specs = self._specs(exported, wanted)
        used, code = tuple(exported.module_kept_var_idx), None
        if has_callbacks:
            # What only a callback uses is not seen to be used: zeros stand in for it.
            used = tuple(range(len(self._in_types)))
            code = ship_function(
                self._name, fun, self._split, self._in_tree, traced.out_tree
            )
        found = Computation(
            name=self._name,
            identity="",
            mesh=self._logical_mesh,
            settings=settings,
            platform=self._platform,
            stablehlo=exported.mlir_module_serialized,
            calling_convention=exported.calling_convention_version,
            in_types=tuple(self._in_types[each] for each in used),
            in_specs=tuple(in_specs[each] for each in used),
            out_types=tuple(map(type_of, exported.out_avals)),
            out_specs=out_specs,
            donated=tuple(i for i, each in enumerate(used) if each in donated),
            flops=flops_of(traced.jaxpr),
            checks=checks,
            pickled_code=code,
            deadline_s=self._options.deadline_s,
        )
        if not found.has_effects:
            self.shard = shard_of(traced.jaxpr)
        flat = FlatFunction(
            self._fun,
            self._split.static_args,
            self._split.static_kwargs,
            self._in_tree,
            self._in_types,
            used,
        )
        return Traced(_identified(found), self._in_tree, out_tree, used, flat)

    def _traced_with_checks(self) -> tuple[Callable[..., Any], Any, Checks | None]:
        """Trace the function, and again with its checks as results if it has any."""
        traced = self._trace(self._fun)
        if not jax_private.has_checks(traced.jaxpr):
            return self._fun, traced, None
        checked = Checked(self._fun, self._split)
        traced = self._trace(checked)
        results, error = traced.out_tree.children()
        return checked, traced, checks_of(error, results.num_leaves)

    def _trace(self, fun: Callable[..., Any]) -> Any:
        args, kwargs = jax.tree.unflatten(self._in_tree, self._abstract_leaves())
        jitted = jax.jit(
            fun,
            static_argnums=tuple(each for each, _ in self._split.static_args),
            static_argnames=tuple(each for each, _ in self._split.static_kwargs),
            donate_argnums=self._options.donate_argnums,
            donate_argnames=self._options.donate_argnames or None,
        )
        all_args, all_kwargs = self._split.merge(args, kwargs)
        return jitted.trace(*all_args, **all_kwargs)

    def _export(
        self,
        jaxpr: Any,
        wanted: Sequence[Spec | None],
        donated: tuple[int, ...],
        has_callbacks: bool,
    ) -> export.Exported:
        """Lower a traced function of flat arguments."""
        jitted = jax.jit(
            jax_callbacks.flat_function(jaxpr, has_callbacks=not has_callbacks),
            out_shardings=tuple(map(self._sharding, wanted)),
            donate_argnums=donated,
        )
        return export.export(
            jitted, platforms=[self._platform], disabled_checks=[_ANY_CUSTOM_CALL]
        )(*self._abstract_leaves())

    def _abstract_leaves(self) -> list[jax.ShapeDtypeStruct]:
        return [
            abstract_array(
                each, None if spec is None else named_sharding(self._mesh, spec)
            )
            for each, spec in zip(self._in_types, self._wanted, strict=True)
        ]

    def _sharding(self, spec: Spec | None) -> Any:
        if spec is None:
            return jax_private.UNSPECIFIED
        return named_sharding(self._mesh, spec)

    def _wanted_arguments(self, leaves: Sequence[Any]) -> list[Spec | None]:
        """What is asked for by the options, else how a value is sharded already."""
        args, kwargs = self._split.args, self._split.kwargs
        given = specs_for(args, self._options.in_shardings, f"{self._who} arguments")
        given += [None] * len(jax.tree.leaves(kwargs))
        specs: list[Spec | None] = []
        for position, (leaf, spec) in enumerate(zip(leaves, given, strict=True)):
            shape = self._in_types[position].shape
            if spec is not None:
                check_spec(
                    f"{self._who} argument {position}", self._logical_mesh, spec, shape
                )
                specs.append(spec)
                continue
            own = getattr(leaf, "spec", None)
            specs.append(own if fits(self._logical_mesh, own, shape) else None)
        return specs

    def _wanted_results(self, out_tree: Any, traced: Any) -> list[Spec | None]:
        results = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
        shardings = self._options.out_shardings
        specs = specs_for(results, shardings, f"{self._who} results")
        avals = traced.jaxpr.out_avals
        for position, spec in enumerate(specs):
            if spec is not None:
                shape = avals[position].shape
                who = f"{self._who} result {position}"
                check_spec(who, self._logical_mesh, spec, shape)
        return specs + [()] * (len(avals) - len(specs))  # what tells of checks is whole

    def _specs(
        self, exported: export.Exported, wanted: Sequence[Spec | None]
    ) -> tuple[tuple[Spec, ...], tuple[Spec, ...]]:
        """The shardings that were asked for, and where none was, those XLA chooses."""
        in_specs = list(self._wanted)
        out_specs = list(wanted)
        if self._logical_mesh.size > 1 and None in (*in_specs, *out_specs):
            module = exported.mlir_module_serialized
            found_in, found_out = jax_private.propagated_shardings(module)
            found = dict(zip(exported.module_kept_var_idx, found_in, strict=True))
            in_specs = [
                self._chosen(each, found.get(i, ()), self._in_types[i])
                for i, each in enumerate(in_specs)
            ]
            out_types = map(type_of, exported.out_avals)
            out_specs = [
                self._chosen(*each)
                for each in zip(out_specs, found_out, out_types, strict=True)
            ]
        return (
            tuple(() if each is None else each for each in in_specs),
            tuple(() if each is None else each for each in out_specs),
        )

    def _chosen(self, wanted: Spec | None, found: Spec, of: ArrayType) -> Spec:
        if wanted is not None:
            return wanted
        logical = found[: len(of.shape)]  # a key has a dimension more in memory
        chosen = spec_of(partition_spec(logical))
        # XLA pads what does not divide; arrays of JAX cannot be cut so.
        return chosen if fits(self._logical_mesh, chosen, of.shape) else ()


def _with_shard(found: Traced, shard: Shard) -> Traced:
    """Add what a shard computes by itself, for it to be launched alone."""
    whole, used = found.computation, found.used
    in_specs = tuple(shard.in_specs[i] for i in used)
    if (in_specs, shard.out_specs) != (whole.in_specs, whole.out_specs):
        return found
    donated = tuple(used[i] for i in whole.donated)
    alone = trace(
        shard.function,
        tuple(map(abstract_array, shard.types)),
        mesh=ONE_DEVICE,
        settings=whole.settings,
        options=Options(donate_argnums=donated, deadline_s=whole.deadline_s),
        platform=whole.platform,
    )
    if alone.used != used:
        return found
    one = replace(alone.computation, name=whole.name)
    more = replace(whole, shard=one, idle=used.index(shard.idle))
    return replace(found, computation=_identified(more))


def _donated(traced: Any) -> tuple[int, ...]:
    infos = jax.tree.leaves(traced.args_info, is_leaf=lambda x: hasattr(x, "donated"))
    return tuple(i for i, info in enumerate(infos) if info.donated)


def _identified(computation: Computation) -> Computation:
    """Fill in the digest of all that makes a computation what it is."""
    module = jax_private.fingerprint(computation.stablehlo)
    rest = replace(computation, name="", stablehlo=module)
    fields = (getattr(rest, each.name) for each in dataclasses.fields(rest))
    digest = hashlib.sha256()
    for each in fields:
        part = each if isinstance(each, bytes) else repr(each).encode()
        digest.update(len(part).to_bytes(8, "big") + part)
    return replace(computation, identity=digest.hexdigest())
