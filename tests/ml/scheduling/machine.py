"""Islands of hosts and devices in simulated time, on which gangs really have to meet.

A host launches what its gate lets through. A device works strictly in order, and a gang
begins only when it is first in line on all of its devices and its inputs are there: as
with collectives, two orders that differ stop everything. Messages take random times,
in order on each link.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from random import Random

from timelyml.ml.scheduling import (
    Drained,
    GangDone,
    GangKey,
    GangScheduler,
    Grant,
    Islands,
    LaunchGate,
    PlacedGang,
    ProgramDone,
    Report,
    SpreadGraph,
    tickets_of,
)


@dataclass(frozen=True)
class Busy:
    """A device's time with one gang."""

    island: str
    device: str
    client: str
    key: GangKey
    start: int
    end: int


@dataclass
class Running:
    """A gang on its way through an island."""

    island: str
    grant: Grant
    devices: dict[str, list[str]]
    launched_on: set[str] = field(default_factory=set)
    has_begun: bool = False


class Machine:
    """Simulated islands under real schedulers and gates."""

    def __init__(
        self,
        layout,
        *,
        policy=None,
        seed=0,
        delays=(0, 0),
        durations=None,
        default_duration=100_000,
        **options,
    ):
        self.now = 0
        self.random = Random(seed)
        self.delays = delays
        self.durations = durations or {}
        self.default_duration = default_duration
        self.layout = layout
        self.islands = Islands()
        self.gates = {}
        self.launch_orders = defaultdict(list)
        self.sequences = defaultdict(list)
        self.lines = defaultdict(deque)
        self.busy: list[Busy] = []
        self.effects = []
        self.outcomes = {}
        self.drained = []
        self.on_done = {}
        self.places = {}
        self.graphs = {}
        self.finished_gangs = set()
        self._running = {}
        self._events = []
        self._order = count()
        self._link_clock = defaultdict(int)
        for island, hosts in layout.items():
            make = policy() if policy else None
            self.islands.add(island, GangScheduler(make, **options))
            for host in hosts:
                self.gates[island, host] = LaunchGate(host, generation=0)

    def place(self, island, name, devices):
        """Make a placement known, by the names of its devices."""
        hosts = self.layout[island]
        by_host = {
            host: [device for device in own if device in devices]
            for host, own in hosts.items()
        }
        by_host = {host: own for host, own in by_host.items() if own}
        self.places[island, name] = by_host
        self.islands.schedulers[island].place(name, by_host)
        for host, own in by_host.items():
            self.gates[island, host].place(name, own)

    def join(self, client, weight=1):
        for scheduler in self.islands.schedulers.values():
            scheduler.join(client, weight=weight)

    def submit(self, client, program, graph, *, on_done=None, **options):
        """Submit a graph, and prepare it on its hosts after a while."""
        self.graphs[program] = graph
        if on_done is not None:
            self.on_done[program] = on_done
        self.handle(self.islands.submit(client, program, graph.spread, **options))

    def handle(self, effects):
        self.effects += [(self.now, *each) for each in effects]
        follows = []
        for island, effect in effects:
            if isinstance(effect, Grant):
                self._grant(island, effect)
            elif isinstance(effect, ProgramDone):
                self.outcomes[effect.program] = effect.outcome
                follow = self.on_done.pop(effect.program, None)
                if follow is not None:
                    follows.append(follow)
            elif isinstance(effect, Drained):
                self.drained.append(effect)
            else:
                assert isinstance(effect, GangDone)
        for follow in follows:  # once all of these effects are on their way
            follow()

    def at(self, when, call):
        heappush(self._events, (when, next(self._order), call))

    def run(self, until=None):
        """Work until nothing more happens, or until a time."""
        while self._events and (until is None or self._events[0][0] <= until):
            self.now, _, call = heappop(self._events)
            call()
        if until is not None:
            self.now = until

    def link(self, source, target, call):
        """Deliver after a random delay, but never before an earlier one on the link."""
        when = self.now + self.random.randint(*self.delays)
        when = max(when, self._link_clock[source, target])
        self._link_clock[source, target] = when
        self.at(when, call)

    def used(self, start, end):
        """Device time of each client in a window."""
        total = defaultdict(int)
        for each in self.busy:
            overlap = min(each.end, end) - max(each.start, start)
            total[each.client] += max(0, overlap)
        return dict(total)

    def assert_idle(self):
        """Everything that was ordered ran, and nothing waits."""
        assert not self._running, sorted(self._running)
        for scheduler in self.islands.schedulers.values():
            assert scheduler.waiting() == []

    def _grant(self, island, grant):
        devices = self.places[island, grant.placement]
        running = Running(island, grant, devices)
        self._running[island, grant.sequence] = running
        self.sequences[island].append(grant.sequence)
        for host, ticket in tickets_of(grant).items():
            gate = self.gates[island, host]
            self.link(
                "scheduler",
                (island, host),
                lambda g=gate, t=ticket, h=host: self._launch(island, h, g.admit([t])),
            )
            prepared = self.now + self.random.randint(*self.delays)
            self.at(
                prepared,
                lambda g=gate, k=grant.key, h=host: self._launch(
                    island, h, g.prepare(k)
                ),
            )

    def _launch(self, island, host, tickets):
        for ticket in tickets:
            self.launch_orders[island, host].append(ticket.sequence)
            running = self._running[island, ticket.sequence]
            running.launched_on.add(host)
            for device in running.devices[host]:
                self.lines[island, device].append(running)
        self._begin()

    def _begin(self):
        """Start every gang that is first in line everywhere and has its inputs."""
        heads = [line[0] for line in self.lines.values() if line]
        for running in {id(head): head for head in heads}.values():
            grant = running.grant
            if running.has_begun or running.launched_on != set(running.devices):
                continue
            island = running.island
            devices = [d for own in running.devices.values() for d in own]
            lines = [self.lines[island, device] for device in devices]
            if not all(line[0] is running for line in lines):
                continue
            if not self._has_inputs(grant.key):
                continue
            running.has_begun = True
            duration = self._duration(island, grant)
            self.busy += [
                Busy(
                    island,
                    device,
                    grant.client,
                    grant.key,
                    self.now,
                    self.now + duration,
                )
                for device in devices
            ]
            self.at(
                self.now + duration,
                lambda r=running, ls=lines, d=duration: self._end(r, ls, d),
            )

    def _end(self, running, lines, duration):
        island, grant = running.island, running.grant
        for line in lines:
            assert line.popleft() is running
        del self._running[island, grant.sequence]
        self.finished_gangs.add(grant.key)
        for host in running.devices:
            gate = self.gates[island, host]
            self._launch(island, host, gate.finish(grant.sequence))
            report = Report(host, grant.sequence, duration)
            self.link(
                (island, host),
                "scheduler",
                lambda r=report: self.handle(self.islands.finished(island, [r])),
            )
        self._begin()

    def _has_inputs(self, key):
        gang = self.spec(key)
        needs = {GangKey(key.program, each, key.iteration) for each in gang.needs}
        needs |= {
            GangKey(key.program, each, key.iteration - distance)
            for each, distance in gang.carries
            if key.iteration >= distance
        }
        return needs <= self.finished_gangs

    def spec(self, key) -> PlacedGang:
        return self.graphs[key.program].source[key.gang]

    def _duration(self, island, grant):
        computation = self.spec(grant.key).computation
        duration = self.durations.get(computation, self.default_duration)
        return duration() if callable(duration) else duration


class Demand:
    """A client that always has `depth` programs submitted."""

    def __init__(self, machine, client, graph, depth, until=None):
        self.machine = machine
        self.client = client
        self.graph = graph
        self.until = until
        for _ in range(depth):
            self.submit()

    def submit(self):
        if self.until is not None and self.machine.now >= self.until:
            return
        name = f"{self.client}-{len(self.machine.graphs)}"
        self.machine.submit(self.client, name, self.graph, on_done=self.submit)


class Graph:
    """A graph that remembers what it was made of; no subclass, as it may be compiled."""

    __slots__ = ("source", "spread")

    def __init__(self, gangs, *args):
        self.source = gangs
        self.spread = SpreadGraph(gangs, *args)


def single(computation="f", placement="all", island="i", **options):
    """A program of one gang."""
    return Graph([PlacedGang(island, computation, placement, **options)])


def chain(length, computation="f", placement="all", island="i"):
    """A program of gangs that each need the one before."""
    return Graph(
        [
            PlacedGang(island, computation, placement, (k - 1,) if k else ())
            for k in range(length)
        ]
    )


def hosts(num_hosts, devices_per_host=2):
    """Devices d0, d1, ... of hosts h0, h1, ..."""
    return {
        f"h{host}": [
            f"d{device}"
            for device in range(host * devices_per_host, (host + 1) * devices_per_host)
        ]
        for host in range(num_hosts)
    }
