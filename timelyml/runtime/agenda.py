"""In which order the operators of one worker run in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush


def in_graph_order(active: set[int], may_follow: Callable[[], bool]) -> Iterator[int]:
    """Take each active operator once, in the order of the graph, and yield it.

    What becomes active further down while one runs is taken on in the same pass, if
    `may_follow()`: what is sent and consumed at once never shows in progress. All else
    that becomes active stays for the next pass.

    >>> active = {1, 4}
    >>> for operator in in_graph_order(active, lambda: True):
    ...     print(operator)
    ...     active |= {operator - 1, operator + 1} if operator < 3 else set()
    1
    2
    3
    4
    >>> sorted(active)
    [0, 1]
    """
    due = sorted(active)  # which is a heap
    active.clear()
    last = -1
    while due:
        operator = heappop(due)
        if operator == last:
            continue
        last = operator
        yield operator
        if active and may_follow():
            for following in [other for other in active if other > operator]:
                active.remove(following)
                heappush(due, following)
