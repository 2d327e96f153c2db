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
    Change,
    ProgressBatch,
    ProgressInbox,
    ProgressLog,
    Timestamp,
    Tracker,
    new_tuple,
)
from timelyml.runtime.config import ProgressMode

Changes = list[tuple[int, Timestamp, int]]
# A controller that only watches need not hear each batch: at first it hears within the
# least gap, and after twice the gap before while news comes without end.
LEAST_GAP_S, LARGEST_GAP_S = 0.002, 0.016


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
        has_peers: bool,
    ) -> None:
        # A driver that feeds the run waits for it to close epochs.
        self._least_gap_s = self._gap_s = 0.0 if is_fed else LEAST_GAP_S
        self.is_broadcast = mode == "broadcast"
        self._has_peers = has_peers
        self.num_batches = 0
        self.num_changes = 0
        self.num_messages = 0  # that carried a batch and nothing else
        self.num_bytes = 0  # of those messages; 0 where they travel by reference
        self.num_riders = 0  # batches that rode along with data
        self._tracker = tracker
        self._clock = clock
        self._log = ProgressLog(worker_index, generation)
        self._inbox = ProgressInbox(generation)
        self._ready: list[tuple[Change, ...]] = []  # of whole batches, in order
        # In broadcast mode others get merged batches: whole ones, in order, so that
        # each is a prefix of what this worker told itself.
        self._for_peers = _Prefix(worker_index, generation)
        self._for_controller = _Prefix(worker_index, generation)
        self._told_at = -self._gap_s
        self.record = self._log.record

    def accept(self, batch: ProgressBatch) -> None:
        """Take a batch that arrived; it is applied by `apply`."""
        for each in self._inbox.accept(batch):
            self._ready.append(each.changes)

    @property
    def has_arrived(self) -> bool:
        """Whether there is something for `apply`."""
        return bool(self._ready)

    def apply(self) -> Changes | None:
        """Apply everything that arrived; the frontier changes, None if nothing did."""
        if not self._ready:
            return None
        ready, self._ready = self._ready, []
        for changes in ready:
            self._tracker.update_many(changes)
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
        changes = batch.changes
        self._ready.append(changes)
        if self._has_peers:
            self._for_peers.untold.append(changes)
        else:
            self._count(batch)
        self._for_controller.untold.append(changes)
        return True

    def take(self) -> ProgressBatch | None:
        """The batch to send now: to every peer, or to the controller."""
        if self.is_broadcast:
            batch = self._for_peers.take(self._tracker)
        else:
            batch = self._log.take(self._tracker)
        if batch is not None:
            self._count(batch)
        return batch

    def _count(self, batch: ProgressBatch) -> None:
        self.num_batches += 1
        self.num_changes += len(batch.changes)

    def controller_due(self) -> float | None:
        """In broadcast mode: when the controller is to be told, if there is news."""
        if not self._for_controller.untold:
            return None
        if self._tracker.is_empty():  # it waits for the end
            return self._told_at
        return self._told_at + self._gap_s

    def take_for_controller(self) -> ProgressBatch | None:
        """In broadcast mode: the merged batch that is due to the controller."""
        due, now = self.controller_due(), self._clock()
        if due is None or now < due:
            return None
        is_steady = now - self._told_at < 2 * self._gap_s
        gap_s = self._gap_s * 2 if is_steady else self._least_gap_s
        self._gap_s = min(gap_s, LARGEST_GAP_S)
        self._told_at = now
        return self._for_controller.take(self._tracker)


class _Prefix:
    """What one receiver, or all peers, do not know yet: the changes of whole batches."""

    __slots__ = ("_log", "_sequence", "generation", "sender", "untold")

    def __init__(self, sender: int, generation: int) -> None:
        self.sender = sender
        self.generation = generation
        self.untold: list[tuple[Change, ...]] = []
        self._log = ProgressLog(sender, generation)
        self._sequence = 0

    def take(self, tracker: Tracker) -> ProgressBatch | None:
        """Return the sum of the batches, under a sequence of its own."""
        if not self.untold:
            return None
        untold, self.untold = self.untold, []
        changes = untold[0]
        if len(untold) > 1:
            for each in untold:
                self._log.record_many(each)
            summed = self._log.take(tracker, force=True)
            if summed is None:
                return None
            changes = summed.changes
        self._sequence += 1
        fields = (self.generation, self.sender, self._sequence - 1, changes)
        batch: ProgressBatch = new_tuple(ProgressBatch, fields)
        return batch
