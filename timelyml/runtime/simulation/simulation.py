"""The simulation of one scenario: a seeded scheduler around the real endpoints.

It owns no loop of a worker or a controller. It decides whose `step` is called next,
which link delivers next and how much time passes, and shows the oracles the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from timelyml.errors import PeerLostError
from timelyml.exchange import CONTROLLER, Codec
from timelyml.runtime.controller import Controller
from timelyml.runtime.loop import Endpoint
from timelyml.runtime.messages import HANDSHAKE, Hello
from timelyml.runtime.simulation.clock import SimClock
from timelyml.runtime.simulation.credit_watch import CreditWatch
from timelyml.runtime.simulation.network import LinkKey, SimNetwork
from timelyml.runtime.simulation.scenario import (
    HARMLESS,
    OF_ONE_RUN,
    Fault,
    Scenario,
    make_rng,
)
from timelyml.runtime.simulation.violation import Violation
from timelyml.runtime.simulation.watch import Watch
from timelyml.runtime.worker import Worker

MAX_ACTIONS = 60_000
MAX_ACTION_S = 2e-4
SPURIOUS_SHARE = 0.02
SLOWNESS = 0.96  # how often a slow link delivers nothing when it could


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of a simulation that kept every promise."""

    num_actions: int
    num_steps: int
    num_delivered: int
    num_stale: int
    num_spilled: int
    num_complete: int
    num_failed: int


class Simulation:
    """Runs one scenario from beginning to end.

    Args:
        scenario: What happens.
        directory: Where loops spill to.
        codec: Of the workers; may be shared, as simulations run one by one.
        is_encoded: Whether every message passes through the codec.
        log: Told every action, for people.
    """

    def __init__(
        self,
        scenario: Scenario,
        directory: Path,
        codec: Codec,
        *,
        is_encoded: bool = True,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.scenario = scenario
        self.clock = SimClock(scenario.tick_s)
        self._rng = make_rng(scenario.seed, "schedule")
        self._codec = codec
        self._directory = directory
        self._credit = CreditWatch()
        self.network = SimNetwork(codec if is_encoded else None, self._credit.on_send)
        self._log = log
        self._num_actions = 0
        self._num_steps = 0
        self._slow: dict[LinkKey, bool] = {}
        self._wants_step: set[int] = set()
        self._deadlines: dict[int, float | None] = {}
        self._paused_until: dict[int, int] = {}
        self.controller = Controller(
            self.network.transport(CONTROLLER), scenario.num_workers, clock=self.clock
        )
        self._every_worker: list[Worker] = []
        self.workers = [self._make_worker(i) for i in range(scenario.num_workers)]
        self.watches = [Watch(scenario, index) for index in range(len(scenario.runs))]
        for watch in self.watches:
            config = watch.run.config
            self._credit.expect(watch.generation, watch.plan.graph, config.credit_bytes)
        self._to_submit = list(self.watches)
        self._scripts = {
            watch.generation: [s for s in watch.inputs() if s] for watch in self.watches
        }
        self._is_fault_due = scenario.fault is not Fault.NONE

    def run(self) -> Outcome:
        """Act until every run is over and nothing is under way.

        Raises:
            Violation: A promise of the runtime was broken.
        """
        for worker in self.workers:
            transport = self.network.transport(worker.index)
            transport.send(CONTROLLER, Hello(worker.index, 0, None, HANDSHAKE))
        while self._act():
            pass
        self._check_end()
        failed = [w for w in self.watches if w.ended is not None and w.ended.error]
        return Outcome(
            self._num_actions,
            self._num_steps,
            self.network.num_delivered,
            sum(worker.num_stale for worker in self.workers),
            sum(watch.num_spilled() for watch in self.watches),
            len(self.watches) - len(failed),
            len(failed),
        )

    def close(self) -> None:
        """Free what workers hold outside of memory, lost ones included."""
        for worker in self._every_worker:
            for flow in worker._dataflows.values():  # noqa: SLF001
                flow.close()

    def _act(self) -> bool:
        """Do one thing; False if there is nothing left to do."""
        self._num_actions += 1
        if self._num_actions > MAX_ACTIONS:
            raise Violation("liveness", f"not over after {MAX_ACTIONS} actions")
        self.clock.advance(self._rng.random() * MAX_ACTION_S)
        self._drive()
        if self._is_fault_due and self._num_actions >= self.scenario.fault_after:
            self._fail_something()
        links = self.network.busy_links
        ready = [e for e in self._endpoints() if self._is_ready(e)]
        if links and (not ready or self._rng.random() < self.scenario.deliver_share):
            self._deliver(links, must=not ready)
        elif ready:
            self._step(self._rng.choice(ready))
        else:
            return self._wait()
        if self._rng.random() < SPURIOUS_SHARE:
            self._step(self._rng.choice(self._endpoints()))
        return True

    def _deliver(self, links: list[LinkKey], *, must: bool) -> None:
        link = links[int(self._rng.random() * len(links))]
        slow = self._slow.get(link)
        if slow is None:
            slow = self._rng.random() < self.scenario.slow_share
            self._slow[link] = slow
        if slow and not must and self._rng.random() < SLOWNESS:
            return
        if self._log is not None:
            self._note(f"{link.sender} -> {link.receiver}: {self.network.head(link)}")
        self.network.deliver(link)

    def _step(self, index: int) -> None:
        """Let one endpoint take a step, then look at what it did."""
        if self._paused_until.get(index, 0) > self._num_actions:
            return
        self._num_steps += 1
        if index == CONTROLLER:
            self._note("step of the controller")
            endpoint: Endpoint = self.controller
            worked = self.controller.step()
            for watch in self.watches:
                watch.after_controller(self.controller)
        else:
            worker = self.workers[index]
            self._note(f"step of worker {index}")
            endpoint = worker
            try:
                worked, is_over = worker.step(), worker.is_stopped
            except PeerLostError:
                worked, is_over = False, True
            except Violation:
                raise
            except Exception as error:
                what = f"worker {index} crashed: {error!r}"
                raise Violation("failure", what) from error
            for watch in self.watches:
                watch.after_worker(worker, self.controller)
            if is_over:  # its process would end
                self._note(f"worker {index} leaves")
                self._restart(index)
                return
        (self._wants_step.add if worked else self._wants_step.discard)(index)
        self._deadlines[index] = endpoint.next_deadline()

    def _wait(self) -> bool:
        """Nothing can happen now: let time pass, or end."""
        if self._paused_until:
            self._paused_until.clear()
            return True
        if self._to_submit or any(self._scripts.values()):
            return self._drive(at_once=True)
        due = [d for d in self._deadlines.values() if d is not None]
        if due:
            self._note(f"wait until {min(due):.4f}")
            self.clock.advance_to(min(due))
            return True
        if any(watch.ended is None for watch in self.watches):
            raise Violation("liveness", self._stall())
        return False

    def _is_ready(self, index: int) -> bool:
        if self._paused_until.get(index, 0) > self._num_actions:
            return False
        if index in self._wants_step:
            return True
        transport = self.network.transport(index)
        if transport.has_mail or transport.is_awake:
            return True
        deadline = self._deadlines.get(index)
        return deadline is not None and deadline <= self.clock.now_s

    def _endpoints(self) -> range:
        return range(CONTROLLER, self.scenario.num_workers)

    def _drive(self, *, at_once: bool = False) -> bool:
        """Submit runs that are due and send inputs; True if anything was left to do."""
        for watch in list(self._to_submit):
            if at_once or self._num_actions > watch.run.starts_after:
                self._note(f"submit run {watch.generation}")
                self._to_submit.remove(watch)
                self.controller.submit(watch.plan, watch.on_effect)
        for watch in self.watches:
            scripts = self._scripts[watch.generation]
            if watch in self._to_submit or not scripts:
                continue
            if watch.ended is not None:
                scripts.clear()
            elif at_once or self._rng.random() < 0.2:
                self._send_input(watch, scripts)
        return True

    def _send_input(
        self, watch: Watch, scripts: list[list[tuple[int, int, object]]]
    ) -> None:
        script = self._rng.choice(scripts)
        operator, shard, body = script.pop(0)
        if not script:
            scripts.remove(script)
        self.controller.ask(
            watch.generation, lambda run, _: run.send_input(operator, shard, body)
        )

    def _fail_something(self) -> None:
        rng, first = self._rng, self.watches[0]
        self._is_fault_due = False
        self._note(f"fault: {self.scenario.fault.value}")
        match self.scenario.fault:
            case Fault.PAUSE:
                index = rng.choice(self._endpoints())
                self._paused_until[index] = self._num_actions + rng.randint(20, 400)
                self._is_fault_due = rng.random() < 0.7
            case Fault.STOP:
                for watch in self.watches:
                    watch.is_stopped = True
                    self.controller.ask(
                        watch.generation, lambda run, _: run.stop_sources()
                    )
            case Fault.INSPECT:
                for watch in self.watches:
                    self.controller.ask(watch.generation, watch.inspect)
                self._is_fault_due = rng.random() < 0.5
            case Fault.CANCEL:
                first.is_cancelled = True
                self.controller.ask(first.generation, lambda run, now: run.cancel(now))
            case Fault.CUT | Fault.LOSE:
                sender, receiver = rng.sample(list(self._endpoints()), 2)
                self._cut(sender, receiver)
                if rng.random() < 0.5:
                    self._cut(receiver, sender)
            case Fault.RESTART:
                self._restart(rng.randrange(self.scenario.num_workers))

    def _cut(self, sender: int, receiver: int) -> None:
        loses = self.scenario.fault is Fault.LOSE
        self._note(f"cut {sender} -> {receiver}")
        self.network.cut(
            sender,
            receiver,
            "the link was cut",
            keep=lambda count: self._rng.randrange(count + 1) if loses else count,
            is_known=self._rng.random() < 0.3,
        )

    def _restart(self, index: int) -> None:
        """Replace a worker by one that knows nothing; its peers lose their links."""
        for peer in self._endpoints():
            if peer != index:
                self._cut(index, peer)
        self.network.replace(index)
        self.workers[index] = self._make_worker(index)
        self._wants_step.discard(index)
        self._deadlines.pop(index, None)
        for watch in self.watches:
            watch.forget_worker(index)

    def _make_worker(self, index: int) -> Worker:
        worker = Worker(
            index,
            self.network.transport(index),
            codec=self._codec,
            clock=self.clock,
            spill_directory=self._directory,
        )
        self._every_worker.append(worker)
        return worker

    def _check_end(self) -> None:
        """Nothing may be left on any worker, unless one was lost."""
        if self.scenario.fault not in HARMLESS | OF_ONE_RUN:
            return
        for worker in self.workers:
            if worker._dataflows:  # noqa: SLF001
                left = list(worker._dataflows)  # noqa: SLF001
                what = f"worker {worker.index} still holds the runs {left}"
                raise Violation("liveness", what)

    def _stall(self) -> str:
        """Who waits for what when nothing can happen any more."""
        lines = ["nothing can happen any more, but runs are not over"]
        for watch in self.watches:
            if watch.ended is not None:
                continue
            graph = watch.plan.graph
            live = [
                f"{count} at {graph.describe_location(place)} at {time}"
                for (place, time), count in watch.oracle.truth.live.items()
            ]
            lines.append(f"run {watch.generation}: live are {'; '.join(live) or None}")
            for worker in self.workers:
                flow = worker._dataflows.get(watch.generation)  # noqa: SLF001
                if flow is not None:
                    lines.append(
                        f"worker {worker.index} counts {flow.tracker.pointstamps()}"
                    )
        return "\n".join(lines)

    def _note(self, what: str) -> None:
        if self._log is not None:
            self._log(f"{self._num_actions:6d} {self.clock.now_s:.4f} {what}")
