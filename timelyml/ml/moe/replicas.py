"""Experts that stand on several shards, since many tokens choose them.

Every expert has a shard of its own, by its number; a busy one may have more. Rows that
choose it are dealt out to these in turn, in the order of tokens, on each shard of tokens by
itself: so where a row goes depends on nothing but the choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from timelyml.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Where experts stand.

    Attributes:
        num_experts: How many there are.
        num_shards: Divides them.
        replicas: Experts that stand on several shards, and on how many.
    """

    num_experts: int
    num_shards: int
    replicas: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for expert, count in self.replicas:
            if not _is_int(expert) or not 0 <= expert < self.num_experts:
                raise _wrong(
                    f"replicas of expert {expert!r}", f"0 to {self.num_experts - 1}"
                )
            if not _is_int(count) or not 1 <= count <= self.num_shards:
                raise _wrong(
                    f"{count!r} replicas of expert {expert}",
                    f"1 to {self.num_shards}, the number of shards",
                )

    @classmethod
    def of(
        cls,
        num_experts: int,
        num_shards: int,
        replicas: Mapping[int, int] | Sequence[tuple[int, int]],
    ) -> ExpertPlacement:
        """Take what a user gave; equal for equal replicas."""
        try:
            given = tuple((_plain(e), _plain(n)) for e, n in dict(replicas).items())
        except (TypeError, ValueError):
            raise _wrong(repr(replicas), "numbers of shards by expert") from None
        checked = cls(num_experts, num_shards, given)
        several = sorted(pair for pair in checked.replicas if pair[1] > 1)
        return cls(num_experts, num_shards, tuple(several))

    @property
    def per_shard(self) -> int:
        """Experts that a shard has of its own."""
        return self.num_experts // self.num_shards

    @property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """By shard: experts of which it holds a replica; nothing without replicas."""
        if not self.replicas:
            return ()
        held: list[list[int]] = [[] for _ in range(self.num_shards)]
        for expert, shards in self.shards().items():
            for shard in shards[1:]:
                held[shard].append(expert)
        return tuple(map(tuple, held))

    def shards(self) -> dict[int, tuple[int, ...]]:
        """Give the shards of each expert with replicas, its own one first.

        Replicas go where fewest are, and as far apart as they can.

        >>> ExpertPlacement(8, 4, ((0, 2), (5, 3))).shards()
        {0: (0, 2), 5: (2, 3, 0)}
        """
        load = [0] * self.num_shards
        found = {}
        for expert, count in self.replicas:
            home = expert // self.per_shard
            chosen = [home]
            for turn in range(1, count):
                goal = home + turn * self.num_shards // count
                free = [
                    (load[shard % self.num_shards], shard - goal, shard)
                    for shard in range(goal, goal + self.num_shards)
                    if shard % self.num_shards not in chosen
                ]
                shard = min(free)[2] % self.num_shards
                load[shard] += 1
                chosen.append(shard)
            found[expert] = tuple(chosen)
        return found

    def place(self, chosen: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Give the shard of each choice, and the place of its expert there.

        Args:
            chosen: `(tokens, top_k)` experts.
            kept: `(tokens, top_k) bool`; only these take turns.
        """
        to, rank = jnp.divmod(chosen, self.per_shard)
        copies = self.copies
        for expert, shards in self.shards().items():
            ranks = [
                self.per_shard + copies[shard].index(expert) for shard in shards[1:]
            ]
            mine = (chosen == expert) & kept
            turn = (jnp.cumsum(mine.reshape(-1)) - 1).reshape(mine.shape) % len(shards)
            to = jnp.where(mine, jnp.array(shards, to.dtype)[turn], to)
            own = expert % self.per_shard
            rank = jnp.where(mine, jnp.array([own, *ranks], rank.dtype)[turn], rank)
        return to, rank


def replicas_by_load(
    counts: Sequence[int] | np.ndarray, extra: int, *, num_shards: int
) -> dict[int, int]:
    """Choose replicas by how many rows each expert had: for `MoE(replicas=...)`.

    One after the other goes to the expert with most rows for each of its replicas, the
    first of equals. Take the counts of some steps and resume from their checkpoint.

    Args:
        counts: `(experts,)` rows of each, as `Routing.sums.counts` has them.
        extra: How many replicas to add, beside one of each.
        num_shards: An expert can stand on so many.

    >>> replicas_by_load([90, 10, 40, 20], 3, num_shards=4)
    {0: 3, 2: 2}
    """
    rows = np.asarray(counts)
    is_right = rows.ndim == 1 and rows.dtype.kind in "iuf" and bool((rows >= 0).all())
    most = len(rows) * (num_shards - 1) if is_right else 0
    if not is_right or not _is_int(extra) or not 0 <= extra <= most:
        raise _wrong(
            f"{extra!r} more for counts {rows.tolist()} on {num_shards} shards",
            f"0 to {most}, and one count, 0 or more, for each expert",
        )
    replicas = np.ones(len(rows), int)
    for _ in range(extra):
        share = np.where(replicas < num_shards, rows / replicas, -1.0)
        replicas[int(np.argmax(share))] += 1
    return {expert: int(n) for expert, n in enumerate(replicas) if n > 1}


def _plain(value: Any) -> Any:
    """Give an integer of numpy as Python's own; anything else as it is."""
    return int(value) if isinstance(value, np.integer) else value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(got: str, expected: str) -> ConfigError:
    return ConfigError(
        f"moe cannot place its replicas; got {got}; expected {expected}; correct "
        "replicas",
        option="replicas",
    )
