"""Timestamps: an epoch, followed by one counter per enclosing loop scope.

At the top level a timestamp is an `int`; in a scope nested `depth` deep it is a
tuple of `depth + 1` ints, `(epoch, i1, .., id)`. The order of progress is
componentwise (`less_equal`). Python's order of tuples is a linear extension of
it: good for sorting and for heaps, silently wrong as progress.
(Naiad, section 2.1, orders loop counters lexicographically; we do as timely.)
"""

from __future__ import annotations

from operator import le
from typing import Any, TypeAlias

from timelyml.errors import TimeError

Timestamp: TypeAlias = int | tuple[int, ...]

UserTime: TypeAlias = Any
"""A timestamp as user code hands it over, before it is checked.

Where a parameter says `Timestamp`, compiled code refuses anything else by a bare
TypeError, before the check that would explain.
"""

TIME_LIMIT = 2**63
"""Every coordinate is at least 0 and below this."""


def less_equal(a: Timestamp, b: Timestamp) -> bool:
    """Whether `a` is at or before `b` in the partial order of progress.

    Raises:
        TimeError: If the two belong to scopes of different depth.

    >>> less_equal((1, 5), (2, 0)), (1, 5) <= (2, 0)
    (False, True)
    """
    if isinstance(a, int) and isinstance(b, int):
        return a <= b
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return all(map(le, a, b))
    raise _different_depths(a, b)


def less_than(a: Timestamp, b: Timestamp) -> bool:
    """Whether `a` is strictly before `b` in the partial order of progress."""
    return a != b and less_equal(a, b)


def minimum(depth: int) -> Timestamp:
    """Return the least timestamp of a scope nested `depth` deep.

    >>> minimum(0), minimum(2)
    (0, (0, 0, 0))
    """
    return (0,) * (depth + 1) if depth else 0


def depth_of(time: Timestamp) -> int:
    """Return how many loop scopes enclose `time`; 0 for an `int`."""
    return 0 if isinstance(time, int) else len(time) - 1


def epoch_of(time: Timestamp) -> int:
    """Return the outermost coordinate of `time`."""
    return time if isinstance(time, int) else time[0]


def join(a: Timestamp, b: Timestamp) -> Timestamp:
    """Return the least timestamp that is at or after both."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(map(max, a, b))
    raise _different_depths(a, b)


def meet(a: Timestamp, b: Timestamp) -> Timestamp:
    """Return the greatest timestamp that is at or before both."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(map(min, a, b))
    raise _different_depths(a, b)


def check_time(time: object, depth: int, who: str) -> Timestamp:
    """Return `time` if it is a timestamp of that depth; meant for user input.

    Raises:
        TimeError: If its type, its length or a coordinate is wrong; the message
            starts with `who`.
    """
    if type(time) is int and not depth and 0 <= time < TIME_LIMIT:
        return time  # spares most callers 2 us
    coordinates = time if isinstance(time, tuple) else (time,)
    valid = isinstance(time, tuple) == (depth > 0) and len(coordinates) == depth + 1
    for value in coordinates:
        valid = valid and type(value) is int and 0 <= value < TIME_LIMIT
    if not valid:
        expected = f"a tuple of {depth + 1} ints" if depth else "an int"
        raise TimeError(
            f"{who} has no such timestamp; got {time!r}; expected {expected}, each at"
            " least 0 and below 2**63; convert numpy integers with int()",
            time=time,
            depth=depth,
        )
    return time  # type: ignore[return-value]  # narrowed by the checks above


def _different_depths(a: object, b: object) -> TimeError:
    return TimeError(
        f"timestamps of different scopes have no order; got {a!r} and {b!r};"
        " expected the same number of coordinates; compare times of one stream",
        times=(a, b),
    )
