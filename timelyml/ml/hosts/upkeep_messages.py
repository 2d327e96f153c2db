"""What the flows of upkeep carry beside what is in `messages`, and what marks their place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class UpkeepDue:
    """Here, among all that is said to a host, belong the orders of an epoch.

    They come by a flow. What comes after this message waits until they are obeyed.
    """

    epoch: int


@dataclass(frozen=True, slots=True)
class CleanUp:
    """Drop what was left of clients that are gone.

    Attributes:
        releases: Buffers that nobody uses any more.
        dropped: Slices on which nothing is left, with the code and programs for them.
    """

    releases: tuple[int, ...]
    dropped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ForgetFunctions:
    """Keep computations, and what was compiled of them, no longer; no slice has them."""

    identities: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AskHoldings:
    """Say what is there; `Holdings` is the report."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a host has, and what it still has to do.

    Attributes:
        epoch: That in which it was asked; it has obeyed all orders before.
        num_functions: Computations compiled for its slices.
        num_launches: Gangs that were ordered and are not over.
    """

    epoch: int
    process_id: int
    num_slices: int
    num_functions: int
    num_programs: int
    num_buffers: int
    num_launches: int


@dataclass(frozen=True, slots=True)
class CarriedOut:
    """All orders of earlier epochs than this are carried out on a host.

    Of a host whose flow is over, or that got no orders by one, those of all epochs: None.
    """

    before: int | None


@dataclass(frozen=True, slots=True)
class Result:
    """An order of an epoch is carried out; what there is to report of it, if anything."""

    epoch: int
    report: Any = None
