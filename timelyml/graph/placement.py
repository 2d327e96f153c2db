"""Which worker holds which shard of an operator.

A placement is a rule, not a table: its size does not depend on the number of
shards, except for `Custom`, which is the user's own table. Every worker computes
the same answer from the same three numbers, so nothing is sent. A rule that users
wrote themselves is asked once, by the driver.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from timelyml.errors import PlacementError

PLACEMENT_RULE: Final = (
    "a Placement, such as RoundRobin(), Contiguous() or Custom(table)"
)


@runtime_checkable
class Placement(Protocol):
    """A rule that assigns the shards of one operator to workers."""

    def worker_of(self, shard: int, num_shards: int, num_workers: int) -> int:
        """Return the worker that holds `shard`."""
        ...

    def shards_of(
        self, worker: int, num_shards: int, num_workers: int
    ) -> Sequence[int]:
        """Return the shards that `worker` holds, ascending."""
        ...

    def check(self, num_shards: int, num_workers: int | None, *, who: str) -> None:
        """Raise if `who` cannot be placed so; `num_workers` None is not known yet."""
        ...

    def describe(self) -> str:
        """Return the rule as short text, equal for equal rules."""
        ...


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Shard `s` on worker `s % num_workers`: the default, balanced to one shard.

    >>> list(RoundRobin().shards_of(1, num_shards=8, num_workers=3))
    [1, 4, 7]
    """

    def worker_of(self, shard: int, num_shards: int, num_workers: int) -> int:
        """Return the worker that holds `shard`."""
        _check_shard(shard, num_shards)
        return shard % num_workers

    def shards_of(self, worker: int, num_shards: int, num_workers: int) -> range:
        """Return the shards that `worker` holds, ascending."""
        return range(worker, num_shards, num_workers)

    def check(self, num_shards: int, num_workers: int | None, *, who: str) -> None:
        """Accept any shape."""

    def describe(self) -> str:
        """Return the rule as short text."""
        return "round robin"


@dataclass(frozen=True, slots=True)
class Contiguous:
    """Neighbouring shards on one worker, balanced to one shard.

    >>> [list(Contiguous().shards_of(w, 8, 3)) for w in range(3)]
    [[0, 1, 2], [3, 4, 5], [6, 7]]
    """

    def worker_of(self, shard: int, num_shards: int, num_workers: int) -> int:
        """Return the worker that holds `shard`."""
        _check_shard(shard, num_shards)
        return shard * num_workers // num_shards

    def shards_of(self, worker: int, num_shards: int, num_workers: int) -> range:
        """Return the shards that `worker` holds, ascending."""
        # -(-a // b) rounds up: the first shard s with s * workers >= worker * shards
        return range(
            -(-worker * num_shards // num_workers),
            -(-(worker + 1) * num_shards // num_workers),
        )

    def check(self, num_shards: int, num_workers: int | None, *, who: str) -> None:
        """Accept any shape."""

    def describe(self) -> str:
        """Return the rule as short text."""
        return "contiguous"


@dataclass(frozen=True, slots=True)
class Custom:
    """Shard `s` on worker `assignment[s]`."""

    assignment: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.assignment, Iterable):
            raise PlacementError(
                f"custom placement has no table; got {self.assignment!r}; expected the "
                f"index of a worker for each shard; list them",
                assignment=repr(self.assignment),
            )
        object.__setattr__(self, "assignment", tuple(self.assignment))
        for shard, worker in enumerate(self.assignment):
            if not isinstance(worker, int) or worker < 0:
                raise PlacementError(
                    f"custom placement has no worker for shard {shard}; got "
                    f"{worker!r}; expected an index of 0 or more; name a worker",
                    shard=shard,
                    worker=worker,
                )

    def worker_of(
        self,
        shard: int,
        num_shards: int,  # noqa: ARG002 - the table says it all
        num_workers: int,  # noqa: ARG002 - the table says it all
    ) -> int:
        """Return the worker that holds `shard`."""
        _check_shard(shard, len(self.assignment))
        return self.assignment[shard]

    def shards_of(
        self,
        worker: int,
        num_shards: int,  # noqa: ARG002 - the table says it all
        num_workers: int,  # noqa: ARG002 - the table says it all
    ) -> tuple[int, ...]:
        """Return the shards that `worker` holds, ascending."""
        return tuple(s for s, holder in enumerate(self.assignment) if holder == worker)

    def check(self, num_shards: int, num_workers: int | None, *, who: str) -> None:
        """Refuse a table of another length or with a worker that does not exist."""
        if len(self.assignment) != num_shards:
            raise PlacementError(
                f"{who} is placed by a table of the wrong length; got "
                f"{len(self.assignment)}; expected {num_shards}, one entry a shard; "
                f"correct the table or num_shards",
                got=len(self.assignment),
                num_shards=num_shards,
            )
        if num_workers is not None and max(self.assignment) >= num_workers:
            worker = max(self.assignment)
            raise PlacementError(
                f"{who} is placed on a worker that does not exist; got {worker}; "
                f"expected less than {num_workers}; start more workers or move it",
                worker=worker,
                num_workers=num_workers,
            )

    def describe(self) -> str:
        """Return the length and a digest of the table, whatever its size."""
        table = ",".join(map(str, self.assignment)).encode()
        return f"custom {hashlib.sha256(table).hexdigest()[:12]}"


def is_placement(value: object) -> bool:
    """Whether `value` is a placement; a class of placements is none."""
    return isinstance(value, Placement) and not isinstance(value, type)


def settled(
    placement: Placement, num_shards: int, num_workers: int, *, who: str
) -> Placement:
    """Return a user's own rule as a table, so that no process has to ask it again.

    A rule may come to another answer elsewhere, by hashes of strings for one.

    Raises:
        PlacementError: The rule names something that is no worker.
    """
    if isinstance(placement, RoundRobin | Contiguous | Custom):
        return placement
    found = (
        placement.worker_of(shard, num_shards, num_workers)
        for shard in range(num_shards)
    )
    table = Custom(tuple(found))
    table.check(num_shards, num_workers, who=who)
    return table


def _check_shard(shard: int, num_shards: int) -> None:
    if not 0 <= shard < num_shards:
        raise PlacementError(
            f"no worker holds the shard; got {shard}; expected 0 or more and less "
            f"than {num_shards}; name an existing shard",
            shard=shard,
            num_shards=num_shards,
        )
