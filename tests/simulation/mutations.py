"""Deliberate mistakes, each in one behaviour of the runtime: the suite must see them.

Each function patches exactly one behaviour; its docstring says which.
"""

from __future__ import annotations

from collections import deque

from timelyml.exchange import CreditLedger, records_of
from timelyml.progress import (
    CapabilityTable,
    ProgressInbox,
    ProgressLog,
    Tracker,
    frontier,
)
from timelyml.runtime import channels, controller_progress, dataflow
from timelyml.runtime.channels import OutChannel
from timelyml.runtime.completion import Completion
from timelyml.runtime.dataflow import Dataflow
from timelyml.runtime.dense import DenseInput
from timelyml.runtime.epochs import EpochGate
from timelyml.runtime.instance import OperatorInstance
from timelyml.runtime.notifications import NotificationQueue
from timelyml.runtime.progress_link import ProgressLink
from timelyml.runtime.refunds import Refunds
from timelyml.runtime.simulation.network import SimNetwork
from timelyml.runtime.worker import Worker


def split_batch(patch):
    """A progress batch is split in two."""
    take = ProgressLog.take

    def take_half(self, tracker, *, force=False):
        batch = take(self, tracker, force=force)
        if batch is None or len(batch.changes) < 2:
            return batch
        half = len(batch.changes) // 2
        self.record_many(batch.changes[half:])
        return batch._replace(changes=batch.changes[:half])

    patch.setattr(ProgressLog, "take", take_half)


def drop_negative_count(patch):
    """A count below zero is dropped."""
    update_many = Tracker.update_many

    def update_at_least_zero(self, changes):
        for location, time, delta in changes:
            before = self._stamps[location].get(time, 0)
            update_many(self, [(location, time, max(delta, -before))])

    patch.setattr(Tracker, "update_many", update_at_least_zero)


def count_initial_capabilities_for_every_pair(patch):
    """Outputs start with a capability for every pair of workers."""
    for module in (dataflow, controller_progress):
        counts = module.initial_counts

        def squared(graph, num_workers, counts=counts):
            return [(p, t, n * num_workers) for p, t, n in counts(graph, num_workers)]

        patch.setattr(module, "initial_counts", squared)


def release_capability_twice(patch):
    """The last capability of a location is counted down twice."""
    discard = CapabilityTable.discard

    def discard_twice(self, capability, time):
        discard(self, capability, time)
        if not self.covers(capability.location, time):
            self.settle()
            self._record(capability.location, time, -1)

    patch.setattr(CapabilityTable, "discard", discard_twice)


def count_after_compaction(patch):
    """Consumption counts the distinct records of a block, not the original ones."""
    consumed = Dataflow.consumed

    def consumed_distinct(self, arrival):
        distinct = len({int(record) for record in records_of(arrival.part.payload)})
        part = arrival.part._replace(weight=max(1, distinct))
        consumed(self, arrival._replace(part=part))

    patch.setattr(Dataflow, "consumed", consumed_distinct)


def read_frontier_mid_batch(patch):
    """Frontiers are read when half of a batch is applied."""

    def apply_half(self):
        changes = getattr(self, "rest", [])
        for batch in self._ready:
            changes.extend(batch)
        self._ready = []
        if not changes:
            return None
        half = (len(changes) + 1) // 2
        self._tracker.update_many(changes[:half])
        self.rest = changes[half:]
        return self._tracker.propagate()

    patch.setattr(ProgressLink, "apply", apply_half)


def never_test_held_buffer_again(patch):
    """A buffer that was held back once stays for ever."""
    patch.setattr(ProgressLog, "_held_could_move_frontier", lambda self, tracker: False)


def send_dense_block_twice(patch):
    """A dense block is sent twice, and counted twice."""
    push = OutChannel.push

    def push_twice(self, *block, is_last, **options):
        push(self, *block, is_last=is_last, **options)
        if self.is_dense and is_last:
            push(self, *block, is_last=is_last, **options)

    patch.setattr(OutChannel, "push", push_twice)


def count_dense_frames(patch):
    """Every frame of a dense block counts as a producer that is done."""
    hear, is_complete = DenseInput.hear, DenseInput.is_complete

    def hear_frame(self, time, shard, source_shard):
        self.num_frames = getattr(self, "num_frames", {})
        key = (time, shard)
        self.num_frames[key] = self.num_frames.get(key, 0) + 1
        return hear(self, time, shard, source_shard)

    def has_enough_frames(self, time, shard):
        frames = getattr(self, "num_frames", {}).get((time, shard), 0)
        return frames + 1 >= self._num_expected or is_complete(self, time, shard)

    patch.setattr(DenseInput, "hear", hear_frame)
    patch.setattr(DenseInput, "is_complete", has_enough_frames)


def apply_batches_as_they_come(patch):
    """Batches are applied in order of arrival, not of their sequence."""
    patch.setattr(ProgressInbox, "accept", lambda self, batch: [batch])


def accept_old_generation(patch):
    """A message of a run that is over goes to the one that is there now."""
    run_of = Worker._run_of

    def run_of_any(self, generation):
        found = run_of(self, generation)
        if found is None and self._started:
            found = self._started[-1]
        return found

    patch.setattr(Worker, "_run_of", run_of_any)


def weigh_empty_blocks_nothing(patch):
    """An empty block weighs nothing."""
    patch.setattr(channels, "max", lambda floor, weight: weight, raising=False)


def consume_before_retaining(patch):
    """A block counts as consumed when its callback begins."""
    left_queue, consumed = Dataflow.left_queue, Dataflow.consumed

    def left_and_consumed(self, arrival):
        left_queue(self, arrival)
        consumed(self, arrival)

    patch.setattr(Dataflow, "left_queue", left_and_consumed)
    patch.setattr(Dataflow, "consumed", lambda self, arrival: None)


def apply_own_changes_at_once(patch):
    """A worker's own changes are applied when recorded, and again when they return."""
    init = ProgressLink.__init__

    def init_and_wrap(self, *args, **options):
        init(self, *args, **options)
        record = self.record

        def record_and_apply(location, time, delta):
            record(location, time, delta)
            self._tracker.update(location, time, delta)

        self.record = record_and_apply

    patch.setattr(ProgressLink, "__init__", init_and_wrap)


def reorder_within_links(patch):
    """A link delivers its newest message first."""

    def deliver_newest(self, link):
        queue = self._queues[link]
        self._queues[link] = deque([queue.pop(), *queue])
        deliver(self, link)

    deliver = SimNetwork.deliver
    patch.setattr(SimNetwork, "deliver", deliver_newest)


def release_before_notifying(patch):
    """The capabilities of a notification are released before its callback runs."""
    deliver = OperatorInstance._deliver

    def release_and_deliver(self, notification):
        for capability in notification.capabilities:
            capability.release()
        notification.capabilities.clear()
        return deliver(self, notification)

    patch.setattr(OperatorInstance, "_deliver", release_and_deliver)


def look_at_one_port_only(patch):
    """A notification waits for the first of its ports only."""
    is_complete = Completion.is_complete

    def first_is_complete(self, shard, time, ports):
        return is_complete(self, shard, time, ports[:1])

    patch.setattr(Completion, "is_complete", first_is_complete)


def take_frontier_as_passed(patch):
    """What stands at the frontier is taken to have passed it."""
    patch.setattr(
        frontier.IntFrontier, "less_equal", lambda self, time: self.least < time
    )


def never_refund(patch):
    """Credit never comes back."""
    patch.setattr(Refunds, "take_due", lambda self: iter(()))


def notify_in_any_order(patch):
    """The latest notification that is complete comes first."""

    def pop_latest(self, is_complete):
        for each in sorted(self._pending.values(), reverse=True):
            if is_complete(each.shard, each.time, each.ports):
                rest = [other for other in self._pending.values() if other is not each]
                self.__init__(in_order=self._in_order)
                for other in rest:
                    self.add(other, is_dense=True)
                return each
        return None

    patch.setattr(NotificationQueue, "pop_ready", pop_latest)


def notify_before_earlier_rounds(patch):
    """What is complete is told, though an earlier time of a loop may still come."""
    patch.setattr(Completion, "is_due", Completion.is_complete)


def count_broadcast_once(patch):
    """A broadcast counts once, not once per worker."""
    init = OutChannel.__init__

    def init_and_wrap(self, spec, **options):
        record = options["record"]

        def record_one(location, time, total):
            is_many = type(spec.pact).__name__ == "Broadcast"
            record(location, time, total // len(self._workers) if is_many else total)

        init(self, spec, **{**options, "record": record_one})

    patch.setattr(OutChannel, "__init__", init_and_wrap)


def send_without_credit(patch):
    """A block leaves whether there is credit for it or not."""
    patch.setattr(CreditLedger, "can_send", lambda self, size_bytes=1: True)
    patch.setattr(CreditLedger, "spend", spend_anyway)


def spend_anyway(ledger, size_bytes):
    ledger.outstanding_bytes += size_bytes


def open_epochs_without_credit(patch):
    """A source may open any epoch."""
    patch.setattr(EpochGate, "may_open", lambda self, operator, shard, epoch: True)


EARLY = "did not fire on every shard"
"""What a dense input says if its frontier passes a time before all blocks came."""
PROGRESS = {"safety", "liveness", "notification", "output", EARLY}
"""What a mistake in progress breaks; which comes first is a matter of chance."""

MUTATIONS = {
    split_batch: PROGRESS,
    drop_negative_count: PROGRESS,
    count_initial_capabilities_for_every_pair: PROGRESS,
    release_capability_twice: PROGRESS,
    count_after_compaction: PROGRESS,
    read_frontier_mid_batch: PROGRESS,
    never_test_held_buffer_again: PROGRESS,
    send_dense_block_twice: {"delivery", "got a dense block twice"},
    count_dense_frames: {"notification"},
    apply_batches_as_they_come: PROGRESS,
    accept_old_generation: {"delivery", "KeyError", "got generation"},
    weigh_empty_blocks_nothing: PROGRESS,
    consume_before_retaining: PROGRESS,
    apply_own_changes_at_once: PROGRESS,
    reorder_within_links: PROGRESS | {"may not send"},
    release_before_notifying: PROGRESS | {"may not send"},
    look_at_one_port_only: PROGRESS,
    take_frontier_as_passed: PROGRESS,
    never_refund: {"liveness"},
    send_without_credit: {"credit"},
    open_epochs_without_credit: {"credit"},
    notify_in_any_order: {"notification"},
    notify_before_earlier_rounds: {"notification"},
    count_broadcast_once: PROGRESS,
}
"""By mutation: a promise that it breaks, or what a failing run says of it.

A run may fail for another reason: a mutation that no longer fits the code. That must
not pass for one that is seen.
"""
