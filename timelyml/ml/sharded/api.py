"""`value_and_grad`, `grad`, `train_step` and `flow`: dataflow functions as dataflows.

A dataflow function takes trees of arrays, which become parameters, and streams, whose
columns it sees as a tree of `Column`. It is called once, and what it made is added to
the dataflow of the streams, gradients included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from timelyml.errors import ConfigError
from timelyml.graph import GraphBuilder, StreamRef
from timelyml.ml.checkpoints import Checkpoint, Checkpoints
from timelyml.ml.sharded.columns import (
    Aval,
    Call,
    Column,
    Parameter,
    Stream,
    Trace,
    settle,
)
from timelyml.ml.sharded.learning import Learnt
from timelyml.ml.sharded.lowering import Lowered, Lowering
from timelyml.ml.sharded.naming import check_fits
from timelyml.ml.sharded.optimisers import Optimiser, Owned, check_by_itself
from timelyml.ml.sharded.plan import Plan, plan
from timelyml.ml.sharded.structure import Structure
from timelyml.operators.edges import Routed
from timelyml.operators.edges import settle as settled


@dataclass(frozen=True, slots=True)
class Rows:
    """A stream and what its blocks look like; `rows(stream, like)` makes one."""

    stream: StreamRef
    like: Any
    """Tree of arrays, or of anything with a shape and a dtype."""


def rows(stream: Any, like: Any) -> Rows:
    """Say what the blocks of a stream look like.

    Args:
        stream: A stream, from sources or operators that give each shard one block at
            every time; others work, at the price of a progress round trip per edge.
        like: A block, or a tree of anything with a shape and a dtype. The number of
            rows is a sample: that of a block may differ.
    """
    ref = getattr(stream, "ref", stream)
    if isinstance(ref, Routed):
        ref = settled(ref)
    if not isinstance(ref, StreamRef):
        raise ConfigError(
            f"rows needs a stream; got {stream!r}; expected a stream of a dataflow; "
            "pass what a source or an operator gave",
            option="stream",
        )
    return Rows(ref, like)


class Trained(NamedTuple):
    """The streams of a training step."""

    loss: StreamRef
    """`(1,)` at each time, on one shard: parts of all shards added up."""
    aux: Any
    """What the function gave beside its loss, as a tree of streams."""
    weights: StreamRef
    """Records for `assemble`, after the last time, or at one that had no loss."""
    saved: StreamRef | None = None
    """Step and path of each checkpoint, once it is on disk; None without them."""


def value_and_grad(
    function: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    *,
    has_aux: bool = False,
    name: str = "model",
) -> Callable[..., Any]:
    """Give a function that adds a dataflow function and its gradient to a dataflow.

    The loss is the sum of all elements, on all shards, of what the function gives. So
    each shard gives its part, divided by what the whole batch has: the mean of means is
    another loss.

    Args:
        function: From trees of parameters and columns to a tree of columns; with
            `has_aux` to a pair of that and any tree.
        argnums: Which arguments gradients are wanted of.
        has_aux: Whether there is more than the loss.
        name: Prefix of the operators.

    Returns:
        A function of arrays (which become parameters) and `rows`, which gives what
        `jax.value_and_grad` gives, with streams in place of arrays. The gradient of a
        split parameter comes in parts, shard by shard, that of another from the first
        shard with a leading axis of 1, that of a stream row by row.
    """

    def build(*arguments: Any) -> Any:
        numbers = (argnums,) if isinstance(argnums, int) else argnums
        traced = _trace(name, function, arguments)
        losses, aux = _parted(traced.result, has_aux=has_aux)
        chosen = [traced.inputs[number] for number in numbers]
        trained, wanted = _asked_for(chosen)
        lowered, made = _lower(traced, losses, aux, trained=trained, wanted=wanted)
        gradients = [_gradients_of(each, lowered) for each in chosen]
        found = gradients[0] if isinstance(argnums, int) else tuple(gradients)
        value = (lowered.loss, _shown(aux, made, lowered)) if has_aux else lowered.loss
        return value, found

    return build


def grad(
    function: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    *,
    has_aux: bool = False,
    name: str = "model",
) -> Callable[..., Any]:
    """Like `value_and_grad`, without the value; with `has_aux`, gradients and aux."""
    build = value_and_grad(function, argnums, has_aux=has_aux, name=name)

    def only(*arguments: Any) -> Any:
        value, gradients = build(*arguments)
        return (gradients, value[1]) if has_aux else gradients

    return only


def train_step(
    function: Callable[..., Any],
    optimiser: Any,
    *,
    has_aux: bool = False,
    clip_norm: float | None = None,
    checkpoints: Checkpoints | None = None,
    resume: Checkpoint | None = None,
    name: str = "model",
) -> Callable[..., Trained]:
    """Give a function that trains parameters on streams, one step for each time.

    Args:
        function: See `value_and_grad`; its first argument are the parameters.
        optimiser: An optax transformation, or a function or partial that makes one. It
            must treat each array by itself.
        has_aux: Whether the function gives more than the loss.
        clip_norm: Clip gradients by the norm of all of them, on all shards, as
            `optax.clip_by_global_norm` does for one program.
        checkpoints: Save parameters and states of the optimiser, as they are once a
            time is over; whatever of later times is under way has no part in it.
        resume: Go on from there. The streams then begin with what comes after its
            `step`; the parameters that are passed give only shapes. Any number of
            workers will do; the same shards give the bits of an uninterrupted run.
        name: Prefix of the operators.

    Raises:
        ConfigError: The optimiser looks across arrays, whose parts may be anywhere.
        CheckpointError: `resume` is of other parameters or another optimiser, or
            checkpoints of another run are in the directory.
    """
    made_optimiser = Optimiser.of(optimiser)
    if checkpoints is not None:
        checkpoints.check_free(resume)

    def build(params: Any, *arguments: Any) -> Trained:
        traced = _trace(name, function, (params, *arguments))
        losses, aux = _parted(traced.result, has_aux=has_aux)
        trained, wanted = _asked_for(traced.inputs[:1])
        lowered, made = _lower(
            traced,
            losses,
            aux,
            trained=trained,
            wanted=wanted,
            optimiser=made_optimiser,
            clip_norm=clip_norm,
            checkpoints=checkpoints,
            resumed=resume,
        )
        if lowered.loss is None or lowered.weights is None:
            raise ConfigError(
                f"{name!r} has nothing to train; got parameters that no call uses; "
                "expected a loss that depends on them; pass them to calls",
                option="params",
            )
        return Trained(
            lowered.loss, _shown(aux, made, lowered), lowered.weights, lowered.saved
        )

    return build


def flow(function: Callable[..., Any], *, name: str = "model") -> Callable[..., Any]:
    """Give a function that adds a dataflow function to a dataflow, without gradients."""

    def build(*arguments: Any) -> Any:
        traced = _trace(name, function, arguments)
        lowered, made = _lower(traced, (), traced.result, trained=(), wanted=())
        return _shown(traced.result, made, lowered)

    return build


@dataclass(frozen=True, slots=True)
class _Traced:
    """A dataflow function after its call."""

    name: str
    builder: GraphBuilder
    trace: Trace
    inputs: tuple[Any, ...]
    """The arguments, with columns and parameters for leaves."""
    structure: Structure
    params: list[Any]
    result: Any

    @property
    def assigned(self) -> set[int]:
        """Places of parameters that calls assign."""
        calls = (home for home in self.trace.homes if isinstance(home, Call))
        return {place for call in calls for place in call.assigned}


def _trace(
    name: str, function: Callable[..., Any], arguments: Sequence[Any]
) -> _Traced:
    trace = Trace()
    arrays = tuple(None if isinstance(each, Rows) else each for each in arguments)
    params, structure = jax.tree.flatten(arrays)
    params = [np.asarray(leaf) for leaf in params]
    held = jax.tree.unflatten(
        structure, [Parameter(i, Aval.of(leaf)) for i, leaf in enumerate(params)]
    )
    inputs = tuple(
        _columns_of(trace, number, each) if isinstance(each, Rows) else held[number]
        for number, each in enumerate(arguments)
    )
    builders = [each.stream.builder for each in arguments if isinstance(each, Rows)]
    if not builders:
        raise ConfigError(
            f"{name!r} has no stream to work on; got arrays only; expected at least "
            "one stream; pass rows(stream, like)",
            option="arguments",
        )
    result = function(*inputs)
    return _Traced(
        name, builders[0], trace, inputs, Structure(structure), params, result
    )


def _columns_of(trace: Trace, number: int, given: Rows) -> Any:
    stream = given.stream
    if stream.num_shards is None:
        raise ConfigError(
            f"{stream.label} has as many shards as there are workers; got no number; "
            "expected one that is known now; give the source num_shards",
            option="num_shards",
        )
    leaves, structure = jax.tree.flatten(given.like)
    home = Stream(
        trace,
        trace.next_index(),
        stream,
        stream.num_shards,
        f"argument {number}",
        stream.builder.is_regular(stream),
    )
    return jax.tree.unflatten(structure, settle(home, map(Aval.of, leaves)))


def _parted(result: Any, *, has_aux: bool) -> tuple[tuple[Column, ...], Any]:
    loss, aux = result if has_aux else (result, ())
    losses = tuple(jax.tree.leaves(loss))
    for column in losses:
        if not isinstance(column, Column) or not column.aval.is_float:
            raise ConfigError(
                f"a loss has no gradient; got {column!r}; expected columns of floats; "
                "give the part of the loss that each shard has",
                option="loss",
            )
    if not losses:
        raise ConfigError(
            "a loss is missing; got nothing; expected at least one column of floats; "
            "return it from the dataflow function",
            option="loss",
        )
    return losses, aux


def _asked_for(inputs: Iterable[Any]) -> tuple[list[int], list[Stream]]:
    """Give places of float parameters, and streams, among some arguments."""
    leaves = jax.tree.leaves(tuple(inputs))
    params = [
        leaf.index
        for leaf in leaves
        if isinstance(leaf, Parameter) and leaf.aval.is_float
    ]
    streams = {
        leaf.home.index: leaf.home
        for leaf in leaves
        if isinstance(leaf, Column) and isinstance(leaf.home, Stream)
    }
    return params, list(streams.values())


def _lower(
    traced: _Traced,
    losses: Sequence[Column],
    aux: Any,
    *,
    trained: Iterable[int],
    wanted: Iterable[Stream],
    optimiser: Optimiser | None = None,
    clip_norm: float | None = None,
    checkpoints: Checkpoints | None = None,
    resumed: Checkpoint | None = None,
) -> tuple[Lowered, Plan]:
    shown = [leaf for leaf in jax.tree.leaves(aux) if isinstance(leaf, Column)]
    trained = frozenset(trained) - traced.assigned  # state that is not learnt
    made = plan(traced.trace, [*losses, *shown], losses, wanted=wanted, trained=trained)
    if optimiser is not None:
        _check_optimiser(traced, made, optimiser, trained)
    params: Sequence[Any] = traced.params
    if resumed is not None and optimiser is not None:
        owned = Owned(optimiser, traced.structure, tuple(sorted(trained)))
        params = check_fits(resumed, traced.structure, params, owned)
    learnt = Learnt(
        traced.structure, params, trained, optimiser, clip_norm, checkpoints, resumed
    )
    lowering = Lowering(
        traced.builder,
        made,
        learnt,
        shown=tuple(made.resolved(column) for column in shown),
        name=traced.name,
    )
    return lowering.run(), made


def _check_optimiser(
    traced: _Traced, made: Plan, optimiser: Optimiser, trained: frozenset[int]
) -> None:
    used = {
        parameter.index: parameter.is_split
        for station in made.stations
        for parameter in station.call.parameters
    }
    unused = sorted(trained - set(used))
    if unused:
        raise ConfigError(
            f"{traced.name!r} never uses some of its parameters; got leaves {unused} "
            "without a call; expected each in one; leave them out",
            option="params",
        )
    split = [used.get(place, False) for place in range(len(traced.params))]
    check_by_itself(optimiser, traced.structure, traced.params, split)


def _shown(aux: Any, made: Plan, lowered: Lowered) -> Any:
    return jax.tree.map(
        lambda leaf: (
            lowered.shown[made.resolved(leaf).key] if isinstance(leaf, Column) else leaf
        ),
        aux,
    )


def _gradients_of(inputs: Any, lowered: Lowered) -> Any:
    def one(leaf: Any) -> StreamRef | None:
        if isinstance(leaf, Parameter):
            return lowered.gradients.get(leaf.index)
        return lowered.cotangents.get(leaf.key)

    return jax.tree.map(one, inputs)
