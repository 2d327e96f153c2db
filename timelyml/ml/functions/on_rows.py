"""Functions on ragged handles: called shard by shard, on the rows that each has.

All sizes that rows are padded to are compiled into one executable. Each shard takes the
smallest that its rows fit into, by its own count. A shard without rows computes nothing:
where the function has no collectives, it is not even launched there (`shards.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from timelyml.errors import TraceError
from timelyml.ml.buckets import octave_sizes
from timelyml.ml.functions.blame import calling_line, name_of
from timelyml.ml.functions.computation import LogicalMesh, Spec
from timelyml.ml.functions.options import Arguments, Options
from timelyml.ml.functions.ragged import Layout, Ragged, is_ragged
from timelyml.ml.functions.shards import has_collectives
from timelyml.ml.functions.specs import fits, partition_spec, specs_for


@dataclass(frozen=True)  # no slots: what follows from it is kept
class OnRows:
    """A call of a function with rows among its arguments.

    Attributes:
        user: The user's function.
        split: What it is called with.
        given: The user's options.
        mesh: Of the slice where it runs.
        slice: That slice.
    """

    user: Callable[..., Any]
    split: Arguments
    given: Options
    mesh: LogicalMesh
    slice: Any

    @cached_property
    def _flat(self) -> tuple[list[Any], Any]:
        return jax.tree.flatten((self.split.args, self.split.kwargs), is_leaf=is_ragged)

    @property
    def _rows(self) -> list[Ragged]:
        return [each for each in self._flat[0] if isinstance(each, Ragged)]

    @cached_property
    def layout(self) -> Layout:
        """That of all rows among the arguments.

        Raises:
            TraceError: They were not routed together, or lie on another slice.
        """
        name, rows = name_of(self.user), self._rows
        layouts = {each.layout.number for each in rows}
        if len(layouts) > 1:
            self._refuse(
                "rows that were not routed together",
                f"rows of {len(layouts)} routings",
                "as many rows on each shard of all; route them in one call",
            )
        where = {each.slice.name for each in rows if each.slice is not None}
        if where - {self.slice.name}:
            self._refuse(
                f"rows on another slice than {self.slice.name!r}, where {name!r} runs",
                f"rows on {', '.join(map(repr, sorted(where)))}",
                "rows of its own slice, as they do not move by themselves; route them",
            )
        found: Layout = rows[0].layout
        return found

    @property
    def operands(self) -> list[Any]:
        """What the flat function is called with beside counts."""
        return [each.rows if is_ragged(each) else each for each in self._flat[0]]

    @cached_property
    def key(self) -> Any:
        """What the flat function depends on, but for types."""
        flags = tuple(map(is_ragged, self._flat[0]))
        fixed = self.split.static_args, self.split.static_kwargs
        return self._flat[1], flags, fixed, tuple(self._specs)

    def options(self) -> Options:
        """Return the options of the flat function."""
        whole = self._over_all
        return Options(
            in_shardings=tuple(map(partition_spec, [whole, *self._specs])),
            out_shardings=partition_spec(whole),
            donate_argnums=tuple(1 + each for each in self._donated),
            deadline_s=self.given.deadline_s,
        )

    def function(self) -> Callable[..., Any]:
        """Return the function of counts and leaves, to be compiled for the slice."""
        user, fixed = self.user, self.split.fixed
        # In place of the structure, which does not pickle if the function is shipped.
        leaves, tree = self._flat
        skeleton = jax.tree.unflatten(tree, range(len(leaves)))
        flags = tuple(map(is_ragged, self._flat[0]))
        num_shards = self.mesh.size
        specs = tuple(map(partition_spec, self._specs))
        whole = partition_spec(self._over_all)
        name = name_of(user)

        def on_rows(counts: Any, *leaves: Any) -> Any:
            max_rows = leaves[flags.index(True)].shape[0] // num_shards
            shard = _Shard(user, fixed, skeleton, flags, max_rows)
            mapped = jax.shard_map(
                shard,
                in_specs=(whole, *specs),
                out_specs=whole,
                check_vma=False,  # branches are replicated, or not, each for itself
            )
            return mapped(counts, *leaves)

        on_rows.__name__ = name
        return on_rows

    @property
    def counts(self) -> list[Any]:
        """The counts of all rows, each value once; they have to be the same."""
        self.layout  # noqa: B018 - checks that they belong together
        return list({id(x.counts): x.counts for x in self._rows}.values())

    @property
    def _over_all(self) -> Spec:
        names = self.mesh.axis_names
        return (names[0] if len(names) == 1 else names,)

    @cached_property
    def _specs(self) -> list[Spec]:
        """How each leaf is cut: rows over all axes, others as they are or are asked for."""
        leaves = self._flat[0]
        args = jax.tree.map(
            lambda x: x.rows if is_ragged(x) else x, self.split.args, is_leaf=is_ragged
        )
        who = f"function {name_of(self.user)!r}: arguments"
        wanted = specs_for(args, self.given.in_shardings, who)
        wanted += [None] * (len(leaves) - len(wanted))
        found: list[Spec] = []
        for leaf, spec in zip(leaves, wanted, strict=True):
            own = getattr(leaf, "spec", None)
            on = getattr(getattr(leaf, "slice", None), "name", None)
            if is_ragged(leaf):
                found.append(self._over_all)
            elif spec is not None:
                found.append(spec)
            elif on == self.slice.name and fits(self.mesh, own, leaf.shape):
                found.append(own or ())
            else:
                found.append(())
        return found

    @property
    def _donated(self) -> list[int]:
        """The positions of leaves that are donated."""
        nums, names = set(self.given.donate_argnums), set(self.given.donate_argnames)
        fixed = Arguments((), {}, self.split.static_args, self.split.static_kwargs)
        numbered, _ = fixed.merge([True] * len(self.split.args), {})
        static = {position for position, _ in self.split.static_args}
        given = [i in nums for i in range(len(numbered)) if i not in static]
        marks = [
            jax.tree.map(lambda _, mark=mark: mark, arg, is_leaf=is_ragged)
            for mark, arg in zip(given, self.split.args, strict=True)
        ]
        named = {
            name: jax.tree.map(
                lambda _, mark=name in names: mark, arg, is_leaf=is_ragged
            )
            for name, arg in self.split.kwargs.items()
        }
        flat = jax.tree.leaves((marks, named))
        return [position for position, mark in enumerate(flat) if mark]

    def _refuse(self, what: str, got: str, expected: str) -> None:
        where = calling_line()
        raise TraceError(
            f"function {name_of(self.user)!r} is called with {what} at {where}; got "
            f"{got}; expected {expected}",
            function=name_of(self.user),
            where=where,
        )


def same_counts(first: Any, *others: Any) -> Any:
    """Return counts of rows that go into one function, which have to be the same."""
    for other in others:
        checkify.check(
            jnp.all(other == first),
            "a function cannot run on rows of several calls; got {first} and {other} rows "
            "on the shards; expected as many of each; pass what one call returned",
            first=first,
            other=other,
        )
    return first


@dataclass(frozen=True)
class _Shard:
    """What one shard computes; `skeleton` is a tree of numbers like its arguments."""

    user: Callable[..., Any]
    fixed: Arguments
    skeleton: Any
    flags: tuple[bool, ...]
    max_rows: int

    def __call__(self, counts: Any, *leaves: Any) -> Any:
        """Call the function on the rows of this shard; on none, do nothing.

        With a collective in it all shards call it, on all that they have room for, as
        they would wait for those that do nothing or call it on other sizes.

        Args:
            counts: `(1,)`: how many it has.
            leaves: Its own parts of the arguments.
        """
        sizes = octave_sizes(self.max_rows)
        count = counts[0]
        whole = self._with(sizes[-1])
        closed, like = jax.make_jaxpr(whole, return_shape=True)(count, leaves)
        if has_collectives(closed.jaxpr):
            return whole(count, leaves)

        def nothing(_: Any, __: Any) -> Any:
            return jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), like)

        index = jnp.searchsorted(jnp.asarray(sizes), count) + 1
        index = jnp.where(count > 0, index, 0)
        branches = [nothing, *map(self._with, sizes)]
        return jax.lax.switch(index, branches, count, leaves)

    def _with(self, size: int) -> Callable[[Any, Any], Any]:
        """Return what calls the function on so many rows."""

        def run(count: Any, leaves: Sequence[Any]) -> Any:
            pairs = zip(leaves, self.flags, strict=True)
            given = [leaf[:size] if flag else leaf for leaf, flag in pairs]
            tree = jax.tree.structure(self.skeleton)
            args, kwargs = self.fixed.merge(*jax.tree.unflatten(tree, given))
            return jax.tree.map(
                lambda rows: self._padded(rows, size, count), self.user(*args, **kwargs)
            )

        return run

    def _padded(self, rows: Any, size: int, count: Any) -> Any:
        """Return results with zeros in place of what was computed of padding."""
        shape = jnp.shape(rows)
        if not shape or shape[0] != size:
            raise TraceError(
                f"function {name_of(self.user)!r} on rows returns what is none for each "
                f"row; got {list(shape)} for {size} rows; expected {size} in the first "
                f"dimension, as rows go back to where they came from; reduce them after "
                f"that",
                function=name_of(self.user),
            )
        rows = jax.lax.convert_element_type(rows, jnp.result_type(rows))  # not weak
        rows = cut(rows, count)
        room = jnp.zeros((self.max_rows, *shape[1:]), rows.dtype)
        return rows if size == self.max_rows else room.at[:size].set(rows)


def cut(rows: Any, count: Any) -> Any:
    """Return rows of which all but the first so many are zeros."""
    is_there = jnp.arange(rows.shape[0]) < count
    is_there = is_there.reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.where(is_there, rows, jnp.zeros_like(rows))
