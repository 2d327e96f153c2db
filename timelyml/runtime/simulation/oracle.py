"""The omniscient oracle of one run: safety, notifications, outputs and the end.

It sees everything that operators do and what every tracker believes, and compares
each tracker with the truth by brute force whenever either has changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from timelyml.exchange import CONTROLLER, records_of
from timelyml.progress import Frontier, Timestamp, Tracker
from timelyml.runtime.effects import Released
from timelyml.runtime.simulation.behaviour import Behaviour
from timelyml.runtime.simulation.closure import Closure, Time, as_time, is_before
from timelyml.runtime.simulation.plan import GraphPlan
from timelyml.runtime.simulation.reference import Reference
from timelyml.runtime.simulation.rules import Kind
from timelyml.runtime.simulation.sources import Source
from timelyml.runtime.simulation.trace import Asked, Event, Got, Sent, Told
from timelyml.runtime.simulation.truth import Pointstamp, Truth
from timelyml.runtime.simulation.violation import Violation

Elements = tuple[Time, ...]


class Oracle:
    """Watches one run on all workers and the controller."""

    def __init__(
        self, plan: GraphPlan, num_workers: int, max_epochs_ahead: int
    ) -> None:
        self.graph = plan.graph
        self.truth = Truth(plan.graph, num_workers)
        self._plan = plan
        self._closure = Closure(plan.graph)
        # By owner of a tracker: what it shows, and what it showed last.
        self._views: dict[int, list[Frontier]] = {}
        self._elements: dict[int, list[tuple[Timestamp, ...]]] = {}
        self._max_epochs_ahead = max_epochs_ahead
        self._frontiers: dict[int, list[Elements]] = {}
        self._from_sources: list[Sent] = []
        self._asked: dict[tuple[int, int], set[tuple[Time, tuple[int, ...]]]] = {}
        self._told: dict[tuple[int, int, int], list[Time]] = {}
        self._last_told: dict[tuple[int, int, tuple[int, ...]], Time] = {}
        self._released: dict[tuple[int, Time], Counter[int]] = {}
        self._ends = set(self.graph.terminal_inputs())
        self._is_dense = {
            (spec.index, port): all(
                channel.pact.dense
                for channel in self.graph.channels_into(spec.index, port)
            )
            for spec in self.graph.operators
            for port in range(spec.num_inputs)
        }

    def observe(self, events: Sequence[Event], *, has_started: bool) -> None:
        """Take what the operators of one worker did in one step.

        Args:
            events: In the order in which they happened.
            has_started: Whether the worker started its operators in this step.

        Raises:
            Violation: A promise is broken.
        """
        fresh = self.truth.note(events)
        if has_started:
            self.truth.start_worker()
        for event in events:
            match event:
                case Sent():
                    source = self._plan.operators[event.operator]
                    if isinstance(source, Source):
                        self._from_sources.append(event)
                        if not source.is_fed:
                            self._check_not_ahead(event)
                case Got():
                    self._check_not_late(event)
                case Asked():
                    waiting = self._asked.setdefault(
                        (event.operator, event.shard), set()
                    )
                    waiting.add((event.time, event.ports))
                case Told():
                    self._check_told(event)
        if fresh:
            for owner, frontiers in self._frontiers.items():
                self._check_against(owner, frontiers, fresh, None)

    def check_tracker(self, owner: int, tracker: Tracker) -> None:
        """Compare what a worker or the controller believes with the truth.

        Raises:
            Violation: A frontier has passed something, or has moved backwards.
        """
        views = self._views.get(owner)
        if views is None:
            places = range(self.graph.num_locations)
            views = self._views[owner] = [tracker.frontier(p) for p in places]
        elements = [view.elements for view in views]
        known = self._elements.get(owner)
        if known == elements:
            return
        self._elements[owner] = elements
        old = self._frontiers.get(owner)
        new = [tuple(map(as_time, each)) for each in elements]
        self._frontiers[owner] = new
        if old is None:
            changed = set(range(len(new)))
        else:
            pairs = enumerate(zip(old, new, strict=True))
            changed = {place for place, (before, after) in pairs if before != after}
            for place in changed:
                self._check_forwards(owner, place, old[place], new[place])
        self._check_against(owner, new, self.truth.live, changed)

    def forget_tracker(self, owner: int) -> None:
        """A worker has dropped the run."""
        for known in (self._frontiers, self._views, self._elements):
            known.pop(owner, None)

    def release(self, effect: Released) -> None:
        """Take what the driver was given as complete.

        Raises:
            Violation: The time is not complete, or was released before.
        """
        operator = self.graph.operator_named(effect.operator).index
        time = as_time(effect.time)
        if (operator, time) in self._released:
            self._fail("output", f"{effect.operator!r} at {time} is released twice")
        place = self.graph.location_of_output(operator)
        self._check_complete(place, time, f"{effect.operator!r} is released")
        records: Counter[int] = Counter()
        for _, payload in effect.items:
            records.update(int(record) for record in records_of(payload))
        self._released[operator, time] = records

    def finish(self, *, is_stopped: bool) -> None:
        """Check a run that says it is complete.

        Args:
            is_stopped: Whether the sources were told to stop early.

        Raises:
            Violation: Something is left, was lost, or came out wrong.
        """
        self.truth.check_all_delivered()
        pending = {key: times for key, times in self._asked.items() if times}
        if pending:
            self._fail("liveness", f"never notified: {pending}")
        if not is_stopped:
            planned, sent = _inputs(self._plan.planned()), _inputs(self._from_sources)
            if planned != sent:
                self._fail("liveness", "a source did not send all that it should")
        reference = Reference(self.graph, self._plan.operators)
        reference.run(self._from_sources)
        self._compare(reference)

    def check_settled(self, owner: int, tracker: Tracker) -> None:
        """Check that a complete run has left nothing in a tracker.

        Raises:
            Violation: Some frontier is not empty, or some count is left.
        """
        if not tracker.is_empty() or any(
            tracker.frontier(place) for place in range(self.graph.num_locations)
        ):
            self._fail(
                "liveness",
                f"the run is complete, but {_name(owner)} still counts "
                f"{tracker.pointstamps()}",
            )

    def _check_against(
        self,
        owner: int,
        frontiers: list[Elements],
        live: Iterable[Pointstamp],
        places: set[int] | None,
    ) -> None:
        for location, time in live:
            if self.truth.live[location, time] <= 0:
                continue
            for place, results in self._closure.from_(location, time).items():
                if places is not None and place not in places:
                    continue
                elements = frontiers[place]
                for result in results:
                    if not any(is_before(element, result) for element in elements):
                        self._fail(
                            "safety",
                            f"for {_name(owner)} the frontier at {self._at(place)} is "
                            f"{list(elements)}; but {time} at {self._at(location)} is "
                            f"live and can result in {result} there",
                        )

    def _check_forwards(
        self, owner: int, place: int, old: Elements, new: Elements
    ) -> None:
        for element in new:
            if not any(is_before(before, element) for before in old):
                self._fail(
                    "safety",
                    f"for {_name(owner)} the frontier at {self._at(place)} went back "
                    f"from {list(old)} to {list(new)}",
                )

    def _check_complete(self, place: int, time: Time, what: str) -> None:
        for (location, at), count in self.truth.live.items():
            if count > 0 and self._closure.leads_to(location, at, place, time):
                self._fail(
                    "notification",
                    f"{what} at {time}, but {at} at {self._at(location)} is live and "
                    f"leads to {self._at(place)}",
                )

    def _check_not_ahead(self, sent: Sent) -> None:
        """A source opens an epoch only when an older one is done at the ends."""
        ends = self._ends_of(sent.operator)
        oldest = min(
            (
                result[0]
                for (location, time), count in self.truth.live.items()
                if count > 0
                for place, results in self._closure.from_(location, time).items()
                if place in ends
                for result in results
            ),
            default=sent.time[0],
        )
        if sent.time[0] - oldest >= self._max_epochs_ahead:
            self._fail(
                "credit",
                f"{self._who(sent.operator)} sends in epoch {sent.time[0]} while "
                f"{oldest} is open; expected at most {self._max_epochs_ahead} at once",
            )

    def _ends_of(self, operator: int) -> set[int]:
        outputs = range(self.graph.operators[operator].num_outputs)
        return {
            place
            for output in outputs
            for place in self._closure.from_(
                self.graph.location_of_output(operator, output), (0,)
            )
            if place in self._ends
        }

    def _check_not_late(self, got: Got) -> None:
        told = self._told.get((got.operator, got.shard, got.port), ())
        is_dense = self._is_dense[got.operator, got.port]
        for time in told:
            if got.time == time or (not is_dense and is_before(got.time, time)):
                self._fail(
                    "notification",
                    f"{self._who(got.operator)} shard {got.shard} got {got.records} at "
                    f"{got.time} on port {got.port} after it was told that {time} is "
                    "complete",
                )

    def _check_told(self, told: Told) -> None:
        who = f"{self._who(told.operator)} shard {told.shard}"
        waiting = self._asked.get((told.operator, told.shard), set())
        if (told.time, told.ports) not in waiting:
            self._fail("notification", f"{who} is told of {told.time} unasked")
        waiting.discard((told.time, told.ports))
        behaviour = self._plan.operators[told.operator]
        in_order = isinstance(behaviour, Behaviour) and behaviour.in_order
        is_sparse = not any(self._is_dense[told.operator, p] for p in told.ports)
        for time, ports in waiting:
            is_earlier = time != told.time and is_before(time, told.time)
            if (in_order and time < told.time) or (
                is_sparse and is_earlier and ports == told.ports
            ):
                self._fail(
                    "notification",
                    f"{who} is told of {told.time} while it waits for {time}",
                )
        key = (told.operator, told.shard, told.ports)
        last = self._last_told.setdefault(key, told.time)
        self._last_told[key] = told.time
        if in_order and told.time < last:
            self._fail("notification", f"{who} is told of {told.time} after {last}")
        for port in told.ports:
            times = self._told.setdefault((told.operator, told.shard, port), [])
            times.append(told.time)
            if not self._is_dense[told.operator, port]:
                place = self.graph.location_of_input(told.operator, port)
                self._check_complete(place, told.time, f"{who} is told")

    def _compare(self, reference: Reference) -> None:
        actual: dict[tuple[int, int, int, Time], Counter[int]] = {}
        for (channel, shard, time), records in self.truth.got.items():
            target = self.graph.channels[channel].target
            actual[target.operator, target.port, shard, time] = records
        expected = reference.delivered
        for place in sorted({*actual, *expected}):
            got, want = actual.get(place, Counter()), expected.get(place, Counter())
            if got != want:
                operator, port, shard, time = place
                self._fail(
                    "output",
                    f"{self._who(operator)} port {port} shard {shard} got at {time} "
                    f"{dict(got)}; expected {dict(want)}",
                )
        for operator, each in enumerate(self._plan.operators):
            if each.rule.kind is not Kind.SINK:
                continue
            released = {
                time: records
                for (sink, time), records in self._released.items()
                if sink == operator and records
            }
            wanted = {t: r for t, r in reference.records_at(operator).items() if r}
            if released != wanted:
                self._fail(
                    "output",
                    f"{self._who(operator)} collected {released}; expected {wanted}",
                )

    def _at(self, location: int) -> str:
        return self.graph.describe_location(location)

    def _who(self, operator: int) -> str:
        return f"operator {self.graph.operators[operator].name!r}"

    def _fail(self, promise: str, what: str) -> None:
        raise Violation(promise, what)


def _inputs(sent: Iterable[Sent]) -> Counter[Sent]:
    return Counter(each for each in sent if each.records)


def _name(owner: int) -> str:
    return "the controller" if owner == CONTROLLER else f"worker {owner}"
