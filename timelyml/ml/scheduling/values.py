"""What the gang scheduler is told and what it decides, as values.

A *gang* is one launch of one computation on all devices of its placement at once. A
*program* is a graph of gangs that a client submits as one message (the paper's section
4.5); gangs of other programs may still run in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from timelyml.errors import ProgramError

DEFAULT_WINDOW_NS = 8_000_000
"""Device time that may be under way on a device before no more is launched there."""

WINDOW_ALONE_NS = 12_000_000
"""The same while a device has had one client only. Where nobody else waits for a turn,
hosts may know what comes next before they have told what is over: with a window of 4 ms
devices stood idle for a third of the time that short launches took."""

MAX_UNFINISHED = 32
"""Launches that may be unfinished on a device; XLA on CPU hangs with 48."""

DEFAULT_ESTIMATE_NS = 2_000_000
"""Device time of a computation that has never run and states nothing."""


@dataclass(frozen=True, slots=True)
class Gang:
    """One computation of a program, placed on a set of devices.

    Attributes:
        computation: Identity of the compiled function; launches with the same one are
            expected to take the same time.
        placement: Name of the device set, usually a virtual slice.
        needs: Indices of earlier gangs of the program that must be ordered before.
        num_external: How many inputs come from outside of this program or island; in
            every iteration the gang waits until each was opened.
        estimate_ns: Expected device time, used until it has been measured.
    """

    computation: str
    placement: str
    needs: tuple[int, ...] = ()
    num_external: int = 0
    estimate_ns: int | None = None


class GangGraph:
    """The gangs of a program, with their successors; made once, submitted often.

    Raises:
        ProgramError: There is none, or one needs itself or a later one.
    """

    __slots__ = ("gangs", "num_needs", "placements", "successors")

    def __init__(self, gangs: Sequence[Gang]) -> None:
        if not gangs:
            raise ProgramError(
                "a program has no gangs; got none; expected at least one; "
                "leave out programs that compute nothing"
            )
        successors: list[list[int]] = [[] for _ in gangs]
        for index, gang in enumerate(gangs):
            for needed in gang.needs:
                if not 0 <= needed < index:
                    raise ProgramError(
                        f"gang {index} ({gang.computation}) needs a gang that is not "
                        f"before it; got {needed}; expected 0 to {index - 1}; list "
                        f"gangs in an order in which they could run",
                        gang=index,
                    )
                successors[needed].append(index)
        self.gangs = tuple(gangs)
        self.placements = tuple(sorted({gang.placement for gang in gangs}))
        self.num_needs = tuple(len(gang.needs) for gang in gangs)
        self.successors = tuple(map(tuple, successors))


class Submission(NamedTuple):
    """A call of a program.

    Attributes:
        program: Name of this call, unique among those that are not done.
        iterations: How often the gangs run, in turn; None means until it is stopped.
        priority: Larger goes first, under a policy that looks at it.
    """

    client: str
    program: str
    graph: GangGraph
    iterations: int | None = 1
    priority: int = 0


class GangKey(NamedTuple):
    """Which launch of which gang: known before it is ordered."""

    program: str
    gang: int
    iteration: int


class Scope(StrEnum):
    """What can be held back as a whole."""

    CLIENT = "client"
    PROGRAM = "program"
    PLACEMENT = "placement"


class Outcome(StrEnum):
    """How a program ended."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"


class Report(NamedTuple):
    """A host's word that its part of a gang is over, and the device time it took."""

    host: str
    sequence: int
    device_ns: int
    is_failed: bool = False


class Grant(NamedTuple):
    """The decision that a gang runs, on all of its devices, at this place in the order.

    Attributes:
        sequence: Place in the order of the island, over all clients.
        positions: For each host of the gang, its place among the gangs of that host:
            0, 1, 2, ... within a generation, so that a host sees any gap.
    """

    generation: int
    sequence: int
    key: GangKey
    client: str
    placement: str
    positions: tuple[tuple[str, int], ...]
    estimate_ns: int


class GangDone(NamedTuple):
    """All hosts reported; `device_ns` is the longest of their times."""

    sequence: int
    key: GangKey
    client: str
    device_ns: int
    num_devices: int
    is_failed: bool = False


class ProgramDone(NamedTuple):
    """Nothing of the program waits or runs any more."""

    client: str
    program: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing of what is held back runs any more."""

    scope: Scope
    name: str


Effect: TypeAlias = Grant | GangDone | ProgramDone | Drained
