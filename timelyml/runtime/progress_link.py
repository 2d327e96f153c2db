"""How one worker's progress leaves and enters a run, in both modes.

In broadcast mode a batch goes to every worker, this one included, and to the
controller; in accumulator mode to the controller alone, and a worker's own
changes come back through it. Either way a batch is applied whole, in its sender's
sequence, and never before it came in by this door.

Source:
    Naiad, section 3.3 (broadcasting and accumulating progress updates).
"""

from __future__ import annotations

from collections.abc import Callable

from timelyml.progress import (
    ProgressBatch,
    ProgressInbox,
    ProgressLog,
    Timestamp,
    Tracker,
)
from timelyml.runtime.config import ProgressMode

Changes = list[tuple[int, Timestamp, int]]
CONTROLLER_GAP_S = 0.002  # a controller that only watches need not hear each batch


class ProgressLink:
    """The progress of one run on one worker."""

    def __init__(
        self,
        worker_index: int,
        generation: int,
        mode: ProgressMode,
        tracker: Tracker,
        clock: Callable[[], float],
        *,
        is_fed: bool,
    ) -> None:
        # A driver that feeds the run waits for it to close epochs.
        self._gap_s = 0.0 if is_fed else CONTROLLER_GAP_S
        self.is_broadcast = mode == "broadcast"
        self.num_batches = 0
        self.num_changes = 0
        self.num_messages = 0  # that carried a batch and nothing else
        self.num_bytes = 0  # of those messages; 0 where they travel by reference
        self.num_riders = 0  # batches that rode along with data
        self._tracker = tracker
        self._clock = clock
        self._log = ProgressLog(worker_index, generation)
        self._inbox = ProgressInbox(generation)
        self._ready: list[ProgressBatch] = []
        # In broadcast mode others get merged batches: whole ones, in order, so that
        # each is a prefix of what this worker told itself.
        self._peer_log = ProgressLog(worker_index, generation)
        self._watch_log = ProgressLog(worker_index, generation)
        self._has_news = False
        self._told_at = -self._gap_s
        self.record = self._log.record

    def accept(self, batch: ProgressBatch) -> None:
        """Take a batch that arrived; it is applied by `apply`."""
        self._ready.extend(self._inbox.accept(batch))

    @property
    def has_arrived(self) -> bool:
        """Whether there is something for `apply`."""
        return bool(self._ready)

    def apply(self) -> Changes | None:
        """Apply everything that arrived; the frontier changes, None if nothing did."""
        if not self._ready:
            return None
        ready, self._ready = self._ready, []
        for batch in ready:
            self._tracker.update_many(batch.changes)
        return self._tracker.propagate()

    def tell_itself(self) -> bool:
        """In broadcast mode: end a round, if its changes can move a frontier.

        They come back through `apply`, like everybody's; True if they do.
        """
        if not self.is_broadcast:
            return False
        batch = self._log.take(self._tracker)
        if batch is None:
            return False
        self._ready.append(batch)
        self._peer_log.record_many(batch.changes)
        self._watch_log.record_many(batch.changes)
        self._has_news = True
        return True

    def take(self) -> ProgressBatch | None:
        """The batch to send now: to every peer, or to the controller."""
        if self.is_broadcast:
            batch = self._peer_log.take(self._tracker, force=True)
        else:
            batch = self._log.take(self._tracker)
        if batch is not None:
            self.num_batches += 1
            self.num_changes += len(batch.changes)
        return batch

    def controller_due(self) -> float | None:
        """In broadcast mode: when the controller is to be told, if there is news."""
        return self._told_at + self._gap_s if self._has_news else None

    def take_for_controller(self) -> ProgressBatch | None:
        """In broadcast mode: the merged batch that is due to the controller."""
        if not self._has_news:
            return None
        now = self._clock()
        if now - self._told_at < self._gap_s:
            return None
        self._told_at = now
        self._has_news = False
        return self._watch_log.take(self._tracker, force=True)
