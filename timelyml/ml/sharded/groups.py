"""A function of its own for each group of rows: experts, several to a shard."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from timelyml.ml.buckets import bucket_size, cut_rows, pad_rows
from timelyml.ml.compiled import Compiled, compiled
from timelyml.ml.sharded.functions import Leaves, Needs, Prepared
from timelyml.ml.sharded.structure import Structure


@dataclass(frozen=True, slots=True)
class GroupedFunction:
    """Row-wise functions that differ by their parameters, one of them for each row.

    Leaves are parameters, split along their leading axis of groups; then columns of
    rows; then, if a shard has several groups, the group of each row. A group without
    rows is skipped, and its gradients are exactly zero.

    Attributes:
        function: From the parameters of one group and its rows to rows; finite on
            zero rows, with which they are padded to buckets.
        bound: Static arguments that come first.
        parameters: Structure of what the function takes first.
        rows: Structure of what it takes then.
        smallest: Smallest bucket.
        is_ranked: Whether the last leaf is the group of each row.
    """

    function: Any
    bound: tuple[Any, ...]
    parameters: Structure
    rows: Structure
    smallest: int
    is_ranked: bool

    @property
    def num_parameters(self) -> int:
        """How many leaves are parameters."""
        return self.parameters.num_leaves

    @property
    def num_columns(self) -> int:
        """How many leaves are columns that the function reads."""
        return self.rows.num_leaves

    def prepared(self, needs: Needs) -> Prepared:
        """See `Function`."""
        return PreparedGroups(
            self,
            needs,
            compiled(functools.partial(_forward, self)),
            compiled(functools.partial(_pull, self, needs.live)),
        )

    def outputs(self, leaves: Leaves) -> list[Any]:
        """Call the function on the leaves of one group."""
        count = self.num_parameters
        parameters = self.parameters.unflatten(leaves[:count])
        rows = self.rows.unflatten(leaves[count:])
        return list(jax.tree.leaves(self.function(*self.bound, parameters, *rows)))


@dataclass(frozen=True, slots=True)
class PreparedGroups:
    """See `GroupedFunction`; computes forward again on the way back."""

    function: GroupedFunction
    needs: Needs
    one: Compiled
    pull: Compiled

    def forward(self, leaves: Leaves) -> tuple[list[Any], Any]:
        """Give rows in the order in which they came."""
        groups = self._groups(leaves)
        results = [self._result(leaves, each) for each in groups]
        if len(results) == 1 and groups[0].is_all:
            return results[0], None
        return self._scattered(groups, results, len(leaves[-1])), None

    def backward(self, leaves: Leaves, kept: Any, cotangents: Leaves) -> list[Any]:
        """Give gradients of all groups, and those of the rows."""
        del kept
        split, groups = self.function.num_parameters, self._groups(leaves)
        gradients = [np.zeros(np.shape(leaf), leaf.dtype) for leaf in leaves[:split]]
        by_row: list[list[Any]] = []
        for group in groups:
            found = self._pulled(leaves, group, cotangents)
            for total, part in zip(gradients, found[:split], strict=True):
                total[group.index] = part
            by_row.append([np.asarray(part) for part in found[split:]])
        if len(groups) == 1 and groups[0].is_all:
            rows = [cut_rows(part, len(groups[0].rows)) for part in by_row[0]]
        else:
            rows = self._scattered(groups, by_row, len(leaves[-1]))
        found_all = [*gradients, *rows]
        found_all += [None] * (len(leaves) - len(found_all))
        return [
            gradient if wanted else None
            for gradient, wanted in zip(found_all, self.needs.wanted, strict=True)
        ]

    def _groups(self, leaves: Leaves) -> list[_Group]:
        function = self.function
        if not function.is_ranked:
            count = len(leaves[function.num_parameters])
            return [_Group(0, np.arange(count), is_all=True)] if count else []
        return list(_sorted_groups(np.asarray(leaves[-1])))

    def _inputs(self, leaves: Leaves, group: _Group) -> list[Any]:
        function, split = self.function, self.function.num_parameters
        size = bucket_size(len(group.rows), smallest=function.smallest)
        columns = leaves[split : split + function.num_columns]
        return [
            *(np.asarray(leaf)[group.index] for leaf in leaves[:split]),
            *(pad_rows(group.of(column), size) for column in columns),
        ]

    def _result(self, leaves: Leaves, group: _Group) -> list[Any]:
        outputs = self.one(tuple(self._inputs(leaves, group)))
        return [cut_rows(out, len(group.rows)) for out in outputs]

    def _pulled(self, leaves: Leaves, group: _Group, cotangents: Leaves) -> list[Any]:
        size = bucket_size(len(group.rows), smallest=self.function.smallest)
        live = tuple(
            pad_rows(group.of(each), size)
            for each, ok in zip(cotangents, self.needs.live, strict=True)
            if ok
        )
        return list(self.pull(tuple(self._inputs(leaves, group)), live))

    @staticmethod
    def _scattered(
        groups: list[_Group], results: list[list[Any]], count: int
    ) -> list[Any]:
        """Put the rows of groups where they stood."""
        scattered = []
        for parts in zip(*results, strict=True):
            whole = np.empty((count, *parts[0].shape[1:]), parts[0].dtype)
            for group, part in zip(groups, parts, strict=True):
                whole[group.rows] = part[: len(group.rows)]
            scattered.append(whole)
        return scattered


@dataclass(frozen=True, slots=True)
class _Group:
    """A group that has rows: its place among those of the shard, and which rows."""

    index: int
    rows: Any
    is_all: bool = False

    def of(self, column: Any) -> Any:
        """Take its rows of a column."""
        return column if self.is_all else np.asarray(column)[self.rows]


def _sorted_groups(ranks: Any) -> Iterator[_Group]:
    order = np.argsort(ranks, kind="stable")
    counts = np.bincount(ranks)
    stops = np.cumsum(counts)
    for index in np.flatnonzero(counts).tolist():
        stop = int(stops[index])
        yield _Group(index, order[stop - int(counts[index]) : stop])


def _forward(function: GroupedFunction, leaves: Leaves) -> tuple[Any, ...]:
    return tuple(function.outputs(leaves))


def _pull(
    function: GroupedFunction,
    live: tuple[bool, ...],
    leaves: Leaves,
    cotangents: Leaves,
) -> Any:
    def of(*some: Any) -> list[Any]:
        outputs = function.outputs(some)
        return [out for out, ok in zip(outputs, live, strict=True) if ok]

    _, back = jax.vjp(of, *leaves)
    return back(list(cotangents))
