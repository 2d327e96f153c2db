"""Where the unlabelled parts of a model go: cuts that move the fewest bytes.

Between two places the best assignment is a minimum cut, found by maximum flow. Between
more it is hard to find; here places swap what is between them, two at a time and each
time in the best way there is, until no swap moves fewer bytes, from several starts
(alpha-beta swaps: Boykov, Veksler and Zabih, 2001). Stages in an order are cut exactly.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Flow:
    """A value: its size, who makes it, and who reads it.

    Attributes:
        producer: None for what comes from outside, and goes to each place that reads it.
    """

    size_bytes: int
    producer: int | None
    consumers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """Parts of a model, numbered, and the values between them.

    Attributes:
        fixed: The place of each part; None where it is to be chosen.
    """

    fixed: tuple[int | None, ...]
    flows: tuple[Flow, ...]
    num_places: int


def moved_bytes(problem: Problem, places: Sequence[int]) -> int:
    """Return how much moves: a value goes once to each other place that reads it."""
    total = 0
    for flow in problem.flows:
        there = {places[each] for each in flow.consumers}
        if flow.producer is not None:
            there.discard(places[flow.producer])
        total += flow.size_bytes * len(there)
    return total


def assign(problem: Problem) -> list[int]:
    """Return the place of each part, so that few bytes move.

    For two places as few as there can be; the same at every call.
    """
    free = [i for i, place in enumerate(problem.fixed) if place is None]
    starts: Iterable[list[int]] = _starts(problem)
    if problem.num_places <= 2 or not free:
        starts = itertools.islice(starts, 1)
    found = [_swapped(problem, start, free) for start in starts]
    return min(found, key=lambda places: moved_bytes(problem, places))


def assign_in_order(problem: Problem) -> list[int]:
    """Return the stage of each part, none before one whose value it reads.

    A value goes through all stages between its producer and its last reader. Of all
    such assignments one that moves the fewest bytes over borders.

    Args:
        problem: One that has such an assignment.
    """
    stages = [0] * len(problem.fixed)
    for border in range(problem.num_places - 1):
        network = _Network(len(problem.fixed))
        for part, place in enumerate(problem.fixed):
            if place is not None:
                network.tie(part, is_source=place <= border)
        for flow in problem.flows:
            if flow.producer is None:
                continue  # it comes where it is read
            network.cost_if_split(flow.producer, flow.consumers, flow.size_bytes)
            for consumer in flow.consumers:
                network.forbid(consumer, flow.producer)
        near = network.source_side()
        stages = [stage + (part not in near) for part, stage in enumerate(stages)]
    return stages


def _starts(problem: Problem) -> Iterable[list[int]]:
    """Assignments to begin from: with the largest input, and all free in one place."""
    greedy = [0 if place is None else place for place in problem.fixed]
    largest: dict[int, tuple[int, int]] = {}
    for flow in problem.flows:
        for part in flow.consumers:
            if flow.producer is not None:
                best = largest.get(part, (-1, 0))
                largest[part] = max(best, (flow.size_bytes, flow.producer))
    for part, place in enumerate(problem.fixed):
        if place is None and part in largest:
            greedy[part] = greedy[largest[part][1]]
    yield greedy
    for place in range(problem.num_places):
        yield [place if each is None else each for each in problem.fixed]


def _swapped(problem: Problem, places: list[int], free: Sequence[int]) -> list[int]:
    best = moved_bytes(problem, places)
    pairs = list(itertools.combinations(range(problem.num_places), 2))
    since = 0
    for pair in itertools.cycle(pairs):
        if since == len(pairs):
            break
        changed = _swap(problem, places, free, pair)
        cost = moved_bytes(problem, changed)
        since += 1
        if cost < best:
            places, best, since = changed, cost, 1  # this pair has nothing more to swap
    return places


def _swap(
    problem: Problem, places: Sequence[int], free: Sequence[int], pair: tuple[int, int]
) -> list[int]:
    """Return the best assignment that differs in what free parts of a pair have."""
    moving = {part for part in free if places[part] in pair}
    network = _Network(len(places))
    for part, place in enumerate(places):
        if place in pair and part not in moving:
            network.tie(part, is_source=place == pair[0])
    for flow in problem.flows:
        readers = [each for each in flow.consumers if places[each] in pair]
        if not readers:
            continue
        if flow.producer is None or places[flow.producer] not in pair:
            network.cost_if_any(readers, flow.size_bytes)
        else:
            network.cost_if_split(flow.producer, readers, flow.size_bytes)
            network.cost_if_split(flow.producer, readers, flow.size_bytes, back=True)
    near = network.source_side()
    changed = list(places)
    for part in moving:
        changed[part] = pair[0] if part in near else pair[1]
    return changed


@dataclass(slots=True)
class _Network:
    """A network whose minimum cut parts some numbers into a source and a sink side.

    Attributes:
        num_parts: The numbers; nodes for source, sink and costs come after them.
    """

    num_parts: int
    heads: list[int] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    edges: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.edges = [[] for _ in range(self.num_parts + 2)]

    @property
    def source(self) -> int:
        """The node that is on the source side."""
        return self.num_parts

    @property
    def sink(self) -> int:
        """The node that is not."""
        return self.num_parts + 1

    def tie(self, part: int, *, is_source: bool) -> None:
        """Put a part on a side."""
        if is_source:
            self.forbid(self.source, part)
        else:
            self.forbid(part, self.sink)

    def forbid(self, near: int, far: int) -> None:
        """Let no cut have the first on the source side and the second on the other."""
        self._edge(near, far, float("inf"))

    def cost_if_split(
        self, one: int, others: Iterable[int], cost: int, *, back: bool = False
    ) -> None:
        """Charge once if one is on the source side, and any other is not.

        Args:
            one: A part.
            others: Parts.
            cost: What is charged.
            back: Charge if one is on the sink side, and any other is not.
        """
        node = self._node()
        ends = (node, one) if back else (one, node)
        self._edge(*ends, cost)
        for each in others:
            self.forbid(*((each, node) if back else (node, each)))

    def cost_if_any(self, parts: Sequence[int], cost: int) -> None:
        """Charge for each side that any of some parts is on."""
        self.cost_if_split(self.source, parts, cost)
        self.cost_if_split(self.sink, parts, cost, back=True)

    def source_side(self) -> set[int]:
        """Return the source side of a minimum cut; the smallest there is.

        Source: E. A. Dinic, 1970: flows along shortest paths, level by level.
        """
        while True:
            levels = self._levels()
            if self.sink not in levels:
                return set(levels)
            start = [0] * len(self.edges)
            while self._push(levels, start):
                pass

    def _node(self) -> int:
        self.edges.append([])
        return len(self.edges) - 1

    def _edge(self, tail: int, head: int, capacity: float) -> None:
        for ends, size in (((tail, head), capacity), ((head, tail), 0)):
            self.edges[ends[0]].append(len(self.heads))
            self.heads.append(ends[1])
            self.left.append(size)

    def _levels(self) -> dict[int, int]:
        levels, pending = {self.source: 0}, deque([self.source])
        while pending:
            node = pending.popleft()
            for edge in self.edges[node]:
                head = self.heads[edge]
                if self.left[edge] > 0 and head not in levels:
                    levels[head] = levels[node] + 1
                    pending.append(head)
        return levels

    def _push(self, levels: dict[int, int], start: list[int]) -> bool:
        """Send what fits along one path to the sink; tell whether there was one.

        Args:
            levels: How far nodes are from the source.
            start: For each node the first of its edges that may lead on.
        """
        path: list[int] = []
        node = self.source
        while node != self.sink:
            edges = self.edges[node]
            while start[node] < len(edges):
                edge = edges[start[node]]
                head = self.heads[edge]
                if self.left[edge] > 0 and levels.get(head) == levels[node] + 1:
                    break
                start[node] += 1
            else:
                if not path:
                    return False
                node = self.heads[path.pop() ^ 1]
                start[node] += 1
                continue
            path.append(edge)
            node = head
        size = min(self.left[edge] for edge in path)
        for edge in path:
            self.left[edge] -= size
            self.left[edge ^ 1] += size
        return True
