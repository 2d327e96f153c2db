"""What a host says of times, by a clock of its own; the controller makes one of all."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """Pieces of a buffer that came to a host.

    Attributes:
        source: The host that sent them; perhaps itself, for another slice.
        sent_ns: When they were computed and their sender began, by its clock.
        arrived_ns: When they were taken, by this host's clock.
    """

    source: int
    size_bytes: int
    sent_ns: int
    arrived_ns: int


@dataclass(frozen=True, slots=True)
class AskTime:
    """Ask a host what time it is; `Time` answers, after what it has to tell.

    Attributes:
        is_traced: Whether to tell of what comes from hosts, from now on.
    """

    is_traced: bool


@dataclass(frozen=True, slots=True)
class Time:
    """What time it is on a host, in nanoseconds of its own clock."""

    now_ns: int
