"""Loops of dataflow functions in which data says how often: each row leaves on its own.

A loop of at most so many steps is that many steps one after the other. Before each, the
rows that have enough part from those that go on; after the last they are put together
again. What was decided is a column, kept with its time until the way back has passed:
that goes through the same steps for the same rows and judges nothing again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from timelyml.errors import ConfigError, LoopLimitError
from timelyml.ml.sharded.columns import Column, columns_in
from timelyml.ml.sharded.functions import Leaves, Needs, Prepared
from timelyml.ml.sharded.vocabulary import SMALLEST, add_call, branch, call, merge


class Looped(NamedTuple):
    """What a loop gives: the rows in the order they had, and how often each went round."""

    rows: Any
    steps: Column
    """`(rows,) int32`."""


def repeat_while(
    going: Callable[[Any], Any],
    body: Callable[[Any], Any],
    rows: Any,
    *,
    max_steps: int,
    name: str = "repeat_while",
    smallest: int = SMALLEST,
) -> Looped:
    """Apply a dataflow function to rows, to each as long as a condition holds for it.

    A row that leaves is computed no further. The gradient goes back through the steps
    that a row took; through how many it took there is none.

    Args:
        going: A JAX function of the tree of rows, row by row, that gives `(rows,)`
            booleans: those that go on. Padded rows are asked too, and count for nothing.
        body: A dataflow function from the tree to one like it, with one row for each, in
            their order. It may exchange rows and give them back. As ever fewer rows come,
            its calls should pad them: see `call`.
        rows: Tree of columns that share their leading axis.
        max_steps: How often a row may go round, at most. The dataflow has that many
            copies of the body, and memory holds no more than that many of the rows.
        name: Of the loop, for traces and errors.
        smallest: Rows of the smallest bucket in which the condition is computed.

    Raises:
        ConfigError: `max_steps` is below 1, or the body gives another tree.
        LoopLimitError: While it runs: a row goes on after `max_steps` steps.
    """
    if max_steps < 1:
        raise ConfigError(
            f"loop {name!r} cannot run; got max_steps={max_steps}; expected 1 or more; "
            f"say how often a row may go round",
            option="max_steps",
        )
    columns_in(name, rows)
    loop = _Loop(going, body, max_steps, name, smallest)
    return Looped(*loop.turn(rows, 0))


@dataclass(frozen=True, slots=True)
class _Loop:
    going: Callable[[Any], Any]
    body: Callable[[Any], Any]
    max_steps: int
    name: str
    smallest: int

    def turn(self, rows: Any, step: int) -> tuple[Any, Column]:
        """Let rows go on from a step; give them at their ends, and their steps."""
        index, steps = call(
            functools.partial(_judged, self.going, step),
            rows,
            name=f"{self.name} condition",
            pad=True,
            smallest=self.smallest,
        )
        if step == self.max_steps:
            return self._ended(rows, index), steps
        done, (again, _) = branch((rows, steps), index, 2)
        moved = self.body(again)
        self._check(rows, moved)
        found: tuple[Any, Column] = merge((done, self.turn(moved, step + 1)), index)
        return found

    def _ended(self, rows: Any, index: Column) -> Any:
        leaves, structure = jax.tree.flatten(rows)
        avals = [leaf.aval for leaf in leaves]
        ended = Ended(self.max_steps, self.name)
        name = f"{self.name} end"
        columns = add_call(index.home, name, ended, [*leaves, index], avals)
        return jax.tree.unflatten(structure, columns)

    def _check(self, rows: Any, moved: Any) -> None:
        shapes = [
            jax.tree.map(lambda leaf: (leaf.shape[1:], leaf.dtype), each)
            for each in (rows, moved)
        ]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"loop {self.name!r} does not give what it takes; got {shapes[1]}; "
                f"expected {shapes[0]}; let the body give a tree like its argument",
                option="body",
            )


@dataclass(frozen=True, slots=True)
class Ended:
    """Gives columns as they are, unless their index says that a row goes on."""

    max_steps: int
    name: str

    def prepared(self, needs: Needs) -> Prepared:
        """Needs nothing; see `Function`."""
        del needs
        return self

    def forward(self, leaves: Leaves) -> tuple[list[Any], Any]:
        """Give the columns."""
        *columns, index = leaves
        count = int(np.count_nonzero(index))
        if count:
            raise LoopLimitError(
                f"loop {self.name!r} does not end; got {count} rows that go on after "
                f"{self.max_steps} steps; expected none; raise max_steps, or let the "
                f"condition fail earlier",
                operator=self.name,
            )
        return list(columns), None

    def backward(self, leaves: Leaves, kept: Any, cotangents: Leaves) -> list[Any]:
        """Give the cotangents."""
        del leaves, kept
        return [*cotangents, None]


def _judged(going: Callable[[Any], Any], step: int, rows: Any) -> tuple[Any, Any]:
    """Which part each row belongs to, and how many steps it has taken."""
    index = jnp.asarray(going(rows)).astype(jnp.int32)
    return index, jnp.full(index.shape, step, jnp.int32)
