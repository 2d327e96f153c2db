"""One run on one worker: its operators, channels, frontiers and progress.

`step` is one turn: apply the progress that arrived, run the active operators,
then send what they produced, one frame per worker, with the progress batch of
the turn. The batch counts everything the turn consumed, produced and held, so it
is atomic by construction.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

from timelyml.errors import PayloadError
from timelyml.exchange import CONTROLLER, Codec, Lane
from timelyml.graph import Graph
from timelyml.progress import (
    CapabilityTable,
    ProgressBatch,
    Timestamp,
    Tracker,
    new_tuple,
)
from timelyml.runtime.agenda import in_graph_order
from timelyml.runtime.build import build_instances, build_spills, initial_counts
from timelyml.runtime.channels import Arrival, Outbox, OutChannel
from timelyml.runtime.config import INPUT_KIND, RunConfig
from timelyml.runtime.epochs import EpochGate
from timelyml.runtime.event_log import EventLog, Sender
from timelyml.runtime.instance import OperatorInstance, misdirected
from timelyml.runtime.messages import (
    CreditMessage,
    DataMessage,
    Emitted,
    Part,
    Stopping,
)
from timelyml.runtime.metering import Holding, holdings_of, metrics_of
from timelyml.runtime.moving import ShardImage, export_shard, import_shard
from timelyml.runtime.outside import Wakes, close_outside
from timelyml.runtime.pickles import unsendable_failure
from timelyml.runtime.progress_link import ProgressLink
from timelyml.runtime.refunds import Refunds
from timelyml.runtime.service import no_service
from timelyml.runtime.state import StateLimit, StateStore
from timelyml.runtime.timers import Timers, earliest
from timelyml.runtime.whereabouts import Whereabouts

# What a worker's own changes lead to at once goes out with them, in one message.
MAX_ROUNDS = 16
TURN_S = 0.01  # one operator's share of a turn, so that none keeps the worker
PIGGYBACK_BYTES = 64 * 1024  # progress must not queue behind more data than this
_location_of = itemgetter(0)  # of a change


class Dataflow:
    """The part of one run that one worker does."""

    def __init__(
        self,
        graph: Graph,
        config: RunConfig,
        *,
        generation: int,
        worker_index: int,
        num_workers: int,
        transport: Sender,
        codec: Codec,
        clock: Callable[[], float],
        spill_directory: Path,
        memory: Any = None,
        service: Callable[[str], Any] = no_service,
    ) -> None:
        self.graph = graph
        self.config = config
        self.generation = generation
        self.worker_index = worker_index
        self.num_workers = num_workers
        self.service = service
        self.has_failed = False
        self.log: EventLog | None = None
        self.numbers: dict[int, int] = {}  # of workers whose own are others
        self.running: OperatorInstance | None = None
        self.whereabouts = Whereabouts(memory, generation)
        self.state = StateStore()
        limit_bytes = config.state_limit_bytes
        self._state_limit = limit_bytes and StateLimit(self.state, limit_bytes)
        self.tracker = Tracker(graph.reachability(), initial_counts(graph, num_workers))
        self.tracker.propagate()
        self.progress = ProgressLink(
            worker_index,
            generation,
            config.progress_mode,
            self.tracker,
            clock,
            is_fed=any(spec.kind == INPUT_KIND for spec in graph.operators),
            has_peers=num_workers > 1,
        )
        self.table = CapabilityTable(self.progress.record)
        self._transport = transport
        self._clock = clock
        self.outbox = Outbox(
            worker_index, config.credit_bytes, self._deliver, transport.shared_memory
        )
        self._active: set[int] = set()
        self._timers = Timers(clock)
        self._wakes = Wakes(transport.wake)
        self._refunds = Refunds(config.credit_bytes, clock)
        self._turn_end = 0.0
        self._has_consumed = False  # since progress was last sent
        self._coming: dict[int, dict[int, ShardImage]] = {}  # by operator and shard
        self.channels: list[OutChannel] = []
        self.instances: list[OperatorInstance] = build_instances(self, self.outbox)
        self._input_owner = {
            graph.location_of_input(spec.index, port): spec.index
            for spec in graph.operators
            for port in range(spec.num_inputs)
        }
        self._senders = [channel.source.operator for channel in graph.channels]
        targets = [channel.target for channel in graph.channels]
        self._receivers = [(self.instances[at.operator], at.port) for at in targets]
        self._target_locations = [
            graph.location_of_input(at.operator, at.port) for at in targets
        ]
        self._gate = EpochGate(graph, self.tracker, config.max_epochs_ahead)
        self.spills = build_spills(self, codec, spill_directory)

    def start(self) -> None:
        """Start every operator; data may arrive from now on."""
        for instance in self.instances:
            self.running = instance
            instance.open()
            for shard, image in self._coming.pop(instance.index, {}).items():
                import_shard(self, instance.index, shard, image)
            instance.start()
            self._active.add(instance.index)
        self.running = None
        self.whereabouts.leave()

    def export_shard(self, operator: int, shard: int) -> ShardImage:
        """Return all that is kept of a shard, between two turns; it stays in place."""
        return export_shard(self, operator, shard)

    def install_shard(self, operator: int, shard: int, image: ShardImage) -> None:
        """Let a shard start as what it was elsewhere; to be called before `start`."""
        self._coming.setdefault(operator, {})[shard] = image

    def step(self) -> bool:
        """Take one turn; True if anything was done."""
        self._run_timers()
        worked = bool(self._active)
        if worked:
            self._run_round()  # before progress: others wait for what data leads to
        for _ in range(MAX_ROUNDS):
            changes = self.progress.apply()
            if changes is None:
                break
            worked = True
            if changes:
                self._frontiers_moved(changes)
            self._run_round()
        self._flush()
        return worked

    def _run_round(self) -> None:
        if self._active:
            self._run_active()
        self.table.settle()
        is_told = self.progress.tell_itself() and self.num_workers > 1
        if is_told and (self._has_consumed or self.outbox.has_frames):
            # Others wait for this; what only this worker waits for comes after.
            self._flush()

    def has_work(self) -> bool:
        """Whether `step` would do something even if nothing arrives."""
        return bool(self._active) or self.progress.has_arrived

    def next_deadline(self) -> float | None:
        """When `step` has to be called again even if nothing arrives."""
        timers, refunds = self._timers.due_at(), self._refunds.due_at()
        return earliest(earliest(timers, refunds), self.progress.controller_due())

    def is_done(self) -> bool:
        """Whether nothing can happen any more, and nothing is left to do for it."""
        return self.tracker.is_empty() and not any(
            self.instances[operator].is_busy for operator in self._active
        )

    def receive_data(self, peer: int, message: DataMessage) -> None:
        """Queue the blocks of a frame, and its progress."""
        for block in message.blocks:
            for part in block.parts:
                self._deliver(block.channel, peer, block.time, part)
        if message.progress is not None:
            self.progress.accept(message.progress)

    def receive_credit(self, peer: int, message: CreditMessage) -> None:
        """Take credit back; operators that waited for it run again."""
        for channel, size in message.refunds:
            if self.outbox.refund(channel, peer, size):
                self._active.add(self._senders[channel])

    def post(self, operator: int, shard: int, body: Any) -> None:
        """Hand a message of the driver to a shard."""
        self.instances[operator].post(shard, body)
        self._active.add(operator)

    def stop_sources(self, epoch: int | None) -> None:
        """Tell the local shards of the sources to close.

        First (None) all but the regular ones; those pause, and the controller is
        told the first epoch that none has begun. Then all, at the agreed epoch.
        """
        if epoch is None:
            first = self._gate.pause(self.table)
            message = Stopping(self.generation, self.worker_index, first)
            self._transport.send(CONTROLLER, message)
        else:
            self._gate.resume_until(epoch)
        for instance in self.instances:
            if instance.spec.is_source and instance.spec.regular == (epoch is not None):
                for shard in instance.shards:
                    self.post(instance.index, shard, ("stop", epoch))

    def metrics(self) -> dict[str, Any]:
        """Figures of this run on this worker."""
        return metrics_of(self)

    def holdings(self) -> list[Holding]:
        """Who holds which capability here, and where it was created."""
        return holdings_of(self)

    def close(self) -> None:
        """Free what the run holds outside of memory."""
        close_outside(self.instances)
        for spill in self.spills.values():
            spill.close()
        if self.log is not None:
            self.log.close()

    def disown(self, fork: Any) -> None:
        """Let `fork` take the place of what tells the time and sends."""
        self._transport = self._clock = fork

    def now(self) -> float:
        """Seconds by the worker's clock."""
        return self._clock()

    def must_stop(self, operator: int) -> bool:
        """Whether its share of the turn is used up, or it waits for credit."""
        if self._clock() > self._turn_end:
            return True
        return bool(self.outbox.waiting) and self.is_blocked(operator)

    def is_blocked(self, operator: int) -> bool:
        """Whether an output of the operator waits for credit."""
        if not self.outbox.waiting:
            return False
        return any(
            self.outbox.is_blocked(channel.spec.index)
            for output in self.instances[operator].outputs
            for channel in output
        )

    def left_queue(self, arrival: Arrival) -> None:
        """Give the credit of an arrival back, now or soon."""
        channel = arrival.channel
        if channel in self.spills:
            return
        if arrival.peer == self.worker_index:
            if self.outbox.refund(channel, arrival.peer, arrival.part.size_bytes):
                self._active.add(self._senders[channel])
            return
        self._refunds.owe(arrival.peer, channel, arrival.part.size_bytes)

    def consumed(self, arrival: Arrival) -> None:
        """Count an arrival as consumed: its operator had its chance to retain."""
        self._has_consumed = True
        location = self._target_locations[arrival.channel]
        self.progress.record(location, arrival.time, -arrival.part.weight)

    def activate(self, operator: int, shard: int, after_s: float) -> None:
        """Run `on_activate` of a shard, now or later."""
        if after_s > 0:
            self._timers.ask(operator, shard, after_s)
        else:
            self.instances[operator].activate_shard(shard)
            self._active.add(operator)

    def waker(self, operator: int, shard: int) -> Callable[[], None]:
        """Return what activates a shard from any thread."""
        return self._wakes.waker(operator, shard)

    def can_start_epoch(self, operator: int, shard: int, epoch: int) -> bool:
        """Whether a source may open `epoch`; if not, it is activated later."""
        return self._gate.may_open(operator, shard, epoch)

    def emit(self, operator: int, shard: int, tag: str, body: Any) -> None:
        """Send something to the driver, ahead of the progress that allows it."""
        message = Emitted(self.generation, operator, shard, tag, body)
        self._transport.send(CONTROLLER, message)

    def state_cell(
        self, operator: int, shard: int, name: str, operator_name: str
    ) -> dict[Any, Any]:
        """Return declared state."""
        return self.state.cell(operator, shard, name, operator_name)

    def _frontiers_moved(self, changes: list[tuple[int, Timestamp, int]]) -> None:
        owners = self._input_owner
        for location in owners.keys() & map(_location_of, changes):
            operator = owners[location]
            if self.instances[operator].frontier_moved():
                self._active.add(operator)
        for operator, shard in self._gate.frontiers_moved():
            self.activate(operator, shard, 0.0)

    def _run_timers(self) -> None:
        for operator, shard in (*self._wakes.take(), *self._timers.take_due()):
            self.activate(operator, shard, 0.0)

    def _run_active(self) -> None:
        clock, outbox = self._clock, self.outbox
        # Nothing follows at once while frames wait to leave for other workers.
        for index in in_graph_order(self._active, lambda: not outbox.has_frames):
            instance = self.instances[index]
            self.running = instance
            began = clock()
            self._turn_end = began + TURN_S
            if instance.run():
                self._active.add(index)
            stopped = clock()
            instance.metrics["busy_s"] += stopped - began
            if self.log is not None:
                self.log.had_turn(index, began, stopped)
            instance.metrics["activations"] += 1
            if self._state_limit:
                self._state_limit.look(instance.index, instance.name, instance.metrics)
        self.running = None
        self.whereabouts.leave()

    def _flush(self) -> None:
        self._has_consumed = False
        batch = self.progress.take()
        is_broadcast = self.progress.is_broadcast
        told: set[int] = set()
        for peer, blocks, size in self.outbox.take():
            rides = batch is not None and is_broadcast and size <= PIGGYBACK_BYTES
            if rides:
                told.add(peer)
            fields = (self.generation, blocks, batch if rides else None)
            self._send_data(peer, new_tuple(DataMessage, fields))
        if batch is not None:
            self._tell(batch, told)
        if is_broadcast:
            merged = self.progress.take_for_controller()
            if merged is not None:
                self._send_progress(CONTROLLER, merged)
        for peer, refunds in self._refunds.take_due():
            self._transport.send(peer, CreditMessage(self.generation, refunds))

    def _send_data(self, peer: int, message: DataMessage) -> None:
        try:
            self._transport.send(peer, message, Lane.BULK)
        except PayloadError as error:
            failure = unsendable_failure(self.graph, message, error, self.worker_index)
            raise failure from error

    def _tell(self, batch: ProgressBatch, told: set[int]) -> None:
        self.progress.num_riders += len(told)
        if not self.progress.is_broadcast:
            self._send_progress(CONTROLLER, batch)
            return
        for peer in range(self.num_workers):
            if peer != self.worker_index and peer not in told:
                self._send_progress(peer, batch)

    def _send_progress(self, peer: int, batch: ProgressBatch) -> None:
        bytes_sent = self._transport.metrics.bytes_sent
        before = bytes_sent[Lane.CONTROL]
        self._transport.send(peer, batch)
        self.progress.num_messages += 1
        self.progress.num_bytes += bytes_sent[Lane.CONTROL] - before

    def _deliver(self, channel: int, peer: int, time: Timestamp, part: Part) -> None:
        """Queue one part that arrived, or that this worker sent to itself."""
        instance, port = self._receivers[channel]
        if part.target_shard >= 0 and part.target_shard not in instance.shards:
            raise misdirected(instance, part.target_shard)
        if self.log is not None:
            self.log.delivered(channel, peer, part)
        arrival = new_tuple(Arrival, (channel, port, peer, time, part))
        if channel in self.spills:
            self.spills[channel].push(arrival, part.size_bytes)
        else:
            instance.queue.append(arrival)
        self._active.add(instance.index)
