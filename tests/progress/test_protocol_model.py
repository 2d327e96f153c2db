"""A small world of workers that obey the protocol, against an omniscient oracle.

Links deliver data first in, first out; progress may even overtake within a link,
as it may travel on two lanes. All choices come from one seed.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import pytest

from timelyml.progress import (
    Capability,
    CapabilityTable,
    Change,
    ProgressAccumulator,
    ProgressBatch,
    ProgressInbox,
    ProgressLog,
    ReachabilityGraph,
    Summary,
    Timestamp,
    Tracker,
    depth_of,
    epoch_of,
    minimum,
)

CONTROLLER = -1
ACTIONS = [
    "consume",
    "consume",
    "use",
    "use",
    "publish",
    "publish",
    "sum",
    *["deliver"] * 6,
]


@dataclass(frozen=True)
class Flow:
    """A graph with the roles of its locations."""

    graph: ReachabilityGraph
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    inner: dict[int, list[tuple[int, Summary]]]  # input -> outputs of its operator
    channels: dict[int, list[tuple[int, Summary]]]  # output -> inputs


def make_flow(depths: list[int], inner: list, channels: list) -> Flow:  # type: ignore[type-arg]
    by_source: tuple[dict[int, list[tuple[int, Summary]]], ...] = ({}, {})
    for edges, table in zip((inner, channels), by_source, strict=True):
        for source, target, summary in edges:
            table.setdefault(source, []).append((target, summary))
    inputs = sorted({edge[1] for edge in channels})
    outputs = tuple(place for place in range(len(depths)) if place not in inputs)
    graph = ReachabilityGraph(depths, [*inner, *channels])
    return Flow(graph, outputs, tuple(inputs), *by_source)


def pipeline() -> Flow:
    """Source 0 -> operator (1, 2) -> operator (3, 4) -> sink 5, and 0 -> 3."""
    same = Summary.identity(0)
    return make_flow(
        [0] * 6,
        [(1, 2, same), (3, 4, Summary.advance(0))],
        [(0, 1, same), (2, 3, same), (4, 5, same), (0, 3, same)],
    )


def loops() -> Flow:
    """Source 0 -> enter -> (1, 2), enter -> (3, 4) with feedbacks, leave -> sink 5."""
    return make_flow(
        [0, 1, 1, 2, 2, 0],
        [(1, 2, Summary.identity(1)), (3, 4, Summary.identity(2))],
        [
            (0, 1, Summary.enter(0)),
            (2, 3, Summary.enter(1)),
            (4, 3, Summary.advance(2)),
            (4, 1, Summary(2, (0, 1))),  # leave the inner scope, feed back outside
            (2, 5, Summary.leave(1)),
        ],
    )


class Worker:
    """One worker: what it holds, what it received, and its part of the protocol."""

    def __init__(self, world: World, index: int, num_workers: int) -> None:
        flow = world.flow
        self.world = world
        self.index = index
        self.log = world.log_type(index, world.generation)
        self.inbox = ProgressInbox(world.generation)
        self.tracker = world.new_tracker()
        self.table = CapabilityTable(self.log.record)
        self.held: list[Capability] = [
            self.table.start(place, minimum(flow.graph.depths[place]), "initial")
            for place in flow.outputs
        ]
        self.unread: deque[tuple[int, Timestamp, int]] = deque()

    def send(self, capability: Capability, rng: random.Random) -> None:
        for target, summary in self.world.flow.channels.get(capability.location, ()):
            time = summary.results_in(later(capability.time, rng))
            if time is not None:
                weight = rng.randint(1, 3)
                self.log.record(target, time, weight)
                receiver = self.world.workers[rng.randrange(len(self.world.workers))]
                receiver.unread.append((target, time, weight))

    def consume(self, rng: random.Random, keep: float) -> None:
        location, time, weight = self.unread.popleft()
        for output, summary in self.world.flow.inner.get(location, ()):
            result = summary.results_in(time)
            if result is not None and rng.random() < keep / 2:
                capability = self.table.mint(output, result, "consumed")
                if rng.random() < 0.5:
                    self.send(capability, rng)
                self.held.append(capability)
        self.log.record(location, time, -weight)

    def use_capability(self, rng: random.Random, keep: float) -> None:
        index = rng.randrange(len(self.held))
        if rng.random() < 0.7:  # mostly the oldest, or no frontier would ever move
            index = self.held.index(min(self.held, key=lambda c: epoch_of(c.time)))
        capability = self.held[index]
        if rng.random() > keep:
            capability.release()
            del self.held[index]
            return
        action = rng.choice(["send", "downgrade", "downgrade", "delay"])
        if action == "send":
            self.send(capability, rng)
        elif action == "downgrade":
            capability.downgrade(later(capability.time, rng))
        elif len(self.held) < 5:
            self.held.append(capability.delayed(later(capability.time, rng)))

    def publish(self, *, force: bool = False) -> bool:
        self.table.settle()
        batch = self.log.take(self.tracker, force=force)
        if batch is not None:
            self.world.publish(batch)
        return batch is not None

    def receive(self, batch: ProgressBatch) -> None:
        for ready in self.inbox.accept(batch):
            self.tracker.update_many(ready.changes)
            self.tracker.propagate()


def later(time: Timestamp, rng: random.Random) -> Timestamp:
    coords = (time,) if isinstance(time, int) else time
    moved = tuple(value + rng.choice([0, 0, 1, 2]) for value in coords)
    return moved if depth_of(time) else moved[0]


class World:
    """Workers, the controller of accumulator mode, and progress in flight."""

    def __init__(
        self,
        flow: Flow,
        num_workers: int,
        *,
        is_accumulated: bool,
        log_type: type[ProgressLog] = ProgressLog,
    ) -> None:
        self.flow = flow
        self.generation = 4
        self.num_workers = num_workers
        self.log_type = log_type
        self.workers: list[Worker] = []
        for index in range(num_workers):
            self.workers.append(Worker(self, index, num_workers))
        self.accumulator = (
            ProgressAccumulator(self.generation) if is_accumulated else None
        )
        self.controller_tracker = self.new_tracker()
        self.in_flight: list[tuple[int, ProgressBatch]] = []
        self.num_batches = 0
        self.force = 0.0  # how often a batch is sent that might have stayed

    def new_tracker(self) -> Tracker:
        initial: list[Change] = [
            (place, minimum(self.flow.graph.depths[place]), self.num_workers)
            for place in self.flow.outputs
        ]
        return Tracker(self.flow.graph, initial)

    def publish(self, batch: ProgressBatch) -> None:
        receivers = range(self.num_workers)
        if self.accumulator is not None and batch.sender != CONTROLLER:
            receivers = range(CONTROLLER, 0)
        self.in_flight += [(receiver, batch) for receiver in receivers]
        self.num_batches += 1

    def deliver(self, rng: random.Random) -> None:
        receiver, batch = self.in_flight.pop(rng.randrange(len(self.in_flight)))
        if receiver == CONTROLLER:
            assert self.accumulator is not None
            self.accumulator.accept(batch)
        else:
            self.workers[receiver].receive(batch)

    def publish_sum(self, *, force: bool = False) -> bool:
        if self.accumulator is None:
            return False
        _, batch = self.accumulator.settle(self.controller_tracker, force=force)
        if batch is None:
            return False
        self.publish(batch)
        return True

    def step(self, rng: random.Random, keep: float) -> None:
        worker = rng.choice(self.workers)
        action = rng.choice(ACTIONS)
        if action == "consume" and worker.unread:
            worker.consume(rng, keep)
        elif action == "use" and worker.held:
            worker.use_capability(rng, keep)
        elif action == "publish":
            worker.publish(force=rng.random() < self.force)
        elif action == "deliver" and self.in_flight:
            self.deliver(rng)
        elif action == "sum":
            self.publish_sum(force=rng.random() < self.force)

    def live(self) -> set[tuple[int, Timestamp]]:
        """Every pointstamp that really exists now."""
        found = {(h.location, h.time) for w in self.workers for h in w.table.holdings()}
        return found | {(place, t) for w in self.workers for place, t, _ in w.unread}

    def check_safety(self) -> None:
        """No frontier has passed a time that a live pointstamp could result in."""
        graph = self.flow.graph
        implied = {
            (place, summary.results_in(time))
            for start, time in self.live()
            for place in range(graph.num_locations)
            for summary in graph.minimal_summaries(start, place)
        }
        trackers = [worker.tracker for worker in self.workers]
        if self.accumulator is not None:
            trackers.append(self.controller_tracker)
        for tracker in trackers:
            for place, result in implied:
                if result is not None:
                    assert not tracker.has_passed(place, result), (place, result)

    def finish(self, rng: random.Random) -> None:
        """Consume, release and deliver everything, without starting anything new."""
        while True:
            while any(worker.unread or worker.held for worker in self.workers):
                self.step(rng, keep=0.0)
            moved = [worker.publish() for worker in self.workers]
            moved.append(self.publish_sum())
            if not self.in_flight and not any(moved):
                return
            while self.in_flight:
                self.deliver(rng)
                self.check_safety()


def run(world: World, seed: int, num_steps: int = 800) -> World:
    rng = random.Random(seed)
    for index in range(num_steps):
        world.step(rng, keep=0.95 if index < num_steps // 2 else 0.8)
        world.check_safety()
    world.finish(rng)
    return world


@pytest.mark.parametrize("is_accumulated", [False, True])
@pytest.mark.parametrize("flow", [pipeline(), loops()], ids=["pipeline", "loops"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_no_frontier_passes_a_live_pointstamp_and_all_are_empty_at_the_end(
    flow: Flow, num_workers: int, is_accumulated: bool
) -> None:
    for seed in range(6):
        world = World(flow, num_workers, is_accumulated=is_accumulated)
        world.force = 0.3 * (seed % 2)
        run(world, seed)
        for worker in world.workers:
            where = f"seed {seed}, worker {worker.index}"
            assert worker.tracker.is_empty(), where
            assert worker.log.is_empty, where
            for place in range(flow.graph.num_locations):
                assert not worker.tracker.frontier(place), where
        assert world.controller_tracker.is_empty() == is_accumulated


class SplittingLog(ProgressLog):
    """Breaks the rule: sends decreases at once and increases later."""

    def __init__(self, sender: int, generation: int) -> None:
        super().__init__(sender, generation)
        self.increases: list[Change] = []
        self.decreases: list[Change] = []

    def record(self, location: int, time: Timestamp, delta: int) -> None:
        changes = self.increases if delta > 0 else self.decreases
        changes.append((location, time, delta))

    def take(self, tracker: Tracker, *, force: bool = False) -> ProgressBatch | None:
        self.record_many(self.decreases or self.increases)
        (self.decreases or self.increases).clear()
        return super().take(tracker, force=True)


@pytest.mark.sources
def test_the_model_catches_a_buffer_that_is_split() -> None:
    def try_seeds() -> None:
        for seed in range(20):
            run(World(pipeline(), 3, is_accumulated=False, log_type=SplittingLog), seed)

    with pytest.raises(AssertionError, match=r"\(\d, \d+\)"):
        try_seeds()


@pytest.mark.sources
def test_holding_back_sends_fewer_batches_than_sending_at_once() -> None:
    class EagerLog(ProgressLog):
        def take(
            self, tracker: Tracker, *, force: bool = False
        ) -> ProgressBatch | None:
            return super().take(tracker, force=True)

    held = run(World(pipeline(), 3, is_accumulated=False), seed=1)
    eager = run(World(pipeline(), 3, is_accumulated=False, log_type=EagerLog), seed=1)
    assert held.num_batches < eager.num_batches
