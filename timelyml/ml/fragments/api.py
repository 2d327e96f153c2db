"""`ml.fragments`: an ordinary JAX function, its labelled parts on slices, as a program."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var
from jax.sharding import use_abstract_mesh

from timelyml.errors import ConfigError, ProgramError, TimelyError
from timelyml.ml.fragments.cutting import assign
from timelyml.ml.fragments.labels import scopes_in, written_out
from timelyml.ml.fragments.pieces import Parts, Piece
from timelyml.ml.functions import JitFunction, Options, SliceLike, type_of
from timelyml.ml.functions.blame import name_of, trace_error
from timelyml.ml.functions.options import Splitter, as_options
from timelyml.ml.functions.settings import settings_key
from timelyml.ml.functions.types import abstract_array
from timelyml.ml.programs import ProgramFunction, program


def fragments(
    function: Callable[..., Any],
    assignment: Mapping[str, SliceLike],
    *,
    fuse: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
) -> ProgramFunction:
    """Return a program that computes a JAX function, its labelled parts on slices.

    A part is labelled by `jax.named_scope`; of several scopes around it the innermost
    that is in the assignment counts. Parts without a label go where the fewest bytes
    move: for two slices as few as possible, for more by swaps between two at a time.
    Arguments that lie on one of the slices count as lying there. What follows from
    constants alone is made wherever it is needed.

    The function may hold gradients and updates too: what `jax.grad` makes of a labelled
    part has its label. Or differentiate the program with `ml.grad`.

    Args:
        function: As for `jax.jit`; not compiled by `ml.jit`.
        assignment: The slice of each label; several labels may share one.
        fuse: As of `ml.program`.
        static_argnums: Positions of arguments that are no arrays.
        static_argnames: The same by name.

    Raises:
        ConfigError: There is no function, or no assignment; at the call: a label does not occur.
        TraceError: At the call: the function cannot be traced, or has several labels in
            what cannot be parted: a loop that is too long to be unrolled, or whose
            number of iterations depends on data, a branch on a value, a custom
            derivative, `jax.checkpoint`.

    Source:
        The MPMD proposal of Shardy: named computations and a map from names to meshes.
    """
    if not callable(function):
        raise ConfigError(
            f"fragments of what is no function; got {function!r}; expected one of arrays; "
            f"pass the function itself, not its result",
            option="function",
        )
    if not assignment or not all(isinstance(each, str) for each in assignment):
        raise ConfigError(
            f"fragments have no assignment; got {assignment!r}; expected a slice for "
            f"each label; pass a dict from names of scopes to slices",
            option="assignment",
        )
    options = as_options(static_argnums=static_argnums, static_argnames=static_argnames)
    made: ProgramFunction = program(
        _Fragments(function, assignment, options),
        fuse=fuse,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
    )
    return made


def homes(model: ProgramFunction, *args: Any, **kwargs: Any) -> Any:
    """Return, for each array among the arguments of fragments, the slice to keep it on.

    That is the slice that reads it first; None if nothing does.

    Args:
        model: What `fragments` returned.
        args: Arguments of a call, or what has their types.
        kwargs: The same by name.
    """
    if not isinstance(model.function, _Fragments):
        raise ConfigError(
            f"homes of what is not in fragments; got {model!r}; expected what "
            f"ml.fragments returned; ask that",
            option="model",
        )
    return model.function.homes(args, kwargs)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A function in pieces, for arguments of some types.

    Attributes:
        reads: Variables of the arguments.
        results: Variables of results, or numbers.
    """

    pieces: tuple[tuple[Piece, JitFunction], ...]
    reads: tuple[Var, ...]
    results: tuple[Any, ...]
    out_tree: Any


class _Fragments:
    """The block of such a program: calls the pieces one after the other."""

    def __init__(
        self,
        function: Callable[..., Any],
        assignment: Mapping[str, SliceLike],
        options: Options,
    ) -> None:
        self._function = function
        self._slices = list({s.name: s for s in assignment.values()}.values())
        names = [each.name for each in self._slices]
        self._places = {x: names.index(s.name) for x, s in assignment.items()}
        self._split = Splitter(function, options)
        self._known: dict[Any, _Cut] = {}
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pieces, in the program that is being traced."""
        cut, leaves = self._cut_for(args, kwargs)
        values: dict[Var, Any] = dict(zip(cut.reads, leaves, strict=True))
        for piece, compiled in cut.pieces:
            made = compiled(*(values[var] for var in piece.reads))
            values.update(zip(piece.makes, made, strict=True))
        results = [
            jnp.asarray(each.val) if isinstance(each, Literal) else values[each]
            for each in cut.results
        ]
        return jax.tree.unflatten(cut.out_tree, results)

    def homes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the slice that reads each argument first."""
        cut, _ = self._cut_for(args, kwargs)
        found: dict[Var, SliceLike] = {}
        for piece, compiled in cut.pieces:
            for var in piece.reads:
                found.setdefault(var, compiled.slice)
        split = self._split(args, kwargs)
        tree = jax.tree.structure((split.args, split.kwargs))
        given, named = jax.tree.unflatten(tree, [found.get(v) for v in cut.reads])
        return (*given, named) if named else given

    def _cut_for(self, args: Any, kwargs: Any) -> tuple[_Cut, list[Any]]:
        split = self._split(args, kwargs)
        leaves, tree = jax.tree.flatten((split.args, split.kwargs))
        lying = tuple(self._home_of(leaf) for leaf in leaves)
        types = tuple(map(type_of, leaves))
        static = split.static_args, split.static_kwargs
        key = tree, types, lying, static, settings_key()
        if key not in self._known:
            self._known[key] = self._cut(args, kwargs, types, lying)
        return self._known[key], leaves

    def _home_of(self, leaf: Any) -> int | None:
        slice_ = getattr(leaf, "slice", None)
        names = [each.name for each in self._slices]
        name = getattr(slice_, "name", None)
        return names.index(name) if name in names else None

    def _cut(self, args: Any, kwargs: Any, types: Any, lying: Any) -> _Cut:
        name = name_of(self._function)
        split = self._split(args, kwargs)
        tree = jax.tree.structure((split.args, split.kwargs))
        shape: dict[str, Any] = {}

        def flat(*leaves: Any) -> list[Any]:
            given, named = split.merge(*jax.tree.unflatten(tree, leaves))
            results, shape["tree"] = jax.tree.flatten(self._function(*given, **named))
            return results

        try:
            with self._mesh():
                jaxpr = jax.make_jaxpr(flat)(*map(abstract_array, types))
                self._check(scopes_in(jaxpr), name)
                parts = Parts(written_out(jaxpr, self._places, name))
        except TimelyError:
            raise
        except Exception as error:
            raise trace_error(name, error) from error
        problem = parts.problem(self._places, len(self._slices), lying)
        places = assign(problem)
        pieces = parts.pieces(places, [each.name for each in self._slices])
        if not pieces:
            raise ProgramError(
                f"function {name!r} computes nothing; got results that are arguments or "
                f"constants; expected labelled parts; leave it out",
                program=name,
            )
        compiled = [JitFunction(p, self._slices[p.place], Options()) for p in pieces]
        inner = parts.jaxpr.jaxpr
        return _Cut(
            tuple(zip(pieces, compiled, strict=True)),
            tuple(inner.invars),
            tuple(inner.outvars),
            shape["tree"],
        )

    def _mesh(self) -> Any:
        """The mesh of the context, if the slices have one mesh."""
        meshes = {each.mesh for each in self._slices}
        return (
            use_abstract_mesh(*meshes) if len(meshes) == 1 else contextlib.nullcontext()
        )

    def _check(self, scopes: set[str], name: str) -> None:
        missing = sorted(set(self._places) - scopes)
        if missing:
            raise ConfigError(
                f"function {name!r} does not have all labels of the assignment; got no "
                f"{', '.join(map(repr, missing))} among its scopes "
                f"{', '.join(sorted(scopes)) or '(none)'}; expected each in a "
                f"jax.named_scope; correct the names",
                option="assignment",
            )
