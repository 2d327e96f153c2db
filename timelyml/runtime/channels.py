"""Channels of one run on one worker: routing out, queues in, credit between.

An `OutChannel` turns a sent payload into parts for shards and counts their
weight; the `Outbox` coalesces the parts of one step into one frame per worker
and spends credit; an `InQueue` holds what arrived until its operator runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from timelyml.errors import RoutingError
from timelyml.exchange import (
    Away,
    CreditLedger,
    num_records,
    route,
    size_bytes,
    slice_rows,
    split_by_destination,
)
from timelyml.graph import (
    Broadcast,
    ChannelSpec,
    Direct,
    Exchange,
    Gather,
    Pact,
    Pipeline,
)
from timelyml.progress import Timestamp, new_tuple
from timelyml.runtime.failure import ROUTING_NOTE
from timelyml.runtime.messages import Block, Part

ALL_LOCAL_SHARDS = -1
Bytes: TypeAlias = npt.NDArray[np.uint8]
Memory: TypeAlias = Callable[[int], Bytes | None]
"""Returns so many bytes that other workers on this host see too, if there are any."""
Record = Callable[[int, Timestamp, int], None]
Target = int | npt.NDArray[np.integer[Any]] | None
"""Whom a send names on a direct edge: one shard, or one for each row."""
Routed = tuple[int, int, Any]
"""A worker, a shard of the receiver there, and the rows for it."""
Route: TypeAlias = Callable[[Any, int, Any, Target], list[Routed]]
"""From a channel, a source shard, a payload and whom it names, to where rows go."""


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
        self._away = _away_from(outbox, owners)
        self._record = record
        # Chosen once: asking for the kind of pact at every block takes 0.3 us.
        self._route = self._route_by(spec.pact)

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
        metrics = self.metrics
        if sent_at is None:
            metrics.blocks_dropped += 1
            return
        num_rows = len(payload) if type(payload) is list else num_records(payload)
        if not (num_rows or self.is_dense):
            return
        total = 0
        outbox, spec = self._outbox, self.spec
        for peer, shard, rows in self._route(self, source_shard, payload, target):
            weight = max(1, num_rows if rows is payload else num_records(rows))
            total += weight
            size = size_bytes(rows)
            part = new_tuple(Part, (source_shard, shard, weight, is_last, size, rows))
            outbox.add(spec, peer, sent_at, part)
            metrics.parts += 1
            if peer == outbox.worker_index:
                metrics.bytes_local += size
            else:
                metrics.bytes_remote += size
        if total:
            metrics.records += total
            self._record(self._target_location, sent_at, total)

    @property
    def num_direct_shards(self) -> int | None:
        """Shards among which the sender names one; None if the edge decides."""
        return len(self._owners) if isinstance(self.spec.pact, Direct) else None

    # Each returns only what has to be sent.

    def _to_same_shard(
        self, source_shard: int, payload: Any, _: Target
    ) -> list[Routed]:
        return [(self._owners[source_shard], source_shard, payload)]

    def _to_all_shards(self, _: int, payload: Any, __: Target) -> list[Routed]:
        return [(worker, ALL_LOCAL_SHARDS, payload) for worker in self._workers]

    def _to_one_shard(self, _: int, payload: Any, __: Target) -> list[Routed]:
        pact = self.spec.pact
        assert isinstance(pact, Gather)  # noqa: S101  for the type checker
        return [(self._owners[pact.shard], pact.shard, payload)]

    def _by_rule(self, _: int, payload: Any, __: Target) -> list[Routed]:
        pact = self.spec.pact
        assert isinstance(pact, Exchange)  # noqa: S101  for the type checker
        try:
            parts = route(pact, payload, len(self._owners), away=self._away)
        except Exception as error:
            # It fails the sender, which need not be whom the user gave the key to.
            error.add_note(f"{ROUTING_NOTE}{self._target_name!r}")
            raise
        if len(parts) == 1 and not self.is_dense:  # tiny epochs are many
            shard, rows = parts[0]
            return [(self._owners[shard], shard, rows)]
        return self._spread(payload, parts)

    def _as_named(self, _: int, payload: Any, target: Target) -> list[Routed]:
        if isinstance(target, np.ndarray):
            parts = split_by_destination(
                payload, target, len(self._owners), away=self._away
            )
            return self._spread(payload, parts)
        return [self._direct(target, payload)]

    @staticmethod
    def _route_by(pact: Pact) -> Route:
        """Return the method for a pact; mypyc takes no table of them in the class."""
        routes: dict[type, Route] = {
            Pipeline: OutChannel._to_same_shard,
            Broadcast: OutChannel._to_all_shards,
            Gather: OutChannel._to_one_shard,
            Exchange: OutChannel._by_rule,
            Direct: OutChannel._as_named,
        }
        return routes[type(pact)]

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
        memory: Memory,
    ) -> None:
        self.worker_index = worker_index
        self.memory = memory  # for what is to leave this worker
        self._limit_bytes = limit_bytes
        self._deliver = deliver
        self._frames: dict[int, dict[tuple[int, Timestamp], list[Part]]] = {}
        self._frame_bytes: dict[int, int] = {}
        self._ledgers: dict[tuple[int, int], CreditLedger] = {}
        # By channel and peer; most often empty, which is looked at before each step.
        self.waiting: dict[tuple[int, int], deque[tuple[Timestamp, Part]]] = {}

    def add(self, spec: ChannelSpec, peer: int, time: Timestamp, part: Part) -> None:
        """Queue one part for `peer`, now or when there is credit."""
        channel = spec.index
        if not spec.is_cyclic:  # else it never blocks: the receiver spills instead
            key = (channel, peer)
            ledger = self._ledgers.get(key)
            if ledger is None:
                ledger = self._ledgers[key] = CreditLedger(self._limit_bytes)
            if (self.waiting and key in self.waiting) or not ledger.can_send(
                part.size_bytes
            ):
                self.waiting.setdefault(key, deque()).append((time, part))
                return
            ledger.spend(part.size_bytes)
        self._put(channel, peer, time, part)

    def peaks_bytes(self) -> list[int]:
        """The most that was under way on each channel to each peer at any time."""
        return [ledger.peak_bytes for ledger in self._ledgers.values()]

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
        if not self.waiting or key not in self.waiting:
            return False  # nobody was kept from sending
        waiting = self.waiting[key]
        while waiting and ledger.can_send(waiting[0][1].size_bytes):
            time, part = waiting.popleft()
            ledger.spend(part.size_bytes)
            self._put(channel, peer, time, part)
        if waiting:
            return False
        del self.waiting[key]
        return True

    def is_blocked(self, channel: int) -> bool:
        """Whether anything sent on the channel waits for credit."""
        return any(key[0] == channel for key in self.waiting)

    def waiting_bytes(self) -> int:
        """Bytes that wait for credit on this worker."""
        return sum(
            part.size_bytes for queue in self.waiting.values() for _, part in queue
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


def _away_from(outbox: Outbox, owners: tuple[int, ...]) -> Away | None:
    is_away = np.array(owners) != outbox.worker_index
    return Away(is_away, outbox.memory) if is_away.any() else None
