"""Path summaries: what a path through the graph does to a timestamp, at least.

A summary keeps the first coordinates of a timestamp, adds constants to them, and
appends constants. Entering a scope, leaving it, feedback and every composition
of these have that form. (Naiad, section 2.3.)
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import add as add_ints
from operator import le

from timelyml.errors import TimeError
from timelyml.progress.timestamp import TIME_LIMIT, Timestamp


@dataclass(frozen=True, slots=True)
class Summary:
    """Keeps `keep` coordinates, adds `add` to them, then appends constants.

    >>> Summary.enter(0).followed_by(Summary.advance(1)).results_in(7)
    (7, 1)
    """

    keep: int
    add: tuple[int, ...]
    append: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        constants = (*self.add, *self.append)
        in_range = all(0 <= value < TIME_LIMIT for value in constants)
        if self.keep < 1 or len(self.add) != self.keep or not in_range:
            raise TimeError(
                f"summary is malformed; got keep={self.keep!r}, add={self.add!r},"
                f" append={self.append!r}; expected keep >= 1, one addend per kept"
                " coordinate, and constants at least 0 and below 2**63; use the"
                " constructors identity, enter, leave and advance",
            )

    @classmethod
    def identity(cls, depth: int) -> Summary:
        """Return the summary that changes no timestamp of that depth."""
        return cls(depth + 1, (0,) * (depth + 1))

    @classmethod
    def enter(cls, depth: int) -> Summary:
        """Return the summary of a step from `depth` into a scope within it."""
        return cls(depth + 1, (0,) * (depth + 1), (0,))

    @classmethod
    def leave(cls, depth: int) -> Summary:
        """Return the summary of a step from `depth` (at least 1) out of its scope."""
        return cls(depth, (0,) * depth)

    @classmethod
    def advance(cls, depth: int, by: int = 1) -> Summary:
        """Return the summary that adds `by` to the last coordinate."""
        return cls(depth + 1, (0,) * depth + (by,))

    @property
    def target_depth(self) -> int:
        """Depth of the timestamps that this summary yields."""
        return self.keep + len(self.append) - 1

    @property
    def is_identity(self) -> bool:
        """Whether it changes no timestamp of its target depth.

        On a deeper timestamp the same value means leaving scopes: only the graph
        knows the depth at which a path starts.
        """
        return not self.append and not any(self.add)

    def results_in(self, time: Timestamp) -> Timestamp | None:
        """Apply to `time`; None if a coordinate overflows: what it stamps is dropped.

        Raises:
            TimeError: If `time` has fewer coordinates than are kept.
        """
        if isinstance(time, int):
            if self.keep == 1 and not self.append:  # along a top-level feedback
                later = time + self.add[0]
                return later if later < TIME_LIMIT else None
            kept: tuple[int, ...] = (time,)
        else:
            kept = time
        if len(kept) < self.keep:
            raise TimeError(
                f"summary does not fit its timestamp; got {time!r}; expected at least"
                f" {self.keep} coordinates; apply it at the depth it was made for",
                time=time,
            )
        moved = tuple(map(add_ints, kept, self.add))  # stops after `keep`
        if max(moved) >= TIME_LIMIT:
            return None
        moved += self.append
        return moved if len(moved) > 1 else moved[0]

    def followed_by(self, other: Summary) -> Summary | None:
        """Return the summary of this path and then `other`; None if it never arrives.

        Where a coordinate overflows and is then dropped by `other`, the result
        still yields a time, though the steps one by one do not: a frontier may
        be held back by that, never let go.
        """
        appended = other.keep - self.keep
        if appended > len(self.append):
            raise TimeError(
                f"summaries do not compose; got {self!r} followed by {other!r};"
                f" expected the second to keep at most {self.target_depth + 1}"
                " coordinates; the first one's target depth is the second one's source",
            )
        add = tuple(map(add_ints, self.add, other.add))
        append = other.append
        if appended > 0:
            late = other.add[self.keep :]
            append = tuple(map(add_ints, self.append, late)) + append
        if max(add + append) >= TIME_LIMIT:
            return None
        return Summary(len(add), add, append)

    def less_equal(self, other: Summary) -> bool:
        """Whether this yields a time at or before the one of `other`, for every time.

        Both must lead from the same source depth to the same target depth.
        """
        if self.target_depth != other.target_depth:
            raise TimeError(
                f"summaries have no order; got {self!r} and {other!r}; expected one"
                " target depth; compare summaries between the same two locations",
            )
        # What this keeps and the other replaces by a constant may be any number.
        if self.keep > other.keep:
            return False
        floor = self.add + self.append
        return all(map(le, floor, other.add + other.append))
