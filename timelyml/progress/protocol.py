"""The progress protocol: who sends which changes when, as pure state machines.

A worker's changes are buffered, and the buffer goes to all trackers as one
atomic batch or stays as a whole. It stays while no decrease in it could move a
frontier; it is tested again at every `take`. Batches of one sender are applied
in sequence. In accumulator mode the controller merges whole batches and sends
their sum under its own sequence. (Naiad, section 3.3; its accumulators.)
"""

from __future__ import annotations

from collections.abc import Iterable

from timelyml.errors import ProgressProtocolError
from timelyml.progress.antichain import MutableAntichain
from timelyml.progress.batch import ProgressBatch, new_tuple
from timelyml.progress.change_batch import ChangeBatch
from timelyml.progress.timestamp import Timestamp
from timelyml.progress.tracker import Change, Tracker


class ProgressLog:
    """One sender's buffer of changes, with the decision when to send it.

    Changes that were tested and stay are kept with the minimal decreases of each
    location: if any decrease of a location could move a frontier, a minimal one
    could, so that a buffer that stays long costs little to test again.
    """

    __slots__ = ("_decreases", "_fresh", "_held", "_sequence", "generation", "sender")

    def __init__(self, sender: int, generation: int) -> None:
        self.sender = sender
        self.generation = generation
        self._sequence = 0
        self._fresh: ChangeBatch[tuple[int, Timestamp]] = ChangeBatch()
        self._held: dict[tuple[int, Timestamp], int] = {}
        self._decreases: dict[int, MutableAntichain] = {}

    def record(self, location: int, time: Timestamp, delta: int) -> None:
        """Add a change to the buffer."""
        # As `update` does: a call less for each block that is sent or consumed.
        counts, key = self._fresh.counts, (location, time)
        count = counts.get(key, 0) + delta
        if count:
            counts[key] = count
        else:
            counts.pop(key, None)

    def record_many(self, changes: Iterable[Change]) -> None:
        """Add each `(location, time, delta)` to the buffer."""
        self._fresh.extend([((place, time), delta) for place, time, delta in changes])

    def take(self, tracker: Tracker, *, force: bool = False) -> ProgressBatch | None:
        """Return the whole buffer as the next batch, or None if it is to stay.

        Args:
            tracker: The sender's own; what it was not told counts as not done.
            force: Send even if no frontier could move.
        """
        if not (self._fresh or self._held):
            return None
        fresh = self._fresh.drain()
        if self._held:
            self._hold(fresh)
            if not (force or self._held_could_move_frontier(tracker)):
                return None
            changes = list(self._held.items())
            self._held.clear()
            self._decreases.clear()
        else:
            changes = fresh
            if not force and not _could_move_frontier(changes, tracker):
                self._hold(fresh)
                return None
        if not changes:
            return None
        flat = tuple([(place, time, delta) for (place, time), delta in changes])
        fields = (self.generation, self.sender, self._sequence, flat)
        batch: ProgressBatch = new_tuple(ProgressBatch, fields)
        self._sequence += 1
        return batch

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not self._held and not self._fresh

    def _hold(self, changes: list[tuple[tuple[int, Timestamp], int]]) -> None:
        held, decreases = self._held, self._decreases
        for key, delta in changes:
            count = held.get(key, 0) + delta
            if count:
                held[key] = count
            else:
                del held[key]
            location, time = key
            minimal = decreases.get(location)
            if minimal is None:
                minimal = decreases[location] = MutableAntichain()
            minimal.update(((time, -delta),))

    def _held_could_move_frontier(self, tracker: Tracker) -> bool:
        return any(
            tracker.is_global(location, time)
            for location, minimal in self._decreases.items()
            for time in minimal.elements
        )


def _could_move_frontier(
    changes: list[tuple[tuple[int, Timestamp], int]], tracker: Tracker
) -> bool:
    for (location, time), delta in changes:
        if delta < 0 and tracker.is_global(location, time):
            return True
    return False


class ProgressInbox:
    """Puts the batches of every sender in sequence."""

    __slots__ = ("_early", "_expected", "generation")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._expected: dict[int, int] = {}
        self._early: dict[int, dict[int, ProgressBatch]] = {}

    def accept(self, batch: ProgressBatch) -> list[ProgressBatch]:
        """Return the batches that are now in sequence; an early one is kept.

        Raises:
            ProgressProtocolError: If the batch is a duplicate or belongs to
                another generation.
        """
        if batch.generation != self.generation:
            raise _refusal(
                batch, f"generation {batch.generation}", f"generation {self.generation}"
            )
        sender, sequence = batch.sender, batch.sequence
        expected = self._expected.get(sender, 0)
        if sequence == expected and not self._early:
            self._expected[sender] = expected + 1
            return [batch]
        early = self._early.get(sender)
        if sequence < expected or (early is not None and sequence in early):
            raise _refusal(
                batch, f"sequence {sequence} again", f"sequence {expected} or later"
            )
        if sequence > expected:
            self._early.setdefault(sender, {})[sequence] = batch
            return []
        ready = [batch]
        if early is not None:
            while sequence + len(ready) in early:
                ready.append(early.pop(sequence + len(ready)))
            if not early:
                del self._early[sender]
        self._expected[sender] = sequence + len(ready)
        return ready

    @property
    def num_early(self) -> int:
        """How many batches wait for an earlier one of their sender."""
        return sum(map(len, self._early.values()))


class ProgressAccumulator:
    """The controller's part in accumulator mode: sums whole batches, then sends.

    What it merged is always a prefix of each sender's sequence. It sends once its own
    tracker saw a frontier move: one worker's share of a move is of no use to others.
    """

    __slots__ = ("_fresh", "_inbox", "_log")

    def __init__(self, generation: int, sender: int = -1) -> None:
        self._inbox = ProgressInbox(generation)
        self._log = ProgressLog(sender, generation)
        self._fresh: list[Change] = []  # merged, not yet in the tracker

    def accept(self, batch: ProgressBatch) -> None:
        """Merge `batch` and those it was missing for; an early one is kept.

        Raises:
            ProgressProtocolError: If the batch is a duplicate or belongs to
                another generation.
        """
        for ready in self._inbox.accept(batch):
            self._fresh += ready.changes

    def settle(
        self, tracker: Tracker, *, force: bool = False
    ) -> tuple[list[Change], ProgressBatch | None]:
        """Bring the controller's `tracker` up to date, and say what to send.

        Args:
            tracker: The controller's own; nobody else updates it.
            force: Send even if no frontier moved.

        Returns:
            The changes of its frontiers, and the next batch for every worker: all
            that was merged and not sent, or None if it is to stay.
        """
        fresh, self._fresh = self._fresh, []
        self._log.record_many(fresh)
        tracker.update_many(fresh)
        moved = tracker.propagate()
        if not (moved or force):
            return moved, None
        return moved, self._log.take(tracker, force=True)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is merged and unsent, nor kept because it came early."""
        is_sent = self._log.is_empty and not self._fresh
        return is_sent and not self._inbox.num_early


def _refusal(batch: ProgressBatch, got: str, expected: str) -> ProgressProtocolError:
    return ProgressProtocolError(
        f"progress batch of sender {batch.sender} cannot be applied; got {got};"
        f" expected {expected}; each batch is applied once, in its own run",
        sender=batch.sender,
        sequence=batch.sequence,
        generation=batch.generation,
    )
