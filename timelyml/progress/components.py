"""Strongly connected components of small integer graphs, and paths within them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence


def strong_components(
    locations: Iterable[int], successors: Mapping[int, Sequence[int]]
) -> list[list[int]]:
    """Return the strongly connected components, sources of the graph first.

    Source:
        Tarjan, 1972, with an explicit stack: graphs may be deeper than Python's
        recursion limit.
    """
    order: dict[int, int] = {}
    lowest: dict[int, int] = {}
    path: list[int] = []
    on_path: set[int] = set()
    components: list[list[int]] = []
    for start in locations:
        if start in order:
            continue
        stack = [(start, iter(successors.get(start, ())))]
        order[start] = lowest[start] = len(order)
        path.append(start)
        on_path.add(start)
        while stack:
            location, rest = stack[-1]
            for target in rest:
                if target not in order:
                    order[target] = lowest[target] = len(order)
                    path.append(target)
                    on_path.add(target)
                    stack.append((target, iter(successors.get(target, ()))))
                    break
                if target in on_path:
                    lowest[location] = min(lowest[location], order[target])
            else:
                stack.pop()
                if stack:
                    parent = stack[-1][0]
                    lowest[parent] = min(lowest[parent], lowest[location])
                if lowest[location] == order[location]:
                    cut = path.index(location, _lower_bound(path, location, order))
                    components.append(path[cut:])
                    on_path.difference_update(path[cut:])
                    del path[cut:]
    components.reverse()
    return components


def _lower_bound(path: list[int], location: int, order: dict[int, int]) -> int:
    """Return where `location` stands in `path`, whose order numbers ascend."""
    low, high = 0, len(path)
    while low < high:
        middle = (low + high) // 2
        if order[path[middle]] < order[location]:
            low = middle + 1
        else:
            high = middle
    return low


def shortest_path(
    start: int, end: int, successors: Mapping[int, Sequence[int]]
) -> list[int]:
    """Return the locations of a shortest path, both ends included; [] if none."""
    previous: dict[int, int] = {start: start}
    queue = deque([start])
    while queue and end not in previous:
        location = queue.popleft()
        for target in successors.get(location, ()):
            if target not in previous:
                previous[target] = location
                queue.append(target)
    if end not in previous:
        return []
    path = [end]
    while path[-1] != start:
        path.append(previous[path[-1]])
    path.reverse()
    return path
