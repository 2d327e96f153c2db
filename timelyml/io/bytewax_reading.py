"""How one shard reads its partitions: in turn, at the times and epochs that are due."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from timelyml.exchange import num_records
from timelyml.io.bytewax_positions import Live, Position
from timelyml.io.bytewax_shapes import SourcePartition
from timelyml.progress import Capability
from timelyml.runtime.shard import Shard

SHORTEST_WAIT_S = 0.001
"""Before a partition that had nothing is asked again; doubles while it has nothing."""

LONGEST_WAIT_S = 0.05
SILENCE_S = 0.05
"""How long a shard may be silent in an epoch that ends by the number of batches."""


@dataclass(frozen=True, slots=True)
class EpochRule:
    """When an epoch of a shard ends: after batches, after seconds, or whichever first.

    Attributes:
        every: Batches.
        interval_s: Seconds.
    """

    every: int | None
    interval_s: float | None


@dataclass(slots=True)
class _Open:
    """One partition that is being read, and its methods, which are called often."""

    key: str
    position: Position
    next_batch: Callable[[], Iterable[Any]]
    next_awake: Callable[[], datetime | None] | None
    due: float = 0.0
    wait_s: float = SHORTEST_WAIT_S


@dataclass(slots=True)
class _Epoch:
    """The present epoch of a shard."""

    began: float
    number: int = 0
    num_batches: int = 0
    last_sign_of_life: float = field(default=0.0)


class ShardReader(Live):
    """What one shard reads, and the capability by which it sends.

    Args:
        who: The operator, for messages.
        rule: When epochs end.
        capability: The right to send from epoch 0 on.
        now: The worker's clock.
        check: Refuses blocks of other columns than the source's.
    """

    def __init__(
        self,
        who: str,
        rule: EpochRule,
        capability: Capability,
        now: float,
        check: Callable[[Any], None],
    ) -> None:
        self._check = check
        self.listings: list[Any] = []
        self._who = who
        self._rule = rule
        self._capability: Capability | None = capability
        self._epoch = _Epoch(now, last_sign_of_life=now)
        self._open: list[_Open] = []
        self._turn = 0
        self._timer: float | None = None
        self._looked_at = datetime.min.replace(tzinfo=UTC)

    @property
    def is_over(self) -> bool:
        """Whether nothing will be sent any more."""
        return self._capability is None

    def open(self, key: str, partition: SourcePartition, position: Position) -> None:
        """Read a partition from now on."""
        next_awake = getattr(partition, "next_awake", None)
        opened = _Open(key, position, partition.next_batch, next_awake)
        self._set_due(opened, self._epoch.began, had_items=True)
        position.follow(partition)
        self._open.append(opened)

    def turn(self, shard: Shard) -> None:
        """Read partitions that are due, one batch after another, and send them."""
        while self._read_one(shard):
            if not shard.may_go_on():
                shard.activate()
                break
        if self._capability is not None:  # at once: what is held uses up credit
            self._capability.downgrade(self._epoch.number)

    def _read_one(self, shard: Shard) -> bool:
        """Ask the next partition that is due for one batch; True if one was asked."""
        if self._capability is None:
            return False
        now = shard.now()
        if self._timer is not None and now >= self._timer:
            self._timer = None
        if not self._open:
            self.end()
            return False
        if self._rule.interval_s is not None:
            self._end_epoch_in_time(shard, now, self._rule.interval_s)
        if not shard.can_start_epoch(self._epoch.number):
            return False  # activated again once it may
        opened = self._next_due(now)
        if opened is None:
            self._be_silent(shard, now)
            return False
        self._ask(shard, opened, now)
        return True

    def end(self) -> None:
        """Close every partition and give up the right to send."""
        if self._capability is None:
            return
        for opened in self._open:
            opened.position.settle(self._what(opened))
        self._open.clear()
        self._capability.release()
        self._capability = None

    def _ask(self, shard: Shard, opened: _Open, now: float) -> None:
        try:
            batch = opened.next_batch()
            payload = batch if type(batch) is list else _payload_of(batch)
        except StopIteration:
            opened.position.settle(self._what(opened))
            self._open.remove(opened)
            return
        except Exception as error:
            error.add_note(f"while {self._what(opened)} was read")
            raise
        had_items = num_records(payload) > 0
        self._set_due(opened, now, had_items=had_items)
        if had_items:
            self._check(payload)
            shard.output().send(self._epoch.number, payload)
            self._epoch.num_batches += 1
            self._epoch.last_sign_of_life = now
            if self._epoch.num_batches == self._rule.every:
                self._begin_epoch(self._epoch.number + 1, now)

    def _set_due(self, opened: _Open, now: float, *, had_items: bool) -> None:
        """Note when a partition is to be asked again; it says so, or it is soon."""
        wait_s = 0.0
        if had_items:
            opened.wait_s = SHORTEST_WAIT_S
        else:
            wait_s = opened.wait_s
            opened.wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        if opened.next_awake is not None:
            try:
                awake = opened.next_awake()
                if awake is not None:
                    wait_s = 0.0 if had_items else SHORTEST_WAIT_S
                    # One that has been spares a look at the clock, and 1 us.
                    if awake > self._looked_at:
                        wait_s = max(self._seconds_until(awake), wait_s)
            except Exception as error:
                error.add_note(f"while {self._what(opened)} was asked when it is due")
                raise
        opened.due = now + wait_s

    def _seconds_until(self, awake: datetime) -> float:
        """How long it is until then; below 0 if it has been."""
        self._looked_at = datetime.now(UTC)
        return (awake - self._looked_at).total_seconds()

    def _next_due(self, now: float) -> _Open | None:
        """Choose the next partition in turn whose time has come."""
        count = len(self._open)
        if count == 1:
            return self._open[0] if self._open[0].due <= now else None
        for step in range(count):
            index = (self._turn + step) % count
            if self._open[index].due <= now:
                self._turn = index + 1
                return self._open[index]
        return None

    def _begin_epoch(self, number: int, now: float) -> None:
        epoch = self._epoch
        epoch.began = epoch.last_sign_of_life = now
        epoch.number, epoch.num_batches = number, 0

    def _end_epoch_in_time(self, shard: Shard, now: float, interval_s: float) -> None:
        if now - self._epoch.began < interval_s:
            return
        if shard.can_start_epoch(self._epoch.number):  # or it would run away
            self._begin_epoch(self._epoch.number + 1, now)

    def _be_silent(self, shard: Shard, now: float) -> None:
        """Wait for the next partition that is due, or for the end of the epoch."""
        wake_at = min(opened.due for opened in self._open)
        epoch = self._epoch
        if self._rule.interval_s is not None:
            wake_at = min(wake_at, epoch.began + self._rule.interval_s)
        elif epoch.num_batches or shard.num_shards > 1:
            silent_until = epoch.last_sign_of_life + SILENCE_S
            wake_at = min(wake_at, silent_until)
            if now >= silent_until:
                wake_at = now + SILENCE_S
                self._let_others_pass(shard, now)
        if self._timer is None or wake_at < self._timer:
            self._timer = wake_at
            shard.activate_after(max(wake_at - now, 0.0))

    def _let_others_pass(self, shard: Shard, now: float) -> None:
        """Open as many epochs as are allowed: other shards may have much to send."""
        following = self._epoch.number + 1
        while shard.num_shards > 1 and shard.can_start_epoch(following + 1):
            following += 1
        self._begin_epoch(following, now)

    def _what(self, opened: _Open) -> str:
        return f"partition {opened.key!r} of {self._who!r}"


def _payload_of(batch: Iterable[Any]) -> Any:
    """Return a batch as records, or as columns if it is arrays."""
    if isinstance(batch, (list, np.ndarray)):
        return batch
    if isinstance(batch, dict) and any(
        isinstance(column, np.ndarray) for column in batch.values()
    ):
        return batch
    return list(batch)
