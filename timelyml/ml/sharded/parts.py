"""How shards share out the leading axis of a parameter, and which of them hold copies.

Each shard has an equal part of its own. Beside it, it may hold copies of others' places:
an expert that stands on several shards. Whoever holds a place adds up the gradients of all
who do, in one order, and takes the same step; so copies never differ, and only the part
of its own is told, saved, and counted in a norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from timelyml.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one parameter.

    Attributes:
        length: Of the leading axis.
        num_shards: Divides it.
        copies: By shard, the places that it holds beside its own part; or none at all.
    """

    length: int
    num_shards: int
    copies: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.copies:
            return
        if len(self.copies) != self.num_shards:
            raise _wrong(
                f"{len(self.copies)} lists", f"one for each of {self.num_shards} shards"
            )
        for shard, held in enumerate(self.copies):
            for place in held:
                if not 0 <= place < self.length:
                    raise _wrong(f"place {place}", f"0 to {self.length - 1}")
                if place // self.own == shard or held.count(place) > 1:
                    raise _wrong(f"place {place} on shard {shard} twice", "it once")

    @property
    def own(self) -> int:
        """How many places each shard has of its own; they come first."""
        return self.length // self.num_shards

    def held(self, array: Any, shard: int) -> Any:
        """Give what a shard holds of a whole array."""
        mine = array[shard * self.own : (shard + 1) * self.own]
        copied = self.copies[shard] if self.copies else ()
        return np.concatenate([mine, array[list(copied)]]) if copied else mine

    def places(self, shard: int) -> tuple[int, ...]:
        """Give the places of what a shard holds, in its order."""
        copied = self.copies[shard] if self.copies else ()
        return (*range(shard * self.own, (shard + 1) * self.own), *copied)

    def holders(self) -> dict[int, tuple[int, ...]]:
        """Give the shards of each place that stands on several, its own one first."""
        found: dict[int, tuple[int, ...]] = {}
        for shard, held in enumerate(self.copies):
            for place in held:
                found[place] = (*found.get(place, (place // self.own,)), shard)
        return found

    def mail(self, shard: int) -> list[tuple[int, int, int]]:
        """Say what a shard tells others: where it lies here, its place, and whom."""
        holders = self.holders()
        return [
            (index, place, other)
            for index, place in enumerate(self.places(shard))
            for other in holders.get(place, ())
            if other != shard
        ]

    def added(
        self, shard: int, own: Any, others: Mapping[tuple[int, int], Any]
    ) -> Any | None:
        """Add up the gradients of what a shard holds, for each place in the same order.

        Args:
            shard: Whose sums are wanted.
            own: Its gradients of all that it holds; None if it had nothing to compute.
            others: By place and shard, gradients of others.
        """
        if own is None and not others:
            return None
        holders = self.holders()
        some = own if own is not None else next(iter(others.values()))
        shape = (
            some.shape if own is not None else (len(self.places(shard)), *some.shape)
        )
        total = np.zeros(shape, some.dtype) if own is None else np.array(own)
        for index, place in enumerate(self.places(shard)):
            found = [
                own[index] if other == shard else others[place, other]
                for other in holders.get(place, ())
                if (own is not None if other == shard else (place, other) in others)
            ]
            if found:
                total[index] = found[0]
                for part in found[1:]:
                    total[index] += part
        return total


def told(held: Any, parts: Parts | None) -> NDArray[Any]:
    """Give a copy of what a shard tells of what it holds: nothing that others own."""
    return np.array(held if parts is None else held[: parts.own])


def _wrong(got: str, expected: str) -> ConfigError:
    return ConfigError(
        f"copies of a parameter cannot be placed; got {got}; expected {expected}; "
        "correct copies",
        option="copies",
    )
