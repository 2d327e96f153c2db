"""The controller: it knows the workers of one session and the runs on them.

Like the worker it is a reactor around a transport, driven by `step`: it has no
thread, no process and no clock of its own, so that the simulator drives this very
class. Handles reach it from other threads through `post` and `ask` only.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from timelyml.errors import (
    PayloadError,
    PeerError,
    PeerLostError,
    TimelyError,
    summary_of,
)
from timelyml.exchange import CONTROLLER, Lane, LinkFailure, Transport, Unreadable
from timelyml.runtime.effects import Effect, Ended, Send
from timelyml.runtime.failure import closed_error, unpack_error
from timelyml.runtime.guests import Guests
from timelyml.runtime.membership import Keeper, Membership, circumstances
from timelyml.runtime.messages import (
    HANDSHAKE,
    Connect,
    Connected,
    Failed,
    Heartbeat,
    Hello,
    LinkLost,
    ServiceMessage,
    Shutdown,
    generation_of,
)
from timelyml.runtime.pickles import unsendable_failure
from timelyml.runtime.run_plan import RunPlan
from timelyml.runtime.run_state import RunState
from timelyml.runtime.runs import Event, Observer, Runs
from timelyml.runtime.service import ServiceHost, ServiceSpec
from timelyml.runtime.service_runs import ServiceRuns

MEMBERSHIP_CHECK_S = 1.0
# A dead worker shows first by its links; how it died is known a moment later.
SUSPICION_S = 1.0


class Controller:
    """The controller of one session of a cluster.

    Args:
        transport: The controller's own; owned by whoever calls `step`.
        num_workers: With how many the session begins; guests may come later.
        clock: Monotonic seconds; injected, so that it can be simulated.
        startup_timeout_s: By then every worker has come and connected.
        heartbeat_timeout_s: Silence after which a worker is given up, or None.
        keeper: Who can tell of the workers' processes and end them.
        services: What other packages add; found by name in `services`.
        generations: Numbers for runs that services start; default: from 1 on.
    """

    def __init__(
        self,
        transport: Transport,
        num_workers: int,
        *,
        clock: Callable[[], float],
        startup_timeout_s: float = 60.0,
        heartbeat_timeout_s: float | None = None,
        keeper: Keeper | None = None,
        services: Sequence[ServiceSpec] = (),
        generations: Iterator[int] | None = None,
    ) -> None:
        self.num_workers = num_workers
        self.is_stopped = False
        self.num_stale = 0  # messages of runs that are over, or of nobody
        self.membership = Membership(
            num_workers, clock(), startup_timeout_s, heartbeat_timeout_s
        )
        self._transport = transport
        self._clock = clock
        self._keeper = keeper
        self.runs = Runs(clock, self._send)
        self._actions: deque[Callable[[], None]] = deque()
        self._activities: dict[int, str] = {}
        self._checked = clock()
        self._suspicions: list[tuple[float, Callable[[], None]]] = []
        self._has_services = bool(services)
        self.guests = Guests(
            transport, self.membership, keeper, self._suspect, self.runs
        )
        numbers = itertools.count(1) if generations is None else generations
        self.service_runs = ServiceRuns(self.runs, self.start_run, numbers)
        self.services = ServiceHost(
            services,
            "controller",
            index=CONTROLLER,
            send=self._deliver,
            wake=transport.wake,
            clock=clock,
            dismiss=self.guests.dismiss,
            start_workers=self.guests.start_workers,
            run=self.service_runs.start,
        )
        if not num_workers:
            self.post(self._open)

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` in the next step, by the thread that drives the controller."""
        self._actions.append(action)  # atomic
        self._transport.wake()

    def ask(self, generation: int, event: Event) -> None:
        """Let a run decide something in the next step; nothing if it is over."""
        self.post(lambda: self.runs.decide(generation, event))

    def submit(
        self, plan: RunPlan, observer: Observer, asked_at: float | None = None
    ) -> None:
        """Start a run in the next step; `observer` hears of it until `Ended`.

        Args:
            plan: What to run.
            observer: Called in the thread that drives the controller.
            asked_at: The clock's time when the user asked for it; default: now.
        """
        at = self._clock() if asked_at is None else asked_at
        self.post(lambda: self.start_run(plan, observer, at))

    @property
    def error(self) -> PeerError | None:
        """Why no run can start on this session any more, if so.

        Services go on with the workers that are left, and so do runs beside them.
        """
        is_lasting = self._has_services and self.guests.is_open
        return None if is_lasting else self.membership.error

    def members(self) -> tuple[int, ...]:
        """Return the workers that a run can have that starts now; from any thread."""
        first = enumerate(self.membership.members)
        guests = sorted(self.guests)
        return (*(index for index, each in first if each.error is None), *guests)

    @property
    def num_runs(self) -> int:
        """Runs that are not over."""
        return len(self.runs)

    def activity(self, worker: int) -> str:
        """What a worker was doing when it was last heard of; empty if unknown."""
        return self._activities.get(worker, "")

    def transport_metrics(self) -> dict[str, Any]:
        """Return what the transport moved and refused, by lane."""
        return self._transport.metrics.as_map()

    def step(self) -> bool:
        """Do what can be done without waiting; True if anything was done."""
        worked = self._run_actions()
        incoming = self._transport.receive()
        for peer, message in incoming:
            self._handle(peer, message)
        worked = self.services.step() or worked
        self.runs.settle()
        now = self._clock()
        worked = self.runs.tick(now) or worked
        while self._suspicions and now >= self._suspicions[0][0]:
            self._suspicions.pop(0)[1]()
            worked = True
        # Signs of life may still be queued behind what was just received.
        if not incoming or now - self._checked >= MEMBERSHIP_CHECK_S:
            self._checked = now
            for worker, what in self.membership.overdue(now):
                refused = self._transport.metrics.frames_refused
                more = circumstances(worker, self._keeper, refused)
                self.lose_worker(worker, what + more)
                worked = True
        return worked or bool(incoming)

    def has_work(self) -> bool:
        """Whether `step` would do something even if nothing arrives."""
        return bool(self._actions) or self.services.has_work()

    def next_deadline(self) -> float | None:
        """The clock's time at which `step` has to be called again, if any."""
        deadlines = self.runs.deadlines() + self.services.deadlines()
        deadlines += [due for due, _ in self._suspicions[:1]]
        if (due := self.membership.next_deadline()) is not None:
            deadlines.append(due)
        return min(deadlines, default=None)

    def start_run(
        self, plan: RunPlan, observer: Observer, asked_at: float | None = None
    ) -> None:
        """Start a run, or keep it until the workers are there; see `submit`."""
        problem = self.error or self._missing(plan.members)
        if problem is not None:
            observer(Ended(problem.anew()))
            return
        if self.is_stopped:
            observer(Ended(closed_error()))
            return
        since = self._clock() if asked_at is None else asked_at
        run = RunState(plan, since, self._activities, self.membership.absent)
        self.runs.add(run, observer)
        if self.guests.is_open:
            self.runs.decide(plan.generation, RunState.begin)

    def heard(self, worker: int, activity: str, busy_s: float) -> None:
        """Note a heartbeat."""
        self.membership.heard(worker, self._clock())
        self._activities[worker] = (
            f"in {activity} for {busy_s:.1f} s" if busy_s >= 0.1 else activity
        )

    def heard_working(self, worker: int) -> None:
        """Note that a worker uses its CPU, though it sends no heartbeat."""
        self.membership.heard(worker, self._clock())

    def lose_worker(self, worker: int, what: str) -> None:
        """Give a worker up because of `what`; every run ends."""
        if self.is_stopped or self.membership.members[worker].error is not None:
            return
        tail = self._keeper.stderr_tail(worker) if self._keeper is not None else ""
        place = self._keeper.place(worker) if self._keeper is not None else None
        where, values = self.runs.told(place)
        error = self.membership.lose(worker, what + where, stderr_tail=tail, **values)
        if self._keeper is not None:
            self._keeper.kill(worker)
        self.runs.lose(worker, error)
        self.services.lost(worker, error.anew())

    def lose_link(self, worker: int, peer: int, reason: str) -> None:
        """Give the session up, as a worker hears no more of a peer; runs end."""
        if self.is_stopped or self.error is not None:
            return
        if peer >= self.num_workers:
            self.guests.lose(peer, f"lost its link to worker {worker}: {reason}")
            return
        if peer == CONTROLLER:  # it leaves
            self.lose_worker(worker, f"hears no more of the controller: {reason}")
            return
        if self._missing((worker, peer)) is not None:
            return  # which is why
        error = self.membership.lose_link(worker, peer, reason)
        self.runs.decide_all(lambda run, now: run.lose_link(worker, peer, error, now))
        self.services.lost(worker, error)

    def shut_down(self) -> None:
        """End every run and tell all workers to leave; `step` does no more."""
        if self.is_stopped:
            return
        self.end_all(closed_error())
        for worker in self.membership.living():
            self._send(Send(worker, Shutdown()))
        for guest in self.guests:
            self.guests.dismiss(guest)
        self.is_stopped = True

    def end_all(self, error: TimelyError) -> None:
        """Tell observers that their runs ended so, not asking workers; end services."""
        self.services.close(error)
        self.runs.end_all(error)

    def _run_actions(self) -> bool:
        count = len(self._actions)
        for _ in range(count):
            self._actions.popleft()()
        return count > 0

    def _handle(self, peer: int, message: object) -> None:
        if not 0 <= peer < self.num_workers:
            if not self.guests.handle(peer, message):
                self._on_run_message(peer, message)
            return
        match message:
            case Hello():
                self._on_hello(peer, message)
            case Connected():
                if self.membership.connected(peer):
                    self.runs.decide_all(RunState.begin)
                    self._open()
            case ServiceMessage():
                self.membership.heard(peer, self._clock())
                self.services.handle(peer, message)
            case Heartbeat():
                self.heard(peer, message.activity, message.busy_s)
            case LinkFailure():
                what = f"has lost its link: {message.reason}"
                self._suspect(lambda: self.lose_worker(peer, what))
            case Unreadable() if generation_of(message.message) < 0:
                what = f"sent what does not unpickle: {summary_of(message.error)}"
                self.lose_worker(peer, what)
            case LinkLost():
                other, reason = message.peer, message.reason
                self._suspect(lambda: self.lose_link(peer, other, reason))
            case _:
                self.membership.heard(peer, self._clock())
                self._on_run_message(peer, message)

    def _missing(self, members: Sequence[int]) -> PeerError | None:
        """Return why one of these workers is not there, if so."""
        there = self.membership.members
        for index in members:
            if index < self.num_workers:
                if (error := there[index].error) is not None:
                    return error
            elif index not in self.guests:
                return self.guests.lost_error(index, "has left")
        return None

    def _open(self) -> None:
        self.guests.open(self.services)
        self.services.joined()  # which may start runs

    def _on_hello(self, worker: int, message: Hello) -> None:
        if message.version != HANDSHAKE:
            what = f"speaks {message.version!r}; got it instead of {HANDSHAKE!r}"
            self.lose_worker(worker, what)
            return
        if message.endpoint is not None:
            self._transport.connect(worker, message.endpoint)
        is_complete = self.membership.hello(
            worker, message.process_id, message.endpoint, self._clock()
        )
        if is_complete:
            endpoints = tuple(self.membership.endpoints().values())
            for index in range(self.num_workers):
                self._send(Send(index, Connect(endpoints)))

    def _on_run_message(self, peer: int, message: object) -> None:
        about = message.message if isinstance(message, Unreadable) else message
        generation = generation_of(about)
        if not self.runs.touch(generation):
            self.num_stale += 1
            return

        def handle() -> None:
            self.runs.decide(
                generation, lambda run, now: run.handle(peer, message, now)
            )

        if isinstance(message, Failed) and isinstance(
            unpack_error(message.error), PeerError
        ):
            self._suspect(handle)
        else:
            handle()

    def _suspect(self, action: Callable[[], None]) -> None:
        """Act at once, or after a moment in which a better explanation may come."""
        if self._keeper is None:
            action()
        else:
            self._suspicions.append((self._clock() + SUSPICION_S, action))

    def _deliver(self, worker: int, message: object, lane: Lane) -> None:
        if worker >= self.num_workers:
            self.guests.deliver(worker, message, lane)
            return
        if self.membership.members[worker].error is not None:
            return
        try:
            self._transport.send(worker, message, lane)
        except PeerLostError as error:
            what = f"cannot be reached: {error}"
            self.post(lambda: self._suspect(lambda: self.lose_worker(worker, what)))

    def _send(self, effect: Send) -> None:
        try:
            self._deliver(effect.worker, effect.message, effect.lane)
        except PayloadError as error:  # a record of an input
            worker, message, problem = effect.worker, effect.message, error

            def fail(run: RunState, now: float) -> list[Effect]:
                graph = run.plan.graph
                number = run.number_of(worker)
                failure = unsendable_failure(graph, message, problem, number)
                return run.fail(failure, now)

            self.ask(generation_of(message), fail)
