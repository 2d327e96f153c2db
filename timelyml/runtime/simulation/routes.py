"""Routing of records one by one, by the definition of each pact.

The runtime routes whole payloads; the oracle and the reference use this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from timelyml.graph import (
    Broadcast,
    ChannelSpec,
    Direct,
    Exchange,
    Gather,
    Graph,
    Pipeline,
)
from timelyml.runtime.simulation.rules import mix


@dataclass(frozen=True, slots=True)
class RouteBy:
    """The route of an exchange: by a hash of each record."""

    salt: int

    def __call__(self, payload: Any, num_shards: int) -> npt.NDArray[np.int64]:
        """Return one destination per record."""
        return np.array(
            [self.destination(int(record), num_shards) for record in payload], np.int64
        )

    def destination(self, record: int, num_shards: int) -> int:
        """Return where one record goes."""
        return mix(self.salt, record) % num_shards


@dataclass(frozen=True, slots=True)
class KeyBy:
    """The key of an exchange by key."""

    salt: int

    def __call__(self, record: Any) -> int:
        """Return the key of a record."""
        return mix(self.salt, int(record))


@dataclass(frozen=True, slots=True)
class DirectBy:
    """Where an operator with a `Direct` pact sends each record.

    `by_rows` says whether it names a shard for each record of a block, or sends a
    block to each shard.
    """

    salt: int
    num_targets: int
    by_rows: bool

    def destination(self, record: int) -> int:
        """Return the shard for a record."""
        return mix(self.salt, record) % self.num_targets


Target = int | tuple[int, ...] | None
Parts = dict[int, list[int]]
"""Records by target shard; an empty list is an empty block on a dense edge."""


def parts_of(
    graph: Graph,
    channel: ChannelSpec,
    source_shard: int,
    records: Sequence[int],
    target: Target,
) -> Parts:
    """Return which shard gets which of the records sent at once on a channel."""
    num_shards = graph.operators[channel.target.operator].num_shards or 0
    pact = channel.pact
    if isinstance(pact, Pipeline):
        everything = {source_shard: list(records)}
    elif isinstance(pact, Broadcast):
        everything = {shard: list(records) for shard in range(num_shards)}
    elif isinstance(pact, Gather):
        everything = {pact.shard: list(records)}
    elif isinstance(pact, Direct) and isinstance(target, int):
        everything = {target: list(records)}
    else:
        everything = {shard: [] for shard in range(num_shards)}
        if isinstance(pact, Direct):
            shards = list(target) if isinstance(target, tuple) else []
        else:
            shards = [_destination(pact, record, num_shards) for record in records]
        for shard, record in zip(shards, records, strict=True):
            everything[shard].append(record)
    if pact.dense:
        return everything
    return {shard: rows for shard, rows in everything.items() if rows}


def _destination(pact: Exchange, record: int, num_shards: int) -> int:
    if isinstance(pact.route, RouteBy):
        return pact.route.destination(record, num_shards)
    if isinstance(pact.key, KeyBy):
        return pact.key(record) % num_shards
    raise TypeError(f"no such exchange in a random graph: {pact!r}")
