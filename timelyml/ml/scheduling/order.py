"""The order of an island: picks the next gang, numbers it, and watches what is under way.

Knows lines of ready gangs, devices and accounts; which programs there are, and what is
held back, is `scheduler.py`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from timelyml.errors import InvariantError
from timelyml.ml.scheduling.accounts import Accounts
from timelyml.ml.scheduling.estimates import DurationEstimates
from timelyml.ml.scheduling.flows import Flow, Flows
from timelyml.ml.scheduling.placements import Placements
from timelyml.ml.scheduling.policy import Candidate, Policy
from timelyml.ml.scheduling.programs import ProgramRun
from timelyml.ml.scheduling.values import GangKey, Grant, Report, Scope
from timelyml.progress import new_tuple

Held = Collection[tuple[Scope, str]]


class Launch:
    """A gang that is ordered and not over."""

    __slots__ = ("device_ns", "grant", "hosts_left", "is_failed", "run")

    def __init__(self, grant: Grant, run: ProgramRun) -> None:
        self.grant = grant
        self.run = run
        self.hosts_left = {host for host, _ in grant.positions}
        self.device_ns = 0
        self.is_failed = False

    def is_in(self, scope: Scope, name: str) -> bool:
        """Whether the launch belongs to a client, a program or a placement."""
        if scope is Scope.CLIENT:
            return self.run.submission.client == name
        grant = self.grant
        return name == (
            grant.key.program if scope is Scope.PROGRAM else grant.placement
        )


class GangOrder:
    """Numbers gangs, one after the other."""

    def __init__(
        self, policy: Policy, accounts: Accounts, placements: Placements
    ) -> None:
        self.generation = 0
        self.estimates = DurationEstimates()
        self.launches: dict[int, Launch] = {}
        self.passed_ns = 0
        """Device time ordered so far, by which gangs that wait grow older."""
        self._policy = policy
        self._accounts = accounts
        self._placements = placements
        self._flows = Flows()
        self._positions: dict[str, int] = {}
        self._next_sequence = 0
        self._next_ticket = 0

    def ticket(self) -> int:
        """Return the next place in line."""
        self._next_ticket += 1
        return self._next_ticket

    def enqueue(self, run: ProgramRun, gangs: Iterable[int]) -> None:
        """Put ready gangs in line."""
        client = run.submission.client
        for gang in gangs:
            placement = run.submission.graph.gangs[gang].placement
            self._accounts.enter(client, self._placements.groups_of(placement))
            self._flows.push(run, gang)

    def unline(self, run: ProgramRun) -> list[int]:
        """Take the gangs of a program out of line; return them."""
        removed = self._flows.discard(run)
        for gang in removed:
            placement = run.submission.graph.gangs[gang].placement
            groups = self._placements.groups_of(placement)
            self._accounts.exit(run.submission.client, groups)
        return removed

    def move(
        self, placement: str, devices_by_host: Mapping[str, Sequence[str]]
    ) -> None:
        """Put a placement elsewhere, with the gangs in line for it."""
        self._placements.check(placement, devices_by_host)
        waiting = [flow for flow in self._flows if flow.placement == placement]
        before = self._placements.groups_of(placement)
        for flow in waiting:
            for _ in flow:
                self._accounts.exit(flow.client, before)
        self._placements.remove(placement)
        self._placements.add(placement, devices_by_host)
        after = self._placements.groups_of(placement)
        for flow in waiting:
            for _ in flow:
                self._accounts.enter(flow.client, after)

    def decide(self, held: Held) -> list[Grant]:
        """Order all that can be ordered now."""
        grants: list[Grant] = []
        if self._placements.num_groups > 1:
            self._accounts.refresh()
        while self._flows and self._placements.has_any_room():
            flow = self._next(held)
            if flow is None:
                break
            grants.append(self._order(flow))
        return grants

    def report(self, report: Report) -> Launch | None:
        """Take a host's word that its part is over; return the launch if all of it is.

        Raises:
            InvariantError: The host reports what it was not given, or twice.
        """
        launch = self.launches.get(report.sequence)
        if launch is None or report.host not in launch.hosts_left:
            raise InvariantError(
                f"host {report.host!r} reports a launch that it does not have; got "
                f"sequence {report.sequence}; expected one of those under way, "
                f"{sorted(self.launches)[:8]}",
                host=report.host,
                sequence=report.sequence,
            )
        launch.hosts_left.discard(report.host)
        launch.device_ns = max(launch.device_ns, report.device_ns)
        launch.is_failed = launch.is_failed or report.is_failed
        if launch.hosts_left:
            return None
        del self.launches[report.sequence]
        gang = launch.run.submission.graph.gangs[launch.grant.key.gang]
        if not launch.is_failed:
            self.estimates.learn(gang.computation, launch.device_ns)
        self._settle(launch)
        return launch

    def restart(self) -> list[Launch]:
        """Give up what is under way and begin positions anew; return what was lost."""
        self.generation += 1
        self._positions.clear()
        launches = list(self.launches.values())
        self.launches.clear()
        for launch in launches:
            self._settle(launch)
        return launches

    def waiting(self, held: Held) -> Iterator[tuple[GangKey, str]]:
        """Say of each gang in line what it waits for."""
        for flow in self._flows:
            groups = self._placements.groups_of(flow.placement)
            has_room = self._placements.has_room(groups)
            reason = "its turn" if has_room else "a device that is full"
            if _is_held(flow, held):
                reason = "the release of its client or placement"
            for run, gang in flow:
                yield GangKey(run.submission.program, gang, run.iteration), reason

    def _next(self, held: Held) -> Flow | None:
        """Return the line whose first gang goes next, if any may go."""
        if len(self._flows) == 1:  # nothing to sort: most clients wait for themselves
            (flow,) = self._flows
            groups = self._placements.groups_of(flow.placement)
            may_go = self._placements.has_room(groups) and not _is_held(flow, held)
            return flow if may_go else None
        reserved: set[int] = set()
        for groups, flow in self._candidates(held):
            if reserved.isdisjoint(groups) and self._placements.has_room(groups):
                return flow
            # Nobody may pass on these devices, or a large gang might wait for ever.
            reserved.update(groups)
        return None

    def _candidates(self, held: Held) -> list[tuple[tuple[int, ...], Flow]]:
        found = []
        for flow in self._flows:
            if _is_held(flow, held):
                continue
            run = flow.head
            groups = self._placements.groups_of(flow.placement)
            age_ns = self.passed_ns - run.passed_at_ns
            candidate = Candidate(
                flow.client, groups, flow.priority, run.ticket, age_ns
            )
            found.append((self._policy.key(candidate, self._accounts), groups, flow))
        found.sort(key=lambda each: each[0])
        return [(groups, flow) for _, groups, flow in found]

    def _order(self, flow: Flow) -> Grant:
        run, index = self._flows.pop(flow)
        gang = run.submission.graph.gangs[index]
        placement, estimate_ns = gang.placement, self.estimates.of(gang)
        sequence = self._next_sequence
        self._next_sequence += 1
        self.passed_ns += estimate_ns
        self._placements.launch(placement, estimate_ns)
        groups = self._placements.groups_of(placement)
        self._accounts.charge(flow.client, groups, estimate_ns)
        fields = (
            self.generation,
            sequence,
            new_tuple(GangKey, (run.submission.program, index, run.iteration)),
            flow.client,
            placement,
            self._take_positions(placement),
            estimate_ns,
        )
        grant: Grant = new_tuple(Grant, fields)
        self.launches[sequence] = Launch(grant, run)
        self.enqueue(run, run.ordered(index))
        if run.finish_iteration():
            run.begin_iteration(self.ticket(), self.passed_ns)
            self.enqueue(run, run.ready())
        return grant

    def _take_positions(self, placement: str) -> tuple[tuple[str, int], ...]:
        taken = []
        for host in self._placements.hosts_of(placement):
            position = self._positions.get(host, 0)
            self._positions[host] = position + 1
            taken.append((host, position))
        return tuple(taken)

    def _settle(self, launch: Launch) -> None:
        """Return the room of a launch, and charge what it took."""
        _, _, _, client, placement, _, estimate_ns = launch.grant
        groups = self._placements.groups_of(placement)
        self._placements.complete(placement, estimate_ns)
        self._accounts.charge(client, groups, launch.device_ns - estimate_ns)
        self._accounts.exit(client, groups)


def _is_held(flow: Flow, held: Held) -> bool:
    return bool(held) and (
        (Scope.CLIENT, flow.client) in held or (Scope.PLACEMENT, flow.placement) in held
    )
