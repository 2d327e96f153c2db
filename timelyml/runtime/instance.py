"""One operator on one worker: it runs the callbacks of all its local shards.

The instance drains its input queues, delivers notifications that are ready, and
keeps the books that progress tracking needs: consumed weight is recorded after
the callback had its chance to retain a capability, never before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from timelyml.errors import InvariantError
from timelyml.graph import OperatorSpec
from timelyml.progress import (
    Capability,
    CapabilityTable,
    Frontier,
    Timestamp,
    Tracker,
    UserTime,
    new_tuple,
)
from timelyml.runtime.channels import (
    ALL_LOCAL_SHARDS,
    Arrival,
    OutChannel,
)
from timelyml.runtime.completion import Completion
from timelyml.runtime.dense import DenseInput
from timelyml.runtime.notifications import Notification
from timelyml.runtime.operator import Delivery, Logic, Steps, Wait
from timelyml.runtime.requests import Requests
from timelyml.runtime.rights import Rights
from timelyml.runtime.shard import Shard
from timelyml.runtime.turn import Turn

MAX_STEPS = 256  # of generators and batches, in one turn of the worker


class OperatorInstance:
    """The shards of one operator that one worker holds."""

    def __init__(
        self,
        spec: OperatorSpec,
        logic: Logic,
        *,
        local_shards: tuple[int, ...],
        num_shards: int,
        outputs: list[list[OutChannel]],
        dense_inputs: list[dict[int, DenseInput]],
        input_locations: list[int],
        output_locations: list[int],
        tracker: Tracker,
        table: CapabilityTable,
        turn: Turn,
    ) -> None:
        self.spec = spec
        self.index = spec.index
        self.name = spec.name
        self.logic = logic
        self.num_shards = num_shards
        self.worker_index = turn.worker_index
        self.num_workers = turn.num_workers
        self.notified_ports: tuple[int, ...] = ()
        self.received: Any = None  # the payload of the delivery being processed
        self.outputs = outputs
        self.now: Callable[[], float] = turn.now
        self.service: Callable[[str], Any] = turn.service
        self._rights = Rights(spec, output_locations, table)
        self.may_send: Callable[[int, UserTime], bool] = self._rights.may_send
        self.shards = {index: Shard(self, index, outputs) for index in local_shards}
        self.queue: deque[Arrival] = deque()
        self.spilled: list[Any] = []  # queues of channels inside cycles
        self.metrics: dict[str, float] = dict.fromkeys(METRIC_NAMES, 0)
        self.current: tuple[int, Timestamp | None] = (-1, None)  # for error reports
        self._on_batch = logic.on_batch
        self._dense = dense_inputs  # by port: channel -> counter
        self._counters = [
            (port, counter)
            for port, counters in enumerate(dense_inputs)
            for counter in counters.values()
        ]
        self._frontiers = [tracker.frontier(loc) for loc in input_locations]
        self._all_ports = tuple(range(spec.num_inputs))
        self._turn = turn
        self._whereabouts = turn.whereabouts
        self._completion = Completion(
            logic, self._frontiers, dense_inputs, depth=spec.depth
        )
        self._requests = Requests(spec, logic, self._rights, self._completion)
        self.request = self._requests.ask
        self.wait_for = self._requests.wait_for
        self.notifications = self._requests.notifications
        self._steps: Iterator[Any] | None = None
        self._waits = False  # until a shard is activated
        self._frontier_moved = False
        self._activated: set[int] = set()
        self._messages: deque[tuple[int, Any]] = deque()

    def open(self) -> None:
        """Take the initial capabilities; what shards bring along is justified by them."""
        self._rights.open()

    def start(self) -> None:
        """Run `on_start` of every shard; then drop what they did not keep."""
        if self.logic.on_start is not None:
            for shard in self.shards.values():
                self._enter(shard.index, None)
                self.logic.on_start(shard)
        self._rights.end_start()

    def frontier_moved(self) -> bool:
        """Note that the frontier of an input port moved; True if it has to run for it."""
        for port, counter in self._counters:
            frontier = self._frontiers[port]
            counter.forget_passed(
                [t for t in counter.open_times() if not frontier.less_equal(t)]
            )
        if self.logic.on_frontier is None and not self.num_pending:
            return False
        self._frontier_moved = True
        return True

    def activate_shard(self, shard: int) -> None:
        """Run `on_activate` of a shard in the next turn."""
        self._activated.add(shard)
        self._waits = False

    def post(self, shard: int, body: Any) -> None:
        """Queue a message from the driver."""
        self._messages.append((shard, body))

    @property
    def is_busy(self) -> bool:
        """Whether a callback is under way, or due for what has already come."""
        return bool(
            self._steps is not None
            or self._frontier_moved
            or self.queue
            or self._messages
            or any(len(queue) for queue in self.spilled)
        )

    @property
    def num_pending(self) -> int:
        """Notifications asked for and not yet delivered."""
        return len(self.notifications)

    def run(self) -> bool:
        """Do this operator's share of a turn; True if it has to run again."""
        if self._waits or self._turn.is_blocked(self.index):
            return False  # an activation or a refund of credit lets it go on
        must_stop, queue, index = self._turn.must_stop, self.queue, self.index
        for _ in range(MAX_STEPS):
            if queue and self._steps is None and not self._messages:
                self._consume(queue.popleft())  # most often, so without a call
            elif not self._run_one():
                return False
            if self._waits:
                return False
            if must_stop(index):
                return True
        return True

    def _run_one(self) -> bool:
        """Do one thing, in a fixed order of preference; False if there is none."""
        if self._steps is not None:
            self._enter(*self.current)
            self._continue()
        elif self._messages:
            self._take_message()
        elif self.queue:
            self._consume(self.queue.popleft())
        elif (self.spilled and self._take_spilled()) or self._notify():
            pass
        elif self._frontier_moved:
            self._frontier_moved = False
            self._each_shard(self.logic.on_frontier)
        elif self._activated:
            shard = self.shards[self._activated.pop()]
            if self.logic.on_activate is not None:
                self._enter(shard.index, None)
                self.logic.on_activate(shard)
        else:
            return False
        return True

    def _enter(self, shard: int, time: Timestamp | None) -> None:
        self.current = (shard, time)
        self._whereabouts.enter(self.index, shard, time)

    def _begin(self, steps: Iterator[Any]) -> None:
        self._steps = steps
        self._continue()

    def _continue(self) -> None:
        assert self._steps is not None  # noqa: S101  for the type checker
        try:
            step: Any = next(self._steps)  # whatever user code yields
            self._waits = step is not None
            if self._waits and not isinstance(step, Wait):
                raise _wrong_step(self.name, "yielded", step)
        except StopIteration:
            self._steps = None
            self._rights.end()

    def _consume(self, arrival: Arrival) -> None:
        """Hand an arrival to the shards that it is for.

        Most callbacks are over when they return: that takes no generator, which is
        1 us less for each block.
        """
        _, port, _, time, part = arrival
        source_shard, index, weight, _, _, payload = part
        self._turn.left_queue(arrival)
        self.received = payload
        delivery = new_tuple(Delivery, (port, time, payload, weight, source_shard))
        if index == ALL_LOCAL_SHARDS:
            self._begin(self._hand_to_all(arrival, delivery))
            return
        shard = self.shards[index]
        steps = self._hand(shard, delivery)
        if steps is not None:
            self._begin(self._go_on(shard, arrival, steps))
            return
        if self._dense[port]:
            self._heard(shard, arrival)
        self._consumed(arrival)
        self._rights.end()

    def _hand(self, shard: Shard, delivery: Delivery) -> Steps:
        time = delivery.time
        self._rights.begin(delivery.port, time)
        self._enter(shard.index, time)
        on_batch = self._on_batch
        if on_batch is None:
            return None
        steps: Any = on_batch(shard, delivery)  # mypyc would infer None
        return steps if steps is None else self._checked(steps)

    def _go_on(
        self, shard: Shard, arrival: Arrival, steps: Iterator[Any]
    ) -> Iterator[Any]:
        yield from steps
        self._heard(shard, arrival)
        self._consumed(arrival)

    def _hand_to_all(self, arrival: Arrival, delivery: Delivery) -> Iterator[Any]:
        for shard in self.shards.values():
            yield from self._hand(shard, delivery) or ()
            self._heard(shard, arrival)
        self._consumed(arrival)

    def _heard(self, shard: Shard, arrival: Arrival) -> None:
        part = arrival.part
        counters = self._dense[arrival.port]
        if counters and part.is_last:
            counter = counters[arrival.channel]
            counter.hear(arrival.time, shard.index, part.source_shard)

    def _consumed(self, arrival: Arrival) -> None:
        self.received = None  # or it would stay in memory
        metrics = self.metrics
        metrics["records_in"] += arrival.part.weight
        metrics["batches_in"] += 1
        self._turn.consumed(arrival)

    def _notify(self) -> bool:
        notification = self.notifications.pop_ready(self._completion.is_due)
        if notification is None:
            return False
        self._deliver(notification)
        return True

    def _deliver(self, notification: Notification) -> None:
        shard = self.shards[notification.shard]
        self._rights.begin(notification.via_port, notification.time)
        self.notified_ports = notification.ports
        self._enter(shard.index, notification.time)
        self.metrics["notifications"] += 1
        on_notify = self.logic.on_notify
        if on_notify is not None:
            steps = on_notify(shard, notification.time)
            if steps is not None:
                self._begin(self._go_on_notified(notification, self._checked(steps)))
                return
        self._delivered(notification)
        self._rights.end()

    def _go_on_notified(
        self, notification: Notification, steps: Iterator[Any]
    ) -> Iterator[Any]:
        yield from steps
        self._delivered(notification)

    def _delivered(self, notification: Notification) -> None:
        for capability in notification.capabilities:
            capability.release()

    def _checked(self, steps: Any) -> Iterator[Any]:
        if not isinstance(steps, Iterator):
            raise _wrong_step(self.name, "returned", steps)
        return steps

    def _take_message(self) -> None:
        index, body = self._messages.popleft()
        self._enter(index, None)
        if self.logic.on_message is not None:
            self.logic.on_message(self.shards[index], body)

    def _take_spilled(self) -> bool:
        for queue in self.spilled:
            if len(queue):
                self._enter(-1, None)  # until it is read, nobody knows
                self._consume(queue.pop())
                return True
        return False

    def _each_shard(self, callback: Callable[[Any], None] | None) -> None:
        if callback is None:
            return
        for shard in self.shards.values():
            self._enter(shard.index, None)
            callback(shard)

    def mint(self, output: int, time: Timestamp, site: str) -> Capability:
        """Mint a capability at an output."""
        return self._rights.mint(output, time, site)

    def initial(self, output: int, site: str) -> Capability:
        """Clone the initial capability; only while operators start."""
        return self._rights.initial(output, site)

    def state_cell(self, shard: int, name: str) -> dict[Any, Any]:
        """The dictionary of (this operator, shard, name)."""
        return self._turn.state_cell(self.index, shard, name, self.name)

    def port_frontier(self, port: int) -> Frontier:
        """Frontier of an input port."""
        return self._frontiers[port]

    def is_complete(self, shard: int, time: UserTime, ports: tuple[int, ...]) -> bool:
        """Whether every port has everything for the shard at `time`."""
        return self._completion.is_complete(shard, time, ports)

    def activate(self, shard: int, after_s: float) -> None:
        """Run `on_activate` of a shard."""
        self._turn.activate(self.index, shard, after_s)

    def waker(self, shard: int) -> Callable[[], None]:
        """Return what activates a shard from any thread."""
        return self._turn.waker(self.index, shard)

    def can_start_epoch(self, shard: int, epoch: int) -> bool:
        """Whether the epoch credit allows `epoch` to be opened."""
        return self._turn.can_start_epoch(self.index, shard, epoch)

    def may_go_on(self) -> bool:
        """Whether the turn is not over, and no output waits for credit."""
        return not self._turn.must_stop(self.index)

    def emit(self, shard: int, tag: str, body: Any) -> None:
        """Send something to the driver."""
        self._turn.emit(self.index, shard, tag, body)

    def blame(self, shard: int, time: UserTime) -> None:
        """Note where a send failed: a source is at no time of its own."""
        self.current = (shard, time)


METRIC_NAMES = ("records_in", "batches_in", "notifications", "busy_s", "activations")


def _wrong_step(operator: str, how: str, value: object) -> TypeError:
    return TypeError(
        f"a callback of operator {operator!r} {how} something that is no step; got "
        f"{value!r:.200}; expected None; send results with shard.output().send"
    )


def misdirected(instance: OperatorInstance, shard: int) -> InvariantError:
    """Return what to raise when rows come for a shard that is elsewhere."""
    msg = (
        f"operator {instance.name!r} got rows for a shard of another worker; "
        f"got shard {shard} on worker {instance.worker_index}; expected "
        f"one of {list(instance.shards)}; report it, as this is a bug"
    )
    return InvariantError(msg, operator=instance.name, shard=shard)
