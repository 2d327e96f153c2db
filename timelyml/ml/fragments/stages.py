"""`ml.named_stages`: an ordinary JAX model, its labelled parts as stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var

from timelyml.errors import ConfigError, TimelyError, TraceError
from timelyml.ml.fragments.cutting import Problem, assign_in_order
from timelyml.ml.fragments.labels import scopes_in, written_out
from timelyml.ml.fragments.pieces import Parts, Piece
from timelyml.ml.functions import type_of
from timelyml.ml.functions.blame import name_of, trace_error
from timelyml.ml.functions.types import abstract_array
from timelyml.ml.pipeline.dependence import variables


def named_stages(
    function: Callable[[Any, Any], Any], labels: Sequence[str], params: Any, x: Any
) -> NamedStages:
    """Cut a model at its labels into stages, for `ml.pipeline`.

    Parts without a label go where the fewest bytes cross borders of stages, none before
    what it reads.

    Args:
        function: `function(params, x) -> y`, with a `jax.named_scope` for each label.
        labels: Of the stages, in their order.
        params: The weights, or what has their types.
        x: A microbatch, or what has its types. Microbatches may differ from it in size
            if the function does the same for them.

    Raises:
        ConfigError: A label does not occur, or is given twice.
        TraceError: A stage needs what comes after it, or the function cannot be parted:
            see `fragments`.
    """
    model = _Model(function, tuple(labels), params, x)
    stages = tuple(_Stage(model, number) for number in range(len(labels)))
    return NamedStages(stages, model.tied, model)


@dataclass(frozen=True, slots=True)
class NamedStages:
    """A model in stages.

    Attributes:
        stages: As `ml.pipeline` takes them; their weights are dicts by path.
        tied: Weights that several stages read, as `ml.pipeline` takes them.
    """

    stages: tuple[Callable[[Any, Any], Any], ...]
    tied: tuple[tuple[tuple[int, str], ...], ...]
    _model: _Model

    def params_of(self, params: Any) -> list[dict[str, Any]]:
        """Return the weights of each stage."""
        leaves = jax.tree.leaves(params)
        paths, stages_of = self._model.paths, self._model.stages_of
        found: list[dict[str, Any]] = [{} for _ in self.stages]
        for path, stages, leaf in zip(paths, stages_of, leaves, strict=True):
            for stage in stages:
                found[stage][path] = leaf
        return found

    def join(self, params: Sequence[dict[str, Any]]) -> Any:
        """Return the weights of all stages as the tree that the function takes."""
        leaves = [
            params[stages[0]][path]
            for path, stages in zip(
                self._model.paths, self._model.stages_of, strict=True
            )
        ]
        return jax.tree.unflatten(self._model.tree, leaves)


@dataclass(frozen=True, slots=True)
class _Cut:
    """The model for inputs of one type.

    Attributes:
        pieces: Of each stage.
        params: Variables of the weights.
        borders: What goes into each stage, and out of the last.
        y_tree: The structure of the result.
    """

    pieces: tuple[Piece, ...]
    params: tuple[Var, ...]
    borders: tuple[tuple[Any, ...], ...]
    y_tree: Any


class _Model:
    """The function, cut for the types of some microbatch and then alike for others."""

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        labels: tuple[str, ...],
        params: Any,
        x: Any,
    ) -> None:
        self.function = function
        self.labels = labels
        self._cuts: dict[Any, _Cut] = {}
        if len(set(self.labels)) < len(self.labels) or not self.labels:
            raise ConfigError(
                f"stages cannot be told apart; got labels {self.labels!r}; expected one "
                f"or more different ones; give each stage its own",
                option="labels",
            )
        numbered, self.tree = jax.tree.flatten_with_path(_types(params))
        self.paths = [jax.tree_util.keystr(path) for path, _ in numbered]
        self._params = [leaf for _, leaf in numbered]
        x = _types(x)
        parts, _ = self._parts(x)
        problem = self._problem(parts, len(jax.tree.leaves(x)))
        self._check_order(problem)
        self._places = assign_in_order(problem)
        self.stages_of = [self._readers(parts, v) for v in self._param_vars(parts)]

    @property
    def tied(self) -> tuple[tuple[tuple[int, str], ...], ...]:
        """Weights that several stages read."""
        return tuple(
            tuple((stage, path) for stage in stages)
            for path, stages in zip(self.paths, self.stages_of, strict=True)
            if len(stages) > 1
        )

    def cut_of(self, stage: int, x: Any) -> _Cut:
        """Return the model for what goes into a stage."""
        key = stage, tuple(map(_type, jax.tree.leaves(x)))
        if key not in self._cuts and stage == 0:
            self._add(_types(x))
        if key not in self._cuts:
            raise TraceError(
                f"stage {self.labels[stage]!r} is given what no stage before it gave; "
                f"got {key[1]}; expected results of the stage before; trace the first "
                f"stage before it",
                function=self.labels[stage],
            )
        return self._cuts[key]

    def _add(self, x: Any) -> None:
        """Cut the model for a microbatch, as it was for the first one."""
        parts, y_tree = self._parts(x)
        if len(parts.eqns) + self._num_ends != len(self._places):
            raise TraceError(
                f"function {name_of(self.function)!r} cannot be cut as before; got other "
                f"steps for {jax.tree.leaves(x)}; expected the same for all sizes; pass "
                f"microbatches of one size",
                function=name_of(self.function),
            )
        places = self._places[: len(parts.eqns)]
        borders = self._borders(parts, places)
        pieces = []
        for stage, label in enumerate(self.labels):
            run = [part for part, place in enumerate(places) if place == stage]
            makes = [
                v for v in variables(borders[stage + 1]) if v not in borders[stage]
            ]
            makes = [v for v in makes if v not in parts.jaxpr.jaxpr.invars]
            pieces.append(parts.piece(run, stage, label, list(dict.fromkeys(makes))))
        cut = _Cut(tuple(pieces), self._param_vars(parts), borders, y_tree)
        for stage, border in enumerate(borders[:-1]):
            avals = tuple((v.aval.shape, str(v.aval.dtype)) for v in border)
            self._cuts[stage, avals] = cut

    def _parts(self, x: Any) -> tuple[Parts, Any]:
        leaves, tree = jax.tree.flatten(x)
        name, count = name_of(self.function), len(self._params)
        shape: dict[str, Any] = {}

        def flat(*arrays: Any) -> list[Any]:
            params = jax.tree.unflatten(self.tree, arrays[:count])
            y = self.function(params, jax.tree.unflatten(tree, arrays[count:]))
            results, shape["y"] = jax.tree.flatten(y)
            return results

        try:
            jaxpr = jax.make_jaxpr(flat)(*self._params, *leaves)
            missing = set(self.labels) - scopes_in(jaxpr)
            parts = Parts(written_out(jaxpr, self.labels, name))
        except TimelyError:
            raise
        except Exception as error:
            raise trace_error(name, error) from error
        if missing:
            raise ConfigError(
                f"function {name!r} has no stages of some names; got no scope "
                f"{', '.join(map(repr, sorted(missing)))}; expected a jax.named_scope of "
                f"each label; correct the names",
                option="labels",
            )
        return parts, shape["y"]

    def _problem(self, parts: Parts, num_inputs: int) -> Problem:
        homes = [None] * len(self._params) + [0] * num_inputs
        places = {label: stage for stage, label in enumerate(self.labels)}
        last = len(self.labels) - 1
        problem = parts.problem(places, last + 1, homes, end=last)
        self._num_ends = len(problem.fixed) - len(parts.eqns)
        return problem

    def _check_order(self, problem: Problem) -> None:
        """Raise if a stage reads what a later one makes."""
        earliest = [0 if place is None else place for place in problem.fixed]
        flows = [flow for flow in problem.flows if flow.producer is not None]
        for flow in sorted(flows, key=lambda each: each.producer or 0):
            for part in flow.consumers:
                stage = earliest[flow.producer or 0]
                fixed = problem.fixed[part]
                if fixed is not None and fixed < stage:
                    raise TraceError(
                        f"stage {self.labels[fixed]!r} reads what comes after it; got "
                        f"values that depend on {self.labels[stage]!r}; expected labels "
                        f"in the order of {self.labels}; order them otherwise, or use "
                        f"fragments, which go back and forth",
                        function=name_of(self.function),
                    )
                earliest[part] = max(earliest[part], stage)

    def _param_vars(self, parts: Parts) -> tuple[Var, ...]:
        return tuple(parts.jaxpr.jaxpr.invars[: len(self._params)])

    def _readers(self, parts: Parts, var: Var) -> list[int]:
        found = {self._places[part] for part in parts.readers(var)}
        if var in parts.jaxpr.jaxpr.outvars:
            found.add(len(self.labels) - 1)
        return sorted(found) or [0]  # what nothing reads has to be somewhere

    def _borders(
        self, parts: Parts, places: Sequence[int]
    ) -> tuple[tuple[Any, ...], ...]:
        inner, last = parts.jaxpr.jaxpr, len(self.labels) - 1
        inputs = inner.invars[len(self._params) :]
        made = [(var, 0) for var in inputs]
        for part, eqn in enumerate(parts.eqns):
            made += [(var, places[part]) for var in eqn.outvars]
        wanted = set(variables(inner.outvars))

        def goes_into(stage: int, var: Var) -> bool:
            beyond = (places[part] >= stage for part in parts.readers(var))
            return var in wanted or any(beyond)

        borders = [
            tuple(v for v, maker in made if maker < stage and goes_into(stage, v))
            for stage in range(1, last + 1)
        ]
        return (tuple(inputs), *borders, tuple(inner.outvars))


class _Stage:
    """`stage(params, x) -> y`; `x` and `y` are tuples of arrays between stages."""

    def __init__(self, model: _Model, number: int) -> None:
        self._model = model
        self._number = number
        self.__name__ = model.labels[number]

    def __call__(self, params: dict[str, Any], x: Any) -> Any:
        """Compute the stage, and hand on what later ones read."""
        cut = self._model.cut_of(self._number, x)
        border, beyond = cut.borders[self._number : self._number + 2]
        values = dict(zip(border, jax.tree.leaves(x), strict=True))
        for path, var in zip(self._model.paths, cut.params, strict=True):
            if path in params:
                values[var] = params[path]
        piece = cut.pieces[self._number]
        made = piece(*(values[var] for var in piece.reads))
        values.update(zip(piece.makes, made, strict=True))
        out = tuple(
            jnp.asarray(v.val) if isinstance(v, Literal) else values[v] for v in beyond
        )
        is_last = self._number == len(self._model.labels) - 1
        return jax.tree.unflatten(cut.y_tree, out) if is_last else out


def _types(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: abstract_array(type_of(leaf)), tree)


def _type(leaf: Any) -> tuple[tuple[int, ...], str]:
    return tuple(leaf.shape), str(leaf.dtype)
