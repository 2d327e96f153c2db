"""What a dataflow function is written in: calls on each shard, and moves between them.

Trees of columns go in and come out, wherever JAX functions have trees of arrays. All
of it is linear or differentiated by JAX, so each has a transpose: that of an exchange
is the exchange back, of a broadcast a sum, of a total a total.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from timelyml.errors import ConfigError
from timelyml.ml.sharded.columns import (
    Aval,
    Call,
    Column,
    Home,
    Move,
    Parameter,
    columns_in,
    settle,
)
from timelyml.ml.sharded.functions import Body, Function, JaxFunction
from timelyml.ml.sharded.groups import GroupedFunction
from timelyml.ml.sharded.local import Merge, Part
from timelyml.ml.sharded.moves import Exchange, Return, Spread, Total, Transfer
from timelyml.ml.sharded.structure import Structure

SMALLEST = 16
"""Rows of the smallest bucket."""


class Exchanged(NamedTuple):
    """Rows on the shards that they were sent to, and what the way back needs."""

    rows: Any
    sources: Column
    """`(rows,) int32`: the shard that each row came from."""
    to: Column
    where: Column | None
    tag: Column | None = None
    """`(rows,)`: what went with each."""


def call(
    function: Callable[..., Any],
    *arguments: Any,
    name: str | None = None,
    keeps: bool = False,
    pad: bool | tuple[int, ...] = False,
    masks: bool = False,
    smallest: int = SMALLEST,
    decides: bool = False,
) -> Any:
    """Call a JAX function on each shard, with what the shard has of its arguments.

    Args:
        function: Pure; jitted, once per worker and shape. `functools.partial` binds
            what is no column and no parameter.
        arguments: Trees of columns and parameters, with at least one column.
        name: Of the operator, for traces and errors.
        keeps: Keep what the way back needs, instead of computing forward again.
        pad: Pad the rows of all columns with zeros to a bucket, or those of some
            arguments, by their numbers; outputs with as many rows are cut. The function
            must be row-wise, or indifferent to rows of zeros.
        masks: With `pad`: it takes `is_row=`, `(rows,) bool`, False for padding.
        smallest: Bucket, with `pad`.
        decides: The function gives a pair, and takes the first of it as
            `decision=` again when it is computed once more on the way back: what was
            chosen is replayed, not chosen anew.

    Returns:
        What the function gives, with columns in place of arrays.
    """
    name = name or _name_of(function)
    leaves, structure = jax.tree.flatten(arguments)
    home = columns_in(f"call of {name!r}", leaves)[0].home
    structs = [_struct(name, leaf, home.num_shards) for leaf in leaves]
    if any(isinstance(leaf, Parameter) and leaf.copies for leaf in leaves):
        raise ConfigError(
            f"call of {name!r} cannot tell copies apart; got a parameter of which "
            "shards hold copies; expected none; use by_group",
            operator=name,
        )
    is_rows = _rows_of(arguments, pad)
    body = Body.of(function, Structure(structure))
    body = replace(body, has_mask=masks)
    result = body.shapes(structs, is_rows)
    if decides:
        body = replace(body, decision=Structure.of(result[0]))
    outputs, out_structure = jax.tree.flatten(result)
    # With a row more, outputs of rows have one more, and others do not.
    longer = jax.tree.leaves(body.shapes(structs, is_rows, more=1)) if pad else outputs
    prepared = JaxFunction(
        body,
        keeps=keeps,
        smallest=smallest if pad else 0,
        is_rows=is_rows,
        gives_rows=tuple(
            a.shape != b.shape for a, b in zip(outputs, longer, strict=True)
        ),
        has_mask=masks,
    )
    columns = add_call(home, name, prepared, leaves, map(Aval.of, outputs))
    return jax.tree.unflatten(out_structure, columns)


def by_group(
    function: Callable[..., Any],
    parameters: Any,
    *rows: Any,
    index: Column | None = None,
    name: str | None = None,
    smallest: int = SMALLEST,
    keeps: bool = False,
) -> Any:
    """Call a row-wise function with other parameters for each group of rows.

    Groups without rows are skipped; their gradients are exactly zero. Each group is
    computed once per time on all its rows, padded with zeros to a bucket.

    Args:
        function: From the parameters of a group and its rows to rows; finite on zeros.
        parameters: Tree of split parameters; the leading axis is that of groups, and
            each shard has an equal part of it.
        rows: Trees of columns that share their leading axis.
        index: `(rows,)` the group of each row, counted from the shard's first; copies
            come after its own. May be left out where every shard has one group.
        name: Of the operator.
        smallest: Rows of the smallest bucket.
        keeps: Keep what the way back needs, instead of computing forward again.
    """
    name = name or _name_of(function)
    home = columns_in(f"call of {name!r}", rows)[0].home
    held, held_structure = jax.tree.flatten(parameters)
    columns, structure = jax.tree.flatten(rows)
    parts = [_struct(name, leaf, home.num_shards) for leaf in held]
    groups = {part.shape[0] for part in parts}
    copies = {leaf.copies for leaf in held}
    is_alone = groups == {1} and copies == {()}
    if len(groups) != 1 or len(copies) != 1 or (index is None and not is_alone):
        raise ConfigError(
            f"call of {name!r} does not know the groups of its rows; got {groups} "
            f"groups on a shard and index {index!r}; expected one number of groups "
            "and the same copies, and an index if a shard has several; pass index",
            operator=name,
        )
    shapes = Structure(held_structure), Structure(structure)
    body = Body.of(function, shapes[1])
    grouped = GroupedFunction(
        body.function, body.bound, *shapes, smallest, index is not None, keeps
    )
    one = [Aval(part.shape[1:], part.dtype).struct() for part in parts]
    structs = [*one, *(column.aval.struct() for column in columns)]
    result = jax.eval_shape(
        lambda leaves: function(
            jax.tree.unflatten(held_structure, leaves[: len(held)]),
            *jax.tree.unflatten(structure, leaves[len(held) :]),
        ),
        structs,
    )
    outputs, out_structure = jax.tree.flatten(result)
    leaves = [*held, *columns, *(() if index is None else (index,))]
    made = add_call(home, name, grouped, leaves, map(Aval.of, outputs))
    return jax.tree.unflatten(out_structure, made)


def exchange(
    rows: Any,
    to: Column,
    *,
    num_shards: int,
    where: Column | None = None,
    tag: Column | None = None,
) -> Exchanged:
    """Send each row to the shards that are named for it, over a sparse edge.

    Args:
        rows: Tree of columns that share their leading axis.
        to: `(rows,)` or `(rows, copies)` integers below `num_shards`.
        num_shards: On the other side. Shards that get no rows hear nothing.
        where: Boolean, of the shape of `to`; others are not sent. All by default.
        tag: Integers of the shape of `to`, one to go with each row that is sent.
    """
    leaves, structure = jax.tree.flatten(rows)
    guides = (to,) if where is None else (to, where)
    tags = () if tag is None else (tag,)
    columns_in("exchange", [leaves, guides, tags])
    slots = int(np.prod(to.shape))
    avals = [Aval((slots, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
    avals += [Aval((slots,), each.dtype) for each in tags]
    arrived = _add_move(
        "exchange",
        Exchange(len(tags)),
        num_shards,
        [*leaves, *tags],
        [*avals, _sources(slots)],
        guides=guides,
    )
    moved = jax.tree.unflatten(structure, arrived[: len(leaves)])
    return Exchanged(
        moved, arrived[-1], to, where, None if tag is None else arrived[-2]
    )


def give_back(rows: Any, exchanged: Exchanged) -> Any:
    """Send rows to where an exchange took them from, each to the place it had there.

    Args:
        rows: Tree of columns, one row for each that arrived, in that order.
        exchanged: What the exchange gave.

    Returns:
        The tree with rows of the shape of `to`; zeros where nothing had been sent.
    """
    leaves, structure = jax.tree.flatten(rows)
    columns_in("give_back", [leaves, exchanged.sources])
    to = exchanged.to
    receipts = (to,) if exchanged.where is None else (to, exchanged.where)
    avals = [Aval((*to.shape, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
    placed = _add_move(
        "give_back",
        Return(),
        to.num_shards,
        leaves,
        avals,
        guides=(exchanged.sources,),
        receipts=receipts,
    )
    return jax.tree.unflatten(structure, placed)


def broadcast(rows: Any, *, num_shards: int | None = None) -> Any:
    """Give all rows of all shards to every shard, in the order of their shards."""
    leaves = columns_in("broadcast", rows)
    count = leaves[0].num_shards if num_shards is None else num_shards
    return _spread("broadcast", rows, Spread(), count)


def gather(rows: Any) -> Any:
    """Give all rows of all shards to a single one, in the order of their shards."""
    columns_in("gather", rows)
    return _spread("gather", rows, Spread(gathers=True), 1)


def total(arrays: Any) -> Any:
    """Add up arrays of one shape over all shards; every shard gets the sum."""
    leaves, structure = jax.tree.flatten(arrays)
    home = columns_in("total", leaves)[0].home
    avals = [leaf.aval for leaf in leaves]
    added = _add_move("total", Total(), home.num_shards, leaves, avals)
    return jax.tree.unflatten(structure, added)


def concat(*trees: Any) -> Any:
    """Join the rows of several trees of the same structure, shard by shard."""
    return call(_concatenated, *trees, name="concat")


def branch(rows: Any, index: Column, num_parts: int) -> tuple[Any, ...]:
    """Part the rows of each shard by an index; each part keeps their order.

    Args:
        rows: Tree of columns that share their leading axis.
        index: `(rows,)` integers below `num_parts`.
        num_parts: How many trees to give.
    """
    leaves, structure = jax.tree.flatten(rows)
    home = columns_in("branch", [leaves, index])[0].home
    avals = [leaf.aval for leaf in leaves] * num_parts
    columns = add_call(home, "branch", Part(num_parts), [*leaves, index], avals)
    width = len(leaves)
    return tuple(
        jax.tree.unflatten(structure, columns[part * width : (part + 1) * width])
        for part in range(num_parts)
    )


def merge(parts: tuple[Any, ...], index: Column) -> Any:
    """Put parts that `branch` made in the order that rows had before."""
    leaves = jax.tree.leaves(tuple(parts))
    home = columns_in("merge", [leaves, index])[0].home
    width = len(leaves) // len(parts)
    avals = [
        Aval((index.shape[0], *leaf.shape[1:]), leaf.dtype) for leaf in leaves[:width]
    ]
    columns = add_call(home, "merge", Merge(len(parts)), [*leaves, index], avals)
    return jax.tree.unflatten(jax.tree.structure(parts[0]), columns)


def repeat(num_times: int, function: Callable[[Any], Any], carry: Any) -> Any:
    """Apply a dataflow function so many times; parameters in it are shared by all."""
    return functools.reduce(lambda now, _: function(now), range(num_times), carry)


def assign(parameter: Parameter, value: Column) -> None:
    """Let a parameter be `value` from the next time on: state that is not learnt.

    Args:
        parameter: Neither split nor trained: nothing differentiates it.
        value: Output of a call that has the parameter among its arguments, the same
            on all shards.
    """
    home = value.home
    if not isinstance(home, Call) or parameter.index not in {
        each.index for each in home.parameters
    }:
        raise ConfigError(
            f"parameter {parameter.index} cannot be assigned; got a column of another "
            "operator; expected one that a call with this parameter gave; compute the "
            "value from the parameter",
            option="assign",
        )
    home.assigned[parameter.index] = value.place


def _rows_of(
    arguments: tuple[Any, ...], pad: bool | tuple[int, ...]
) -> tuple[bool, ...]:
    """Say of each leaf whether its rows are padded."""
    numbers = range(len(arguments)) if pad is True else pad or ()
    return tuple(
        isinstance(leaf, Column) and number in numbers
        for number, tree in enumerate(arguments)
        for leaf in jax.tree.leaves(tree)
    )


def _spread(name: str, rows: Any, transfer: Transfer, num_shards: int) -> Any:
    leaves, structure = jax.tree.flatten(rows)
    avals = [leaf.aval for leaf in leaves]
    count = leaves[0].shape[0]
    spread = _add_move(name, transfer, num_shards, leaves, [*avals, _sources(count)])
    return jax.tree.unflatten(structure, spread[:-1])


def add_call(
    near: Home, name: str, function: Function, leaves: Any, avals: Any
) -> tuple[Column, ...]:
    """Add a call where another column is; give its outputs."""
    trace = near.trace
    home = Call(
        trace, trace.next_index(), name, near.num_shards, function, tuple(leaves)
    )
    return settle(home, avals)


def _add_move(
    name: str,
    transfer: Transfer,
    num_shards: int,
    payload: list[Column],
    avals: Any,
    **beside: tuple[Column, ...],
) -> tuple[Column, ...]:
    trace = payload[0].home.trace
    index = trace.next_index()
    home = Move(trace, index, name, num_shards, transfer, tuple(payload), **beside)
    return settle(home, avals)


def _sources(count: int) -> Aval:
    return Aval((count,), np.dtype(np.int32))


def _struct(name: str, leaf: Any, num_shards: int) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, Column):
        return leaf.aval.struct()
    if isinstance(leaf, Parameter):
        return leaf.part(num_shards).struct()
    raise ConfigError(
        f"call of {name!r} got an argument that is neither column nor parameter; got "
        f"{leaf!r}; expected trees of these; bind other values with functools.partial",
        operator=name,
    )


def _name_of(function: Callable[..., Any]) -> str:
    inner = getattr(function, "func", function)  # of a partial
    return str(getattr(inner, "__name__", "call")).strip("_<>") or "call"


def _concatenated(*trees: Any) -> Any:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees)
