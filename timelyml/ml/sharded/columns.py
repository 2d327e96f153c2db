"""What a dataflow function works on: columns, parameters, and where they come from.

A dataflow function is called once, with a `Column` in place of each array, as JAX
calls a function with tracers. A column stands for one array on each shard at each
time. What made it is its home: a stream that was passed in, a `Call` that computes on
each shard, or a `Move` between shards. Homes know their inputs, so a column knows the
whole graph behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from timelyml.errors import ConfigError
from timelyml.graph import StreamRef
from timelyml.ml.sharded.functions import Function
from timelyml.ml.sharded.moves import Transfer
from timelyml.ml.sharded.parts import Parts

Key: TypeAlias = tuple[int, int]
"""A column by the index of its home and its place there; plain, so that it travels."""


class Aval(NamedTuple):
    """Shape and type of an array; the length of a leading axis of rows is a sample."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, leaf: Any) -> Aval:
        """Describe anything with a shape and a dtype."""
        return cls(tuple(leaf.shape), np.dtype(leaf.dtype))

    @property
    def is_float(self) -> bool:
        """Whether a gradient can flow through it."""
        return bool(jax.numpy.issubdtype(self.dtype, jax.numpy.floating))

    def struct(self) -> jax.ShapeDtypeStruct:
        """Give the form in which JAX takes it."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)  # type: ignore[no-untyped-call]  # JAX has none


@dataclass(slots=True, eq=False)
class Trace:
    """The homes that one call of a dataflow function made, in order."""

    homes: list[Home] = field(default_factory=list)

    def next_index(self) -> int:
        """Give the index of the home to be added."""
        return len(self.homes)


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One array on each shard of its home, at each time."""

    home: Home = field(repr=False)
    place: int
    aval: Aval

    @property
    def key(self) -> Key:
        """What stands for it where the graph runs."""
        return self.home.index, self.place

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; where rows are its leading axis, their number is a sample."""
        return self.aval.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its type."""
        return self.aval.dtype

    @property
    def num_shards(self) -> int:
        """On how many shards it is."""
        return self.home.num_shards

    def __getattr__(self, name: str) -> Any:
        """Refuse what arrays and streams have, and say what there is instead."""
        raise AttributeError(
            f"a column has no {name!r}; got a use of it in a dataflow function; expected "
            f"functions of timelyml.ml.sharded on columns; compute in `call`, and write "
            f"loops with `repeat` and `repeat_while`, which have gradients"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Parameter:
    """One array of the parameters, which lives with the shards that use it.

    Attributes:
        index: Among the leaves of all parameters.
        aval: Of the whole array.
        is_split: Each shard holds an equal part of its leading axis, and no other
            ever sees it; else every shard holds all of it.
        copies: See `Parts`.
    """

    index: int
    aval: Aval
    is_split: bool = False
    copies: tuple[tuple[int, ...], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        return self.aval.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its type."""
        return self.aval.dtype

    def parts(self, num_shards: int) -> Parts | None:
        """Say how so many shards share it out; None if each holds all of it."""
        if not self.is_split:
            return None
        if not self.shape or self.shape[0] % num_shards:
            raise ConfigError(
                f"parameter {self.index} cannot be split; got shape {self.shape} and "
                f"{num_shards} shards; expected a leading axis that they share evenly; "
                "change the number of shards",
                option="split",
            )
        return Parts(self.shape[0], num_shards, self.copies)

    def part(self, num_shards: int) -> Aval:
        """Describe what one of so many shards has of its own."""
        parts = self.parts(num_shards)
        if parts is None:
            return self.aval
        return Aval((parts.own, *self.shape[1:]), self.dtype)


@dataclass(slots=True, eq=False)
class Stream:
    """A stream that was passed to the dataflow function."""

    trace: Trace = field(repr=False)
    index: int
    stream: StreamRef
    num_shards: int
    name: str
    is_regular: bool
    """Whether each shard has a block at every time."""
    columns: tuple[Column, ...] = ()
    inputs: tuple[Column, ...] = ()


@dataclass(slots=True, eq=False)
class Call:
    """A function of columns and parameters, called on each shard.

    `arguments` are the leaves of what the function takes; `assigned` names parameters
    that take over an output once the time is over.
    """

    trace: Trace = field(repr=False)
    index: int
    name: str
    num_shards: int
    function: Function
    arguments: tuple[Column | Parameter, ...]
    columns: tuple[Column, ...] = ()
    assigned: dict[int, int] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[Column, ...]:
        """The columns among its arguments, each once."""
        found = (each for each in self.arguments if isinstance(each, Column))
        return tuple(dict.fromkeys(found))

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters among its arguments, as often as they occur."""
        return tuple(each for each in self.arguments if isinstance(each, Parameter))


@dataclass(slots=True, eq=False)
class Move:
    """Columns on their way to other shards.

    Attributes:
        payload: What is moved.
        guides: What the sender decides by: destinations of rows, or their sources.
        receipts: What the receiver needs of its own to put rows in their places.
    """

    trace: Trace = field(repr=False)
    index: int
    name: str
    num_shards: int
    transfer: Transfer
    payload: tuple[Column, ...]
    guides: tuple[Column, ...] = ()
    receipts: tuple[Column, ...] = ()
    columns: tuple[Column, ...] = ()

    @property
    def inputs(self) -> tuple[Column, ...]:
        """All columns that it needs on either side."""
        return (*self.payload, *self.guides, *self.receipts)


Home: TypeAlias = Stream | Call | Move


def settle(home: Home, avals: Iterable[Aval]) -> tuple[Column, ...]:
    """Give a home its columns and add it to its trace."""
    home.columns = tuple(Column(home, place, aval) for place, aval in enumerate(avals))
    home.trace.homes.append(home)
    return home.columns


def columns_in(who: str, tree: Any) -> list[Column]:
    """Give the columns among the leaves of a tree, at least one, all of one trace.

    Raises:
        ConfigError: There is none, or they are on different numbers of shards; or there
            is a stream.
    """
    leaves = jax.tree.leaves(tree)
    for leaf in leaves:
        ref = getattr(leaf, "ref", leaf)  # that of a fluent stream
        if isinstance(ref, StreamRef):
            raise ConfigError(
                f"{who} is given a stream; got {ref!r}; expected columns; pass it to the "
                f"dataflow function, as `sharded.rows` makes it; operators of streams, "
                f"`iterate` among them, run any Python and have no gradients",
                operator=who,
            )
    found = [leaf for leaf in leaves if isinstance(leaf, Column)]
    counts = {column.num_shards for column in found}
    if len(counts) != 1:
        raise ConfigError(
            f"{who} needs columns of the same shards; got columns on "
            f"{sorted(counts) or 'none'}; expected one number of shards; move some of "
            "them first, or pass a column along",
            operator=who,
        )
    return found


def split(tree: Any, *, copies: tuple[tuple[int, ...], ...] = ()) -> Any:
    """Share out the leading axis of parameters among the shards that use them.

    Each shard holds its own equal part: experts live where they compute, and their
    weights go nowhere else.

    Args:
        tree: Of parameters.
        copies: By shard, places along the leading axis that it holds beside its own
            part; for `by_group`. Copies take the same steps and stay equal.
    """

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Parameter):
            raise ConfigError(
                f"split needs parameters; got {leaf!r}; expected leaves of the first "
                "argument of the dataflow function; split what is learnt",
                option="split",
            )
        return replace(leaf, is_split=True, copies=copies)

    return jax.tree.map(one, tree)
