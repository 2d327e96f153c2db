"""In which order gangs that could run are ordered: FIFO, by share, by priority.

A policy only sorts. Whatever it says, all gangs of an island stand in one order, and a
gang that comes first but finds a device full keeps those behind it off all of its
devices until it has its turn; so no policy can starve a large gang with small ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from timelyml.errors import ConfigError
from timelyml.ml.scheduling.accounts import Accounts


@dataclass(slots=True)
class Candidate:
    """The next gang of one client on one placement, as a policy sees it.

    Attributes:
        ticket: When the gang's iteration of its program was submitted; counts up.
        passed_ns: Device time that the island has ordered since then.
    """

    client: str
    groups: tuple[int, ...]
    priority: int
    ticket: int
    passed_ns: int


class Policy(Protocol):
    """Sorts candidates; pure."""

    def key(self, candidate: Candidate, accounts: Accounts) -> tuple[int, ...]:
        """Return what to sort by, smallest first."""
        ...


@dataclass(frozen=True, slots=True)
class Fifo:
    """In the order of submission, as in the paper; a loop queues again each time."""

    def key(self, candidate: Candidate, accounts: Accounts) -> tuple[int, ...]:
        """Return the ticket."""
        del accounts
        return (candidate.ticket,)


@dataclass(frozen=True, slots=True)
class ProportionalShare:
    """Device time in proportion to the weights of the clients that want it."""

    def key(self, candidate: Candidate, accounts: Accounts) -> tuple[int, ...]:
        """Return how far the client is ahead."""
        return accounts.lag(candidate.client, candidate.groups), candidate.ticket


@dataclass(frozen=True, slots=True)
class Priority:
    """Larger priorities first; equal ones by submission.

    Args:
        aging_ns: A gang rises by one for each such amount of device time that the
            island ordered while the gang waited. None never raises one: then lower
            priorities run only in what higher ones leave.
    """

    aging_ns: int | None = None

    def __post_init__(self) -> None:
        if self.aging_ns is not None and self.aging_ns < 1:
            raise ConfigError(
                f"priority policy cannot age so; got aging_ns={self.aging_ns}; "
                f"expected 1 or more; leave it out to never raise a gang"
            )

    def key(self, candidate: Candidate, accounts: Accounts) -> tuple[int, ...]:
        """Return the priority, raised by age, and the ticket."""
        del accounts
        raised = candidate.passed_ns // self.aging_ns if self.aging_ns else 0
        return -(candidate.priority + raised), candidate.ticket
