"""Routing: the rows of one payload to the shards that they are meant for.

Blocks are routed whole: one stable sort of the destinations, one count, one gather
of the rows, and slices of the result.

Source:
    Naiad, section 4.2 (partitioning functions).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from timelyml.errors import RoutingError
from timelyml.exchange.hashing import destination_of, destinations_by_key
from timelyml.exchange.payload import (
    Payload,
    num_records,
    records_of,
    slice_rows,
    take,
)
from timelyml.graph.pact import Exchange

Parts = list[tuple[int, Payload]]


def route(pact: Exchange, payload: Payload, num_shards: int) -> Parts:
    """Split a payload by an exchange's rule; only shards that get rows.

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
    return split_by_destination(payload, destinations, num_shards)


def split_by_destination(payload: Payload, destinations: Any, num_shards: int) -> Parts:
    """Return `(shard, rows)` for each shard that gets rows, by ascending shard.

    Rows keep their order within a shard. If all go to one shard, or already stand
    in the order of shards, nothing is copied.

    Args:
        payload: Records or columns.
        destinations: One shard index per row, an integer array or sequence.
        num_shards: How many shards the consumer has.

    Raises:
        RoutingError: A destination is no shard, or their number is not that of rows.
    """
    rows = num_records(payload)
    shards = _checked(destinations, rows, num_shards)
    if not rows:
        return []
    counts = np.bincount(shards, minlength=1)
    present = np.flatnonzero(counts).tolist()
    if len(present) == 1:
        return [(present[0], payload)]
    if isinstance(payload, list):
        return _bucket(payload, shards.tolist(), present)
    if np.any(shards[1:] < shards[:-1]):
        # A stable sort of 8- and 16-bit integers is a radix sort.
        payload = take(payload, np.argsort(shards, kind="stable"))
    stops = np.cumsum(counts[present]).tolist()
    starts = [0, *stops[:-1]]
    return [
        (shard, slice_rows(payload, start, stop))
        for shard, start, stop in zip(present, starts, stops, strict=True)
    ]


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
