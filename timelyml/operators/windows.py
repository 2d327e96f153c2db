"""Windows of event time: which ones a moment falls into.

Event times are numbers, or datetimes with timedeltas for lengths. A window holds the
moments from its start on and before its end.
"""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from timelyml.errors import ConfigError, TimeError

Moment: TypeAlias = Any
Span: TypeAlias = Any
Window: TypeAlias = tuple[Moment, Moment]
"""Start and end."""


@dataclass(frozen=True, slots=True)
class Sliding:
    """Windows of one length that start every `step`; a moment may be in several.

    Attributes:
        length: Of a window.
        step: From the start of one to that of the next.
        origin: A moment at which one starts; default: 0, or the start of 1970.

    >>> Sliding(10, 5).windows_of(12)
    [(5, 15), (10, 20)]
    """

    length: Span
    step: Span
    origin: Moment | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "length", self.length)
        _check_positive(self, "step", self.step)

    def windows_of(self, moment: Moment) -> list[Window]:
        """Return the windows that a moment falls into, the earliest first."""
        origin = _origin_of(moment) if self.origin is None else self.origin
        start = origin + (moment - origin) // self.step * self.step
        found = []
        while start + self.length > moment:
            found.append((start, start + self.length))
            start -= self.step
        return found[::-1]


@dataclass(frozen=True, slots=True)
class Tumbling:
    """Windows of one length, one after the other; a moment is in exactly one.

    Attributes:
        length: Of a window.
        origin: A moment at which one starts; default: 0, or the start of 1970.

    >>> Tumbling(10).windows_of(12)
    [(10, 20)]
    """

    length: Span
    origin: Moment | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "length", self.length)

    def windows_of(self, moment: Moment) -> list[Window]:
        """Return the window that a moment falls into."""
        origin = _origin_of(moment) if self.origin is None else self.origin
        start = origin + (moment - origin) // self.length * self.length
        return [(start, start + self.length)]


@dataclass(frozen=True, slots=True)
class Session:
    """Windows that end once a key had nothing for as long as `gap`.

    A window goes from the first record to `gap` after the last.

    Attributes:
        gap: Records that are at least so far apart are of two sessions.
    """

    gap: Span

    def __post_init__(self) -> None:
        _check_positive(self, "gap", self.gap)


Windows: TypeAlias = Tumbling | Sliding | Session
Late: TypeAlias = Literal["all", "any"]
"""Which records are late: those of whose windows all were over, or any."""


def _check_positive(windows: Windows, field: str, value: Any) -> None:
    zero = dt.timedelta(0) if isinstance(value, dt.timedelta) else 0
    try:
        is_positive = bool(value > zero) and value != math.inf
    except TypeError:
        is_positive = False
    if not is_positive:
        kind = type(windows).__name__
        raise ConfigError(
            f"windows of kind {kind!r} have {field!r} out of range; got {value!r}; "
            f"expected a number or timedelta above 0; correct it",
            windows=kind,
            field=field,
        )


def no_event_time(who: str, got: Any) -> TimeError:
    """Return the error of a record that lacks its event time."""
    return TimeError(
        f"operator {who!r} got a record without an event time; got {got!r}; expected a "
        f"number or datetime; filter it before",
        operator=who,
    )


def _origin_of(moment: Moment) -> Moment:
    if isinstance(moment, dt.datetime):
        return dt.datetime(1970, 1, 1, tzinfo=moment.tzinfo)
    if isinstance(moment, np.datetime64):
        return np.zeros((), moment.dtype)[()]
    return 0
