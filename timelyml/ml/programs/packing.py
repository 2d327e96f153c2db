"""What shards do of a routing: they sort rows by where they go, and put them back.

Pure functions of whole arrays, to be compiled for a slice whose mesh is that of the
context. Rows are cut over all of its axes, and each shard works on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from timelyml.ml.functions.on_rows import cut

PIECE_ELEMENTS = 1024
"""Of the matrix of counts in one value: 4 KB, which ride along with the news of it."""

_INT32_MAX = int(np.iinfo(np.int32).max)

Rows: TypeAlias = Sequence[jax.Array]


def padded(num_rows: int, num_shards: int) -> int:
    """Return to how many rows a batch is padded, so that shards have as many.

    >>> padded(5, 2), padded(0, 2)
    (6, 2)
    """
    return max(1, -(-num_rows // num_shards)) * num_shards


def entered(num_shards: int) -> Callable[..., Any]:
    """Return what cuts a batch over shards: counts, and its arrays, padded."""

    def enter(*rows: jax.Array) -> Any:
        num_rows = rows[0].shape[0]
        per_shard = padded(num_rows, num_shards) // num_shards
        counts = jnp.clip(num_rows - jnp.arange(num_shards) * per_shard, 0, per_shard)
        return counts.astype(jnp.int32), tuple(_pad(x, num_shards) for x in rows)

    return enter


def packed(
    num_sources: int, num_targets: int, spec: PartitionSpec
) -> Callable[..., Any]:
    """Return what sorts the rows of each shard by where they go.

    It takes counts, destinations and rows; it returns for each sorted row which it was,
    the matrix of counts and the largest destination, both in pieces, and the sorted
    rows. Rows that go nowhere come last and do not count.
    """

    def pack(counts: jax.Array, destinations: jax.Array, *rows: jax.Array) -> Any:
        if destinations.dtype.itemsize < 4:  # which may not even hold `num_targets`
            destinations = destinations.astype(jnp.int32)
        per_shard = destinations.shape[0] // num_sources
        position = jnp.arange(destinations.shape[0])
        is_there = position % per_shard < counts[position // per_shard]
        # Shard 0 is always there; -1 would be the largest of unsigned ones.
        worst = jnp.max(jnp.where(is_there, destinations, 0), initial=0)
        kept = is_there & (destinations >= 0) & (destinations < num_targets)
        keys = jnp.where(kept, destinations, num_targets).astype(jnp.int32)

        def shard(keys: jax.Array, *rows: jax.Array) -> Any:
            order = jnp.argsort(keys, stable=True).astype(jnp.int32)
            found = jnp.bincount(keys, length=num_targets + 1)[:num_targets]
            rows = tuple(_in_order(x, order) for x in rows)
            return order, found[None].astype(jnp.int32), rows

        order, matrix, rows = _by_shard(shard, spec)(keys, *rows)
        worst = jnp.minimum(worst, _INT32_MAX).astype(jnp.int32)
        flat = jnp.append(matrix.ravel(), worst)
        cuts = range(0, flat.shape[0], PIECE_ELEMENTS)
        pieces = tuple(flat[start : start + PIECE_ELEMENTS] for start in cuts)
        return order, pieces, rows

    return pack


def arrived(num_sources: int, num_targets: int) -> Callable[..., Any]:
    """Return what tells, of what `packed` tells in pieces, how many rows each shard got."""

    def count_rows(*pieces: jax.Array) -> Any:
        matrix = jnp.concatenate(pieces)[:-1].reshape(num_sources, num_targets)
        return matrix.sum(0, jnp.int32)

    return count_rows


def put_back(num_rows: int, spec: PartitionSpec) -> Callable[..., Any]:
    """Return what puts rows where they were, of the way in which they were sorted.

    Rows that went nowhere are zeros.
    """

    def unpack(order: jax.Array, *rows: jax.Array) -> Any:
        def shard(order: jax.Array, *rows: jax.Array) -> Any:
            return tuple(
                jnp.zeros_like(x).at[order].set(x, unique_indices=True) for x in rows
            )

        found = _by_shard(shard, spec)(order, *rows)
        return tuple(x[:num_rows] for x in found)

    return unpack


def started(counts: jax.Array, *rows: jax.Array) -> Any:
    """Return counts, for each row which one of its shard it is, and the rows."""
    num_shards = counts.shape[0]
    per_shard = rows[0].shape[0] // num_shards
    places = jnp.tile(jnp.arange(per_shard, dtype=jnp.int32), num_shards)
    return counts, places, rows


def taken(num_rows: int) -> Callable[..., Any]:
    """Return what leaves out padding."""

    def take(*rows: jax.Array) -> Any:
        return tuple(each[:num_rows] for each in rows)

    return take


def chosen(
    num_branches: int, spec: PartitionSpec, *, is_flag: bool = False
) -> Callable[..., Any]:
    """Return what sorts the rows of each shard by the branch that they take.

    With `is_flag` what is no zero is 1. It takes counts, indices and rows; it returns for each branch whether it has rows at
    all, its counts, for each of its rows which it was, where it could go to be spread
    evenly, and its rows.
    """

    def choose(counts: jax.Array, index: jax.Array, *rows: jax.Array) -> Any:
        if is_flag:
            index = (index != 0).astype(jnp.int32)
        index = jnp.clip(index, 0, num_branches - 1).astype(jnp.int32)

        def shard(counts: jax.Array, index: jax.Array, *rows: jax.Array) -> Any:
            is_there = jnp.arange(index.shape[0]) < counts[0]
            found = []
            for number in range(num_branches):
                takes = is_there & (index == number)
                order = jnp.argsort(~takes, stable=True).astype(jnp.int32)
                count = jnp.sum(takes, dtype=jnp.int32)
                own = tuple(cut(_in_order(x, order), count) for x in rows)
                found.append((count[None], order, own))
            return tuple(found)

        found = _by_shard(shard, spec)(counts, index, *rows)
        return tuple((jnp.any(each[0] > 0), *each) for each in found)

    return choose


def merged(num_rows: int, spec: PartitionSpec) -> Callable[..., Any]:
    """Return what puts the rows of all branches where they were.

    It takes counts and orders, one for each branch, and the results of each.
    """

    def merge(
        counts: Rows, orders: Rows, results: Sequence[Rows]
    ) -> tuple[jax.Array, ...]:
        def shard(counts: Rows, orders: Rows, results: Sequence[Rows]) -> Any:
            found = [jnp.zeros_like(each) for each in results[0]]
            for count, order, rows in zip(counts, orders, results, strict=True):
                place = _places(order, jnp.arange(order.shape[0]) < count[0])
                found = [
                    x.at[place].set(each, mode="drop")
                    for x, each in zip(found, rows, strict=True)
                ]
            return tuple(found)

        found = _by_shard(shard, spec)(counts, orders, results)
        return tuple(x[:num_rows] for x in found)

    return merge


def retired(spec: PartitionSpec) -> Callable[..., Any]:
    """Return what takes rows that are done out of those that go on.

    It takes counts, for each row which it was, whether it goes on, the rows, and the
    rows that were done before, in their places. It returns whether any go on, and all
    of that anew.
    """

    def retire(
        counts: jax.Array, places: jax.Array, goes_on: jax.Array, rows: Rows, done: Rows
    ) -> Any:
        def shard(
            counts: jax.Array,
            places: jax.Array,
            goes_on: jax.Array,
            rows: Rows,
            done: Rows,
        ) -> Any:
            is_there = jnp.arange(places.shape[0]) < counts[0]
            ends = _places(places, is_there & ~goes_on)
            done = tuple(
                x.at[ends].set(each, mode="drop")
                for x, each in zip(done, rows, strict=True)
            )
            stays = is_there & goes_on
            order = jnp.argsort(~stays, stable=True)
            count = jnp.sum(stays, dtype=jnp.int32)
            rows = tuple(cut(_in_order(x, order), count) for x in rows)
            return count[None], places[order], rows, done

        counts, places, rows, done = _by_shard(shard, spec)(
            counts, places, goes_on, tuple(rows), tuple(done)
        )
        return jnp.any(counts > 0), counts, places, rows, done

    return retire


def _in_order(rows: jax.Array, order: jax.Array) -> jax.Array:
    """Return rows in another order; that it is one makes the way back cheaper."""
    return rows.at[order].get(unique_indices=True, mode="promise_in_bounds")


def _places(places: jax.Array, is_meant: jax.Array) -> jax.Array:
    """Return where rows go; past the end, where it is dropped, for those not meant."""
    return jnp.where(is_meant, places, places.shape[0])


def _by_shard(function: Callable[..., Any], spec: PartitionSpec) -> Callable[..., Any]:
    return jax.shard_map(function, in_specs=spec, out_specs=spec, check_vma=False)


def _pad(rows: jax.Array, num_shards: int) -> jax.Array:
    missing = padded(rows.shape[0], num_shards) - rows.shape[0]
    return jnp.pad(rows, [(0, missing), *[(0, 0)] * (rows.ndim - 1)])
