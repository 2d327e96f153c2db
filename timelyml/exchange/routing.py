"""Routing: the rows of one payload to the shards that they are meant for.

Blocks are routed whole: one stable sort of the destinations, one count, one gather
of the rows, and slices of the result.

Source:
    Naiad, section 4.2 (partitioning functions).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from timelyml.errors import RoutingError
from timelyml.exchange.hashing import destination_of, destinations_by_key
from timelyml.exchange.payload import (
    Array,
    Payload,
    map_columns,
    num_records,
    records_of,
    slice_rows,
    take,
)
from timelyml.exchange.sizes import size_bytes
from timelyml.graph.pact import Exchange

Parts = list[tuple[int, Payload]]
_LEAST_BYTES = 8192  # smaller columns are not sent from where they are


@dataclass(frozen=True)
class Away:
    """Shards of a consumer that are elsewhere, and memory that is seen from there.

    Attributes:
        shards: Whether each shard is elsewhere, `(num_shards,) bool`.
        memory: Returns so many bytes of such memory, or None.
    """

    shards: npt.NDArray[np.bool_]
    memory: Callable[[int], npt.NDArray[np.uint8] | None]


def route(
    pact: Exchange, payload: Payload, num_shards: int, *, away: Away | None = None
) -> Parts:
    """Split a payload by an exchange's rule; only shards that get rows.

    Rows that have to be gathered for shards `away` are gathered in memory that is seen
    there.

    Raises:
        RoutingError: The rule names a shard that does not exist, or a key cannot be
            hashed.
    """
    if pact.route is not None:
        destinations = pact.route(payload, num_shards)
    else:
        if pact.key is not None and isinstance(payload, list) and len(payload) == 1:
            # Tiny epochs are many: without arrays it takes 1 us instead of 9.
            try:  # `suppress` would take 0.6 us
                return [(destination_of(pact.key(payload[0]), num_shards), payload)]
            except (TypeError, RoutingError):
                pass  # told below, with more
        keys = map(pact.key, records_of(payload)) if pact.key else ()
        destinations = destinations_by_key(keys, num_shards)
        if len(destinations) < num_records(payload):
            raise RoutingError(  # `map` ends there as if there were no more rows
                f"a row has a key that cannot be routed; got StopIteration at row "
                f"{len(destinations)}; expected a key; let what makes it raise another "
                f"error",
                row=len(destinations),
            )
    return split_by_destination(payload, destinations, num_shards, away=away)


def split_by_destination(
    payload: Payload, destinations: Any, num_shards: int, *, away: Away | None = None
) -> Parts:
    """Return `(shard, rows)` for each shard that gets rows, by ascending shard.

    Rows keep their order within a shard. If all go to one shard, or already stand
    in the order of shards, nothing is copied.

    Args:
        payload: Records or columns.
        destinations: One shard index per row, an integer array or sequence.
        num_shards: How many shards the consumer has.
        away: Those that are elsewhere, where that makes a difference.

    Raises:
        RoutingError: A destination is no shard, or their number is not that of rows.
    """
    rows = num_records(payload)
    shards = _checked(destinations, rows, num_shards)
    if not rows:
        return []
    counts = np.bincount(shards, minlength=1)
    present = np.flatnonzero(counts)
    if len(present) == 1:
        return [(int(present[0]), payload)]
    if isinstance(payload, list):
        return _bucket(payload, shards.tolist(), present.tolist())
    sizes = counts[present]
    if np.any(shards[1:] < shards[:-1]):
        # A stable sort of 8- and 16-bit integers is a radix sort.
        order = np.argsort(shards, kind="stable")
        if away is not None and _is_worth_it(payload, away):
            return _gather_apart(payload, order, present, sizes, away)
        payload = take(payload, order)
    return _slices(payload, present, sizes)


def _slices(payload: Payload, present: Array, sizes: Array) -> Parts:
    stops = np.cumsum(sizes).tolist()
    starts = [0, *stops[:-1]]
    return [
        (shard, slice_rows(payload, start, stop))
        for shard, start, stop in zip(present.tolist(), starts, stops, strict=True)
    ]


def _is_worth_it(payload: Payload, away: Away) -> bool:
    """Whether there is such memory now: to gather twice costs half as much again."""
    return size_bytes(payload) >= _LEAST_BYTES and away.memory(1) is not None


def _gather_apart(
    payload: Payload, order: Array, present: Array, sizes: Array, away: Away
) -> Parts:
    """Gather rows for shards here and away, so that neither keep the others' memory."""
    is_away = away.shards[present]
    parts: Parts = []
    for side in (False, True):
        is_side = is_away == side
        if not is_side.any():
            continue
        rows = order if is_side.all() else order[np.repeat(is_side, sizes)]
        taken = _take_into(payload, rows, away.memory) if side else take(payload, rows)
        parts += _slices(taken, present[is_side], sizes[is_side])
    return sorted(parts, key=itemgetter(0))


def _take_into(
    payload: Payload,
    indices: npt.NDArray[np.integer[Any]],
    memory: Callable[[int], npt.NDArray[np.uint8] | None],
) -> Payload:
    """Return what `take` returns, in memory for so many bytes where there is some."""

    def gathered(column: Array) -> Array:
        shape = (len(indices), *column.shape[1:])
        size = column.dtype.itemsize * math.prod(shape)
        # References are no bytes, and a subclass is more than its rows.
        is_plain = type(column) is np.ndarray and not column.dtype.hasobject
        room = memory(size) if is_plain and size >= _LEAST_BYTES else None
        if room is None:
            return column.take(indices, axis=0)
        # `clip` writes where it is told to; where it may raise, numpy writes twice.
        into: Array = room.view(column.dtype).reshape(shape)
        return column.take(indices, axis=0, out=into, mode="clip")

    return map_columns(gathered, payload)


def _bucket(records: list[Any], shards: list[int], present: list[int]) -> Parts:
    buckets: dict[int, list[Any]] = {shard: [] for shard in present}
    for shard, record in zip(shards, records, strict=True):
        buckets[shard].append(record)
    return list(buckets.items())


def _checked(
    destinations: Any, rows: int, num_shards: int
) -> npt.NDArray[np.integer[Any]]:
    """Return the destinations in the smallest unsigned type that holds the shards."""
    given = np.asarray(destinations)
    if given.shape != (rows,) or (rows and given.dtype.kind not in "iu"):
        raise RoutingError(
            f"destinations do not fit the payload; got shape {given.shape} of "
            f"{given.dtype}; expected one integer for each of {rows} rows; correct what "
            f"chooses them",
            rows=rows,
            shape=given.shape,
        )
    if rows and not 0 <= int(given.min()) <= int(given.max()) < num_shards:
        row = int(np.flatnonzero((given < 0) | (given >= num_shards))[0])
        raise RoutingError(
            f"a row goes to a shard that does not exist; got {int(given[row])} at row "
            f"{row}; expected 0 to {num_shards - 1}; reduce it modulo the shards",
            destination=int(given[row]),
            row=row,
            num_shards=num_shards,
        )
    narrow = np.uint8 if num_shards <= 256 else np.uint16
    shards: npt.NDArray[np.integer[Any]] = given.astype(
        narrow if num_shards <= 65536 else np.int64, copy=False
    )
    return shards
