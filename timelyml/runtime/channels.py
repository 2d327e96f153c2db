"""Channels of one run on one worker: routing out, queues in, credit between.

An `OutChannel` turns a sent payload into parts for shards and counts their
weight; the `Outbox` coalesces the parts of one step into one frame per worker
and spends credit; an `InQueue` holds what arrived until its operator runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from timelyml.errors import RoutingError
from timelyml.exchange import (
    CreditLedger,
    num_records,
    route,
    size_bytes,
    slice_rows,
    split_by_destination,
)
from timelyml.graph import Broadcast, ChannelSpec, Direct, Exchange, Gather, Pipeline
from timelyml.progress import Timestamp
from timelyml.runtime.messages import Block, Part

ALL_LOCAL_SHARDS = -1
Record = Callable[[int, Timestamp, int], None]
Target = int | npt.NDArray[np.integer[Any]] | None
"""Whom a send names on a direct edge: one shard, or one for each row."""
Routed = tuple[int, int, Any]
"""A worker, a shard of the receiver there, and the rows for it."""


class Arrival(NamedTuple):
    """One part in an input queue: where it came from and what it owes."""

    channel: int
    port: int
    peer: int
    time: Timestamp
    part: Part


@dataclass(slots=True)
class ChannelMetrics:
    """What one channel moved, seen from the sending worker."""

    records: int = 0
    parts: int = 0
    bytes_local: int = 0
    bytes_remote: int = 0
    blocks_dropped: int = 0


class OutChannel:
    """The sending side of one sharded edge on one worker."""

    def __init__(
        self,
        spec: ChannelSpec,
        *,
        owners: tuple[int, ...],
        target_location: int,
        target_name: str,
        outbox: Outbox,
        record: Record,
    ) -> None:
        self.spec = spec
        self.metrics = ChannelMetrics()
        self.is_dense = spec.pact.dense
        self._summary = None if spec.keeps_time else spec.summary
        self._owners = owners  # worker of each target shard
        self._workers = tuple(sorted(set(owners)))
        self._target_location = target_location
        self._target_name = target_name  # for error reports
        self._outbox = outbox
        self._record = record

    def push(
        self,
        source_shard: int,
        time: Timestamp,
        payload: Any,
        *,
        is_last: bool,
        target: Target = None,
    ) -> None:
        """Route one payload; an empty one crosses dense edges only."""
        sent_at = time if self._summary is None else self._summary.results_in(time)
        if sent_at is None:
            self.metrics.blocks_dropped += 1
            return
        if not (self.is_dense or num_records(payload)):
            return
        total = 0
        outbox, metrics = self._outbox, self.metrics
        for peer, shard, rows in self._route(source_shard, payload, target):
            weight = max(1, num_records(rows))
            total += weight
            size = size_bytes(rows)
            part = Part(source_shard, shard, weight, is_last, size, rows)
            outbox.add(self.spec, peer, sent_at, part)
            metrics.parts += 1
            metrics.records += weight
            if peer == outbox.worker_index:
                metrics.bytes_local += size
            else:
                metrics.bytes_remote += size
        if total:
            self._record(self._target_location, sent_at, total)

    @property
    def num_direct_shards(self) -> int | None:
        """Shards among which the sender names one; None if the edge decides."""
        return len(self._owners) if isinstance(self.spec.pact, Direct) else None

    def _route(self, source_shard: int, payload: Any, target: Target) -> list[Routed]:
        """Return only what has to be sent."""
        pact = self.spec.pact
        owners = self._owners
        if isinstance(pact, Pipeline):
            return [(owners[source_shard], source_shard, payload)]
        if isinstance(pact, Broadcast):
            return [(worker, ALL_LOCAL_SHARDS, payload) for worker in self._workers]
        if isinstance(pact, Gather):
            return [(owners[pact.shard], pact.shard, payload)]
        if isinstance(pact, Exchange):
            try:
                parts = route(pact, payload, len(owners))
            except Exception as error:
                # It fails the sender, which need not be whom the user gave the key to.
                error.add_note(
                    f"raised while rows were routed to {self._target_name!r}"
                )
                raise
            return self._spread(payload, parts)
        if isinstance(target, np.ndarray):
            parts = split_by_destination(payload, target, len(owners))
            return self._spread(payload, parts)
        return [self._direct(target, payload)]

    def _spread(self, payload: Any, parts: list[tuple[int, Any]]) -> list[Routed]:
        """Return the parts, and empty ones for all others where the edge is dense."""
        routed = [(self._owners[shard], shard, rows) for shard, rows in parts]
        if self.is_dense:  # a dense consumer counts on every block
            served = {shard for shard, _ in parts}
            for shard, worker in enumerate(self._owners):
                if shard not in served:
                    routed.append((worker, shard, slice_rows(payload, 0, 0)))
        return routed

    def _direct(self, target: int | None, payload: Any) -> Routed:
        num_shards = len(self._owners)
        if target is None or not 0 <= target < num_shards:
            msg = (
                f"channel {self.spec.index} has no such shard; got {target!r}; "
                f"expected 0 to {num_shards - 1}; name shards with send_to or send_rows"
            )
            raise RoutingError(msg, shard=target, num_shards=num_shards)
        return self._owners[target], target, payload


class Outbox:
    """Parts on their way out of one worker, by receiving worker.

    Parts beyond the credit of their channel wait here; their weight is already
    counted, so no frontier passes them.
    """

    def __init__(
        self,
        worker_index: int,
        limit_bytes: int,
        deliver: Callable[[int, int, Timestamp, Part], None],
    ) -> None:
        self.worker_index = worker_index
        self.peak_outstanding_bytes = 0  # the most that one channel and peer had
        self._limit_bytes = limit_bytes
        self._deliver = deliver
        self._frames: dict[int, dict[tuple[int, Timestamp], list[Part]]] = {}
        self._frame_bytes: dict[int, int] = {}
        self._ledgers: dict[tuple[int, int], CreditLedger] = {}
        self._waiting: dict[tuple[int, int], deque[tuple[Timestamp, Part]]] = {}

    def add(self, spec: ChannelSpec, peer: int, time: Timestamp, part: Part) -> None:
        """Queue one part for `peer`, now or when there is credit."""
        size = part.size_bytes
        if spec.is_cyclic:  # never blocks: the receiver spills instead
            self._put(spec.index, peer, time, part)
            return
        key = (spec.index, peer)
        ledger = self._ledgers.get(key)
        if ledger is None:
            ledger = self._ledgers[key] = CreditLedger(self._limit_bytes)
        waiting = self._waiting.get(key)
        if waiting or not ledger.can_send(size):
            if waiting is None:
                waiting = self._waiting[key] = deque()
            waiting.append((time, part))
            return
        self._spend(ledger, size)
        self._put(spec.index, peer, time, part)

    def _spend(self, ledger: CreditLedger, size: int) -> None:
        ledger.spend(size)
        self.peak_outstanding_bytes = max(
            self.peak_outstanding_bytes, ledger.outstanding_bytes
        )

    def _put(self, channel: int, peer: int, time: Timestamp, part: Part) -> None:
        if peer == self.worker_index:
            self._deliver(channel, peer, time, part)
            return
        blocks = self._frames.setdefault(peer, {})
        blocks.setdefault((channel, time), []).append(part)
        self._frame_bytes[peer] = self._frame_bytes.get(peer, 0) + part.size_bytes

    def refund(self, channel: int, peer: int, size: int) -> bool:
        """Give credit back; True if the last that waited for it on a channel leaves."""
        key = (channel, peer)
        ledger = self._ledgers[key]
        ledger.refund(size)
        waiting = self._waiting.get(key)
        if not waiting:
            return False  # nobody was kept from sending
        while waiting and ledger.can_send(waiting[0][1].size_bytes):
            time, part = waiting.popleft()
            self._spend(ledger, part.size_bytes)
            self._put(channel, peer, time, part)
        if waiting:
            return False
        del self._waiting[key]
        return True

    def is_blocked(self, channel: int) -> bool:
        """Whether anything sent on the channel waits for credit."""
        return any(key[0] == channel for key in self._waiting)

    @property
    def has_waiting(self) -> bool:
        """Whether any channel waits for credit; cheap, for the hot path."""
        return bool(self._waiting)

    def waiting_bytes(self) -> int:
        """Bytes that wait for credit on this worker."""
        return sum(
            part.size_bytes for queue in self._waiting.values() for _, part in queue
        )

    @property
    def has_frames(self) -> bool:
        """Whether anything is ready to leave this worker."""
        return bool(self._frames)

    def take(self) -> list[tuple[int, tuple[Block, ...], int]]:
        """Return (worker, blocks, bytes) of everything ready, and forget it."""
        if not self._frames:
            return []
        frames, self._frames = self._frames, {}
        sizes, self._frame_bytes = self._frame_bytes, {}
        taken = []
        for peer, found in frames.items():
            blocks = [
                Block(channel, time, tuple(parts))
                for (channel, time), parts in found.items()
            ]
            taken.append((peer, tuple(blocks), sizes[peer]))
        return taken
