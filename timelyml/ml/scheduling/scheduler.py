"""The gang scheduler of one island: one order for all programs of all clients.

Computations that communicate must be launched in the same order on every host, or they
get each other's data, hang or abort. So there is one scheduler per island (the paper's
section 4.4), and what it decides is a number: the gang's place in the island's order,
and its place among the gangs of each of its hosts. Hosts launch strictly in that order
(`gate.py`) and decide nothing.

- Whether a gang runs is decided once, for all of its devices. What is ordered runs;
  cancelling a program, or the end of its client, removes only what is not ordered yet.
- A gang is ordered after every gang that it needs. So what is ordered depends on nothing
  that may never be, and devices that work in order cannot wait for each other.
- No device has more than a few milliseconds, or more than a fixed number of launches,
  under way: what is ordered cannot be taken back, so everything else stays open to
  the policy. A loop without end is left between two of its gangs like any program.

The scheduler is pure: methods are events, the lists they return are what follows from
them, and the same events always give the same decisions, which are its `trace`. What one
event returns has to be on its way to the hosts before the next event is handled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from timelyml.errors import AdmissionError, ProgramError
from timelyml.ml.scheduling.accounts import Accounts
from timelyml.ml.scheduling.order import GangOrder
from timelyml.ml.scheduling.placements import Placements
from timelyml.ml.scheduling.policy import Fifo, Policy
from timelyml.ml.scheduling.programs import ProgramRun
from timelyml.ml.scheduling.values import (
    DEFAULT_WINDOW_NS,
    MAX_UNFINISHED,
    Drained,
    Effect,
    GangDone,
    GangKey,
    Outcome,
    ProgramDone,
    Report,
    Scope,
    Submission,
)
from timelyml.progress import new_tuple

TRACE_LENGTH = 1000
"""Decisions kept. Of a hundred times as many, collecting garbage took a sixth of the
controller's time, as it looks at all that is kept."""


class GangScheduler:
    """Orders the gangs of one island.

    Args:
        policy: Sorts what could be ordered next; first in, first out unless given.
        window_ns: Expected device time that may be under way on a device.
        window_alone_ns: The same while it has had one client only; `window_ns` if None.
        max_unfinished: Launches that may be unfinished on a device.
        max_programs: Programs that a client may have at once.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        window_ns: int = DEFAULT_WINDOW_NS,
        window_alone_ns: int | None = None,
        max_unfinished: int = MAX_UNFINISHED,
        max_programs: int = 1024,
    ) -> None:
        self.trace: deque[Effect] = deque(maxlen=TRACE_LENGTH)
        self._accounts = Accounts(window_ns)
        alone_ns = window_ns if window_alone_ns is None else window_alone_ns
        windows = window_ns, alone_ns
        self._placements = Placements(self._accounts, *windows, max_unfinished)
        self._order = GangOrder(policy or Fifo(), self._accounts, self._placements)
        self._max_programs = max_programs
        self._clients: dict[str, dict[str, ProgramRun]] = {}
        self._leaving: set[str] = set()
        self._runs: dict[str, ProgramRun] = {}
        self._held: set[tuple[Scope, str]] = set()
        self._draining: dict[tuple[Scope, str], None] = {}

    @property
    def generation(self) -> int:
        """How often the island was restarted."""
        return self._order.generation

    def place(
        self, placement: str, devices_by_host: Mapping[str, Sequence[str]]
    ) -> None:
        """Make a set of devices known, usually a virtual slice."""
        self._placements.add(placement, devices_by_host)

    def unplace(self, placement: str) -> None:
        """Forget a set of devices.

        Raises:
            ProgramError: A program uses it.
        """
        if using := [name for name, run in self._runs.items() if run.uses(placement)]:
            raise ProgramError(
                f"placement {placement!r} is in use; got programs {using[:5]}; expected "
                f"none; cancel them, or move the placement",
                placement=placement,
            )
        self._placements.remove(placement)

    def move(
        self, placement: str, devices_by_host: Mapping[str, Sequence[str]]
    ) -> None:
        """Put a set of devices elsewhere, with the gangs that wait for it.

        Raises:
            ProgramError: Something runs there; hold it, and wait for `Drained`.
        """
        if running := self._num_under_way(Scope.PLACEMENT, placement):
            raise ProgramError(
                f"placement {placement!r} cannot move; got {running} launches under "
                f"way; expected none; hold it and wait until it is drained",
                placement=placement,
            )
        self._order.move(placement, devices_by_host)

    def join(self, client: str, *, weight: int = 1) -> None:
        """Admit a client, or change its weight."""
        self._accounts.join(client, weight)
        self._clients.setdefault(client, {})
        self._leaving.discard(client)

    def leave(self, client: str) -> list[Effect]:
        """Drop all that a client has waiting; `Drained` follows once nothing of it runs.

        What is ordered runs to its end, since other hosts expect it.
        """
        effects: list[Effect] = []
        for run in list(self._programs_of(client).values()):
            effects += self._drop(run, Outcome.CANCELLED)
        self._leaving.add(client)
        self._draining[Scope.CLIENT, client] = None
        return self._conclude(effects)

    def submit(self, submission: Submission) -> list[Effect]:
        """Take a program.

        Raises:
            AdmissionError: The client has as many as it may.
            ProgramError: Its name is taken, or its client or a placement unknown.
        """
        self.check(submission)
        programs = self._clients[submission.client]
        run = ProgramRun(submission, self._order.ticket(), self._order.passed_ns)
        self._runs[submission.program] = programs[submission.program] = run
        self._enqueue(run, run.ready())
        return self._conclude([])

    def check(self, submission: Submission) -> None:
        """Raise what `submit` would raise."""
        programs = self._programs_of(submission.client)
        wanted = submission.graph.placements
        if unknown := [each for each in wanted if each not in self._placements]:
            raise ProgramError(
                f"program {submission.program!r} cannot be taken; got placements "
                f"{unknown}; expected ones that are known; place them first",
                program=submission.program,
            )
        if submission.program in self._runs:
            raise ProgramError(
                f"program {submission.program!r} is there already; got it again; expected "
                f"a new name; number the calls of a program",
                program=submission.program,
            )
        if len(programs) >= self._max_programs:
            raise AdmissionError(
                f"client {submission.client!r} has too many programs waiting; got "
                f"{len(programs)}; expected fewer than {self._max_programs}; wait for "
                f"results before submitting more",
                client=submission.client,
                limit=self._max_programs,
            )

    def open(self, program: str, gang: int, slot: int = 0) -> list[Effect]:
        """Count an input of a gang that comes from elsewhere; `slot` says which.

        At the earliest when what produces it is ordered there: orders of several islands
        then cannot wait for each other (`islands.py`).
        """
        run = self._runs.get(program)
        if run is None or run.outcome is not None:
            return []  # cancelled while the news was under way
        if run.open(gang, slot):
            self._enqueue(run, [gang])
        return self._conclude([])

    def stop(self, program: str, iterations: int | None = None) -> None:
        """End a loop after so many iterations in all, or after the one under way."""
        run = self._runs.get(program)
        if run is not None:
            run.stop(iterations)

    def iteration_of(self, program: str) -> int | None:
        """Return the iteration in which a program is, if there is such a program."""
        run = self._runs.get(program)
        return None if run is None else run.iteration

    def cancel(self, program: str) -> list[Effect]:
        """Drop what of a program is not ordered yet."""
        run = self._runs.get(program)
        return [] if run is None else self._conclude(self._drop(run, Outcome.CANCELLED))

    def finished(self, reports: Iterable[Report]) -> list[Effect]:
        """Take the hosts' word that launches are over.

        Raises:
            InvariantError: A host reports what it was not given, or twice.
        """
        effects: list[Effect] = []
        for report in reports:
            launch = self._order.report(report)
            if launch is None:
                continue
            run = launch.run
            run.num_unfinished -= 1
            _, sequence, key, client, placement, _, _ = launch.grant
            num_devices = len(self._placements.devices_of(placement))
            fields = (
                sequence, key, client, launch.device_ns, num_devices, launch.is_failed
            )  # fmt: skip
            done: GangDone = new_tuple(GangDone, fields)
            effects.append(done)
            if launch.is_failed:
                effects += self._drop(run, Outcome.FAILED)
            else:
                effects += self._end_if_over(run)
        return self._conclude(effects)

    def hold(self, scope: Scope, name: str) -> list[Effect]:
        """Order nothing more of a client, a program or a placement until its release.

        `Drained` follows once nothing of it runs.
        """
        self._held.add((scope, name))
        self._draining[scope, name] = None
        if scope is Scope.PROGRAM and (run := self._runs.get(name)):
            run.parked += self._order.unline(run)
        return self._conclude([])

    def release(self, scope: Scope, name: str) -> list[Effect]:
        """Let go on what was held back."""
        self._held.discard((scope, name))
        self._draining.pop((scope, name), None)
        if scope is Scope.PROGRAM and (run := self._runs.get(name)):
            parked, run.parked = run.parked, []
            self._enqueue(run, parked)
        return self._conclude([])

    def restart(self) -> list[Effect]:
        """Give up all launches under way, since the processes of the island are new.

        Programs of which something was ordered are lost, as what they had computed is
        gone; those that had not begun stay. Hosts count their positions from 0 again.
        """
        for launch in self._order.restart():
            launch.run.num_unfinished -= 1
        effects: list[Effect] = []
        for run in [run for run in self._runs.values() if run.has_started]:
            effects += self._drop(run, Outcome.LOST)
        return self._conclude(effects)

    def lose(self, host: str) -> list[Effect]:
        """Take note that a host is dead: its part of all launches under way failed."""
        launches = self._order.launches.values()
        lost = [x.grant.sequence for x in launches if host in x.hosts_left]
        return self.finished([Report(host, each, 0, is_failed=True) for each in lost])

    def is_first(self, sequence: int) -> bool:
        """Whether nothing ordered before a launch on its hosts is still under way."""
        launches = self._order.launches
        hosts = set(self._placements.hosts_of(launches[sequence].grant.placement))
        return all(
            hosts.isdisjoint(self._placements.hosts_of(each.grant.placement))
            for each in launches.values()
            if each.grant.sequence < sequence
        )

    def is_alone(self, client: str, placement: str) -> bool:
        """Whether no other client that is here has wanted devices of a placement."""
        return placement in self._placements and self._accounts.is_alone(
            client, self._placements.groups_of(placement)
        )

    def is_used(self, placement: str) -> bool:
        """Whether programs use a set of devices."""
        return any(run.uses(placement) for run in self._runs.values())

    def waiting(self) -> list[tuple[GangKey, str]]:
        """Say of each gang that is not ordered yet what it waits for."""
        found = list(self._order.waiting(self._held))
        for name, run in self._runs.items():
            found += [
                (GangKey(name, gang, run.iteration), "the release of its program")
                for gang in run.parked
            ]
            found += [
                (GangKey(name, gang, run.iteration), run.blockers(gang))
                for gang in run.waiting()
            ]
        return found

    def _conclude(self, effects: list[Effect]) -> list[Effect]:
        """Order what can be ordered, as after every event, and note it all."""
        effects += self._order.decide(self._held)
        for scope, name in list(self._draining):
            if self._num_under_way(scope, name):
                continue
            del self._draining[scope, name]
            effects.append(Drained(scope, name))
            if scope is Scope.CLIENT and name in self._leaving:
                self._leaving.discard(name)
                self._accounts.leave(name)
                del self._clients[name]
        self.trace.extend(effects)
        return effects

    def _enqueue(self, run: ProgramRun, gangs: Iterable[int]) -> None:
        if (Scope.PROGRAM, run.submission.program) in self._held:
            run.parked += gangs
        else:
            self._order.enqueue(run, gangs)

    def _drop(self, run: ProgramRun, outcome: Outcome) -> list[Effect]:
        if run.outcome is None:
            run.outcome = outcome
            self._order.unline(run)
            run.parked.clear()
        return self._end_if_over(run)

    def _end_if_over(self, run: ProgramRun) -> list[Effect]:
        if run.num_unfinished or not run.is_all_ordered:
            return []
        client, program = run.submission.client, run.submission.program
        del self._runs[program], self._clients[client][program]
        fields = client, program, run.outcome or Outcome.FINISHED
        return [new_tuple(ProgramDone, fields)]

    def _num_under_way(self, scope: Scope, name: str) -> int:
        launches = self._order.launches.values()
        return sum(launch.is_in(scope, name) for launch in launches)

    def _programs_of(self, client: str) -> dict[str, ProgramRun]:
        if client not in self._clients or client in self._leaving:
            raise ProgramError(
                f"client {client!r} is not here; got it from nobody known; expected one "
                f"of {sorted(self._clients)[:8]}; join first",
                client=client,
            )
        return self._clients[client]
