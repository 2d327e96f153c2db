"""Which pointstamp could result in which: the graph of ports and path summaries.

A location is one port. Edges are the connections inside operators (input to
output) and the channels between them (output to input); each has a summary. The
graph is static; the tracker walks it in the order of `sort_key`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from timelyml.errors import GraphError
from timelyml.progress.antichain import Antichain
from timelyml.progress.components import shortest_path, strong_components
from timelyml.progress.summary import Summary
from timelyml.progress.timestamp import Timestamp

Edge: TypeAlias = tuple[int, int, Summary]


class ReachabilityGraph:
    """Locations with the depth of their timestamps, and edges with summaries.

    Args:
        depths: Depth of the timestamps at each location.
        edges: `(source, target, summary)` by location.

    Raises:
        GraphError: If an edge leaves the graph or its summary does not fit the
            depths of its ends. A cycle that does not advance is no error here:
            see `stuck_cycle`.
    """

    def __init__(self, depths: Sequence[int], edges: Sequence[Edge]) -> None:
        self.depths = tuple(depths)
        self.edges = tuple(edges)
        for index in range(len(self.edges)):
            self._check_edge(index)
        self._ranks: list[list[int]] = [[] for _ in self.depths]
        self._components: list[list[int]] = []
        self._stuck: list[int] | None = None
        self._rank(range(self.num_locations), range(len(self.edges)))
        self._summaries_to: dict[int, list[Antichain[Summary]]] = {}

    @property
    def num_locations(self) -> int:
        """Number of locations."""
        return len(self.depths)

    @property
    def components(self) -> Sequence[Sequence[int]]:
        """Strongly connected components of all edges, upstream ones first."""
        if not self._components:
            successors = self._successors(range(len(self.edges)))
            everything = range(self.num_locations)
            self._components = strong_components(everything, successors)
        return self._components

    def stuck_cycle(self) -> list[int] | None:
        """Return the locations of a cycle that does not advance time, if any.

        They are in the order of the path; the last one leads back to the first.
        """
        return self._stuck

    def stuck_error(self) -> GraphError:
        """Return the error that names the stuck cycle, for those who need none."""
        return GraphError(
            f"graph has a cycle that does not advance; got locations {self._stuck!r};"
            " expected every cycle to advance a coordinate; add a feedback to it",
            cycle=self._stuck,
        )

    def cyclic_edges(self) -> set[int]:
        """Return the indices of the edges that lie on some cycle."""
        component_of = {
            location: index
            for index, component in enumerate(self.components)
            for location in component
        }
        return {
            index
            for index, (source, target, _) in enumerate(self.edges)
            if component_of[source] == component_of[target]
        }

    def sort_key(self, location: int, time: Timestamp) -> tuple[int, ...]:
        """Return a key that every edge strictly raises, distinct for each pointstamp.

        It interleaves the coordinates of `time` with ranks of the location: the
        rank at one level is topological once the edges that advance that level's
        coordinate, or an outer one, are taken away.
        """
        ranks = self._ranks[location]
        if isinstance(time, int):
            return (time, ranks[0])
        return tuple(
            [value for pair in zip(time, ranks, strict=True) for value in pair]
        )

    def ranks(self, location: int) -> tuple[int, ...]:
        """Return the ranks that `sort_key` uses, one per coordinate."""
        return tuple(self._ranks[location])

    def minimal_summaries(self, a: int, b: int) -> Antichain[Summary]:
        """Return the minimal summaries of all paths from `a` to `b`; do not change it.

        The empty path counts: from a location to itself there is the identity.
        Computed for all sources of `b` when first asked.
        """
        if b not in self._summaries_to:
            self._summaries_to[b] = self._search_back(b)
        return self._summaries_to[b][a]

    def _search_back(self, b: int) -> list[Antichain[Summary]]:
        if self._stuck is not None:
            raise self.stuck_error()
        incoming: list[list[tuple[int, Summary]]] = [[] for _ in self.depths]
        for source, target, summary in self.edges:
            incoming[target].append((source, summary))
        found = [Antichain[Summary](order=Summary.less_equal) for _ in self.depths]
        start = Summary.identity(self.depths[b])
        found[b].insert(start)
        queue = deque([(b, start)])
        while queue:
            location, rest = queue.popleft()
            for source, summary in incoming[location]:
                path = summary.followed_by(rest)
                if path is not None and found[source].insert(path):
                    queue.append((source, path))
        return found

    def _check_edge(self, index: int) -> None:
        source, target, summary = self.edges[index]
        ends = range(len(self.depths))
        if (
            source not in ends
            or target not in ends
            or summary.keep > self.depths[source] + 1
            or summary.target_depth != self.depths[target]
        ):
            raise GraphError(
                f"edge {index} does not fit its ends; got {self.edges[index]!r} among"
                f" {len(self.depths)} locations; expected a summary from the source's"
                " depth to the target's; check the scopes of its two ports",
                edge=index,
            )

    def _successors(self, edges: Iterable[int]) -> dict[int, list[int]]:
        successors: dict[int, list[int]] = {}
        for index in edges:
            source, target, _ = self.edges[index]
            successors.setdefault(source, []).append(target)
        return successors

    def _rank(self, locations: Sequence[int], edges: Sequence[int]) -> None:
        """Give ranks level by level; a component that must go deeper is queued.

        Each entry of the queue is a set of locations and the edges among them of
        which none advances a coordinate above `level`.
        """
        queue = deque([(0, list(locations), list(edges))])
        while queue:
            level, inside, candidates = queue.popleft()
            stuck = [
                index for index in candidates if self.edges[index][2].keep <= level
            ]
            if stuck:
                self._stuck = self._stuck or self._cycle_through(stuck[0], candidates)
                continue
            still = [
                index for index in candidates if not self.edges[index][2].add[level]
            ]
            component_of: dict[int, int] = {}
            components = strong_components(inside, self._successors(still))
            for rank, component in enumerate(components):
                for location in component:
                    self._ranks[location].append(rank)
                    component_of[location] = rank
            edges_of: dict[int, list[int]] = {}
            for index in still:
                source, target, _ = self.edges[index]
                if component_of[source] == component_of[target]:
                    edges_of.setdefault(component_of[source], []).append(index)
            for rank, nested in edges_of.items():
                queue.append((level + 1, components[rank], nested))
        if self._stuck is None:
            for ranks, depth in zip(self._ranks, self.depths, strict=True):
                ranks.extend([0] * (depth + 1 - len(ranks)))

    def _cycle_through(self, index: int, candidates: Sequence[int]) -> list[int]:
        source, target, _ = self.edges[index]
        return shortest_path(target, source, self._successors(candidates))
