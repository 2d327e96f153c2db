"""Pacts: how the records of an edge find the shard that receives them.

A pact is a plain value on a channel; what it means for bytes is decided by the
exchange layer. `dense` marks an edge whose messages are known beforehand: every
producer shard sends one logical block per time to each of its static consumers,
so that the consumer counts blocks instead of waiting for a frontier. A sparse edge
sends only to shards that get something.

Source:
    Naiad, section 4.2 (partitioning functions on connectors); Pathways,
    section 4.5 (sparse exchanges).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

from timelyml.errors import GraphError

Route: TypeAlias = Callable[[Any, int], Any]
"""From a payload and a number of shards to one destination shard per row."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Shard `i` of the producer to shard `i` of the consumer."""

    dense: bool = False

    def describe(self) -> str:
        """Return the pact as short text."""
        return _described("pipeline", self.dense)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Each row to the shard that a function of the user names.

    Exactly one of `route` and `key` is set.

    Args:
        route: From `(payload, num_shards)` to an integer array, one destination
            shard per row. Called once per block.
        key: From one record to its key; equal keys meet on one shard. Integers go
            to `key % num_shards`, others by a hash that is the same in every process.
        dense: Whether every producer shard sends to every consumer shard at
            every time, an empty block if need be.
    """

    route: Route | None = None
    key: Callable[[Any], Hashable] | None = None
    dense: bool = False

    def __post_init__(self) -> None:
        if (self.route is None) == (self.key is None):
            given = "neither" if self.route is None else "both"
            raise GraphError(
                f"an exchange needs one rule; got {given} of route and key; expected "
                f"exactly one; pass a route, or use Exchange.by_key",
                given=given,
            )
        rule = self.route if self.key is None else self.key
        if not callable(rule):
            raise GraphError(
                f"an exchange needs a function; got {rule!r}; expected a callable; "
                f"pass a route, or use Exchange.by_key",
                got=repr(rule),
            )

    @classmethod
    def by_key(cls, key: Callable[[Any], Hashable], *, dense: bool = False) -> Exchange:
        """Return the exchange on which records of equal keys meet."""
        return cls(key=key, dense=dense)

    def describe(self) -> str:
        """Return the pact as short text, without its function."""
        rule = "exchange" if self.key is None else "exchange by key"
        return _described(rule, self.dense)


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Every row to every shard of the consumer."""

    dense: bool = False

    def describe(self) -> str:
        """Return the pact as short text."""
        return _described("broadcast", self.dense)


@dataclass(frozen=True, slots=True)
class Gather:
    """Every row to one shard of the consumer."""

    shard: int = 0
    dense: bool = False

    def __post_init__(self) -> None:
        if self.shard < 0:
            raise GraphError(
                f"gather has no such shard; got {self.shard}; expected 0 or more; "
                f"name a shard of the consumer",
                shard=self.shard,
            )

    def describe(self) -> str:
        """Return the pact as short text."""
        return _described(f"gather to {self.shard}", self.dense)


@dataclass(frozen=True, slots=True)
class Direct:
    """The producer names the receiving shard of each block as it sends."""

    dense: bool = False

    def describe(self) -> str:
        """Return the pact as short text."""
        return _described("direct", self.dense)


Pact: TypeAlias = Pipeline | Exchange | Broadcast | Gather | Direct


def _described(rule: str, dense: bool) -> str:
    return f"{rule}, dense" if dense else rule
