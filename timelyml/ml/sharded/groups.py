"""A function of its own for each group of rows: experts, several to a shard."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from timelyml.ml.buckets import bucket_size, cut_rows, pad_rows
from timelyml.ml.compiled import Compiled, compiled
from timelyml.ml.sharded.functions import (
    Leaves,
    Needs,
    Prepared,
    compute,
    compute_keeping,
    pull_again,
    pull_kept,
)
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
        keeps: Keep residuals; else the forward pass is computed again.
    """

    function: Any
    bound: tuple[Any, ...]
    parameters: Structure
    rows: Structure
    smallest: int
    is_ranked: bool
    keeps: bool = False

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
        wanted = needs.wanted[: self.num_parameters + self.num_columns]
        start = (
            functools.partial(_start_keeping, self, wanted, needs.live)
            if self.keeps and any(needs.live)
            else functools.partial(_start, self)
        )
        return PreparedGroups(
            self,
            needs,
            compiled(start),
            compiled(functools.partial(_pull, self, wanted, needs.live)),
            compiled(functools.partial(_finish, self)),
        )

    def of_group(self, index: Any, leaves: Leaves) -> list[Any]:
        """Give the leaves with the parameters of one group, inside of `jit`."""
        split = self.num_parameters
        return [*(_picked(leaf, index) for leaf in leaves[:split]), *leaves[split:]]

    def outputs(self, leaves: Leaves, decision: Leaves = ()) -> list[Any]:
        """Call the function on the leaves of one group; it decides nothing."""
        del decision
        count = self.num_parameters
        parameters = self.parameters.unflatten(leaves[:count])
        rows = self.rows.unflatten(leaves[count:])
        return list(jax.tree.leaves(self.function(*self.bound, parameters, *rows)))


@dataclass(frozen=True, slots=True)
class PreparedGroups:
    """See `GroupedFunction`; each group is computed by itself."""

    function: GroupedFunction
    needs: Needs
    start: Compiled
    pull: Compiled
    finish: Compiled

    @property
    def num_sizes(self) -> int:
        """For how many numbers of rows a worker has compiled the function."""
        return len(self.start.sizes | self.pull.sizes | self.finish.sizes)

    def forward(self, leaves: Leaves) -> tuple[list[Any], Any]:
        """Give rows in the order in which they came, and a residual for each group."""
        groups = self._groups(leaves)
        keeps = self.function.keeps and any(self.needs.live)
        results, kept = [], []
        for group in groups:
            inputs = tuple(self._inputs(leaves, group))
            sizes = self._sizes(leaves, group)
            outputs = self.start.on_rows(sizes, group.index, inputs)
            if keeps:
                outputs, residual = outputs
                kept.append(residual)
            results.append(outputs)
        count = len(leaves[-1])
        return [
            _scattered((count, *parts[0].shape[1:]), parts[0].dtype, groups, parts)
            for parts in zip(*results, strict=True)
        ], kept

    def backward(self, leaves: Leaves, kept: Any, cotangents: Leaves) -> list[Any]:
        """Give gradients of all groups, and those of the rows."""
        groups, split = self._groups(leaves), self.function.num_parameters
        residuals = kept or [None] * len(groups)
        found = [
            self._pulled(leaves, group, residual, cotangents)
            for group, residual in zip(groups, residuals, strict=True)
        ]
        spread: list[Any] = [None] * len(leaves)
        places = [place for place, ok in enumerate(self.needs.wanted) if ok]
        for number, place in enumerate(places):
            parts = [each[number] for each in found]
            join = _stacked if place < split else _scattered
            leaf = leaves[place]
            spread[place] = join(np.shape(leaf), leaf.dtype, groups, parts)
        return spread

    def _groups(self, leaves: Leaves) -> list[_Group]:
        function = self.function
        if not function.is_ranked:
            count = len(leaves[function.num_parameters])
            return [_Group(0, np.arange(count), is_all=True)] if count else []
        return list(_sorted_groups(np.asarray(leaves[-1])))

    def _inputs(self, leaves: Leaves, group: _Group) -> list[Any]:
        function, split = self.function, self.function.num_parameters
        size = self._size(group)
        columns = leaves[split : split + function.num_columns]
        return [
            *leaves[:split],
            *(pad_rows(group.of(column), size) for column in columns),
        ]

    def _pulled(
        self, leaves: Leaves, group: _Group, residual: Any, cotangents: Leaves
    ) -> Any:
        """Give a group's gradients of the leaves that they are wanted of."""
        sizes = self._sizes(leaves, group)
        _, size = sizes
        live = tuple(
            pad_rows(group.of(each), size)
            for each, ok in zip(cotangents, self.needs.live, strict=True)
            if ok
        )
        inputs = tuple(self._inputs(leaves, group))
        if residual is not None:
            return self.finish.on_rows(sizes, group.index, residual, inputs, live)
        return self.pull.on_rows(sizes, group.index, (inputs, ((), live)))

    def _sizes(self, leaves: Leaves, group: _Group) -> tuple[int, int]:
        """Give what is compiled for: how many groups are here, and how many rows."""
        return len(leaves[0]), self._size(group)

    def _size(self, group: _Group) -> int:
        return bucket_size(len(group.rows), smallest=self.function.smallest)


def _picked(leaf: Any, index: Any) -> Any:
    """Give what a group has of parameters: experts are large, and one alone is no copy."""
    if leaf.shape[0] == 1:
        return leaf[0]
    return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)


def _start(function: GroupedFunction, index: Any, leaves: Leaves) -> Any:
    return compute(function, function.of_group(index, leaves))


def _start_keeping(
    function: GroupedFunction,
    wanted: tuple[bool, ...],
    live: tuple[bool, ...],
    index: Any,
    leaves: Leaves,
) -> Any:
    return compute_keeping(function, wanted, live, function.of_group(index, leaves))


def _pull(
    function: GroupedFunction,
    wanted: tuple[bool, ...],
    live: tuple[bool, ...],
    index: Any,
    given: tuple[Leaves, tuple[Leaves, Leaves]],
) -> Any:
    leaves, back = given
    own = function.of_group(index, leaves)
    return pull_again(function, wanted, live, own, back)


def _finish(
    function: GroupedFunction, index: Any, kept: Any, leaves: Leaves, cotangents: Leaves
) -> Any:
    return pull_kept(kept, function.of_group(index, leaves), cotangents)


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


def _stacked(
    shape: tuple[int, ...], dtype: Any, groups: Sequence[_Group], parts: Sequence[Any]
) -> Any:
    """Put the gradients of groups one above the other, zeros for those without rows."""
    if shape[0] == len(parts) == 1:
        return np.asarray(parts[0])[None]  # experts are large: no copy
    whole = np.zeros(shape, dtype)
    for group, part in zip(groups, parts, strict=True):
        whole[group.index] = part
    return whole


def _scattered(
    shape: tuple[int, ...], dtype: Any, groups: Sequence[_Group], parts: Sequence[Any]
) -> Any:
    """Put the rows of groups where they stood, without their padding."""
    if len(groups) == 1 and groups[0].is_all:
        return cut_rows(parts[0], shape[0])
    whole = np.empty(shape, dtype)
    for group, part in zip(groups, parts, strict=True):
        whole[group.rows] = cut_rows(part, len(group.rows))
    return whole
