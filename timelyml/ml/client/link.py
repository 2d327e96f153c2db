"""How a client reaches the controller, and what it wishes to be given there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from timelyml.errors import ConfigError

_MAX_WISH = 1 << 31


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a client wishes of the schedulers.

    Attributes:
        weight: Its share of device time, under the policy "share".
        priority: Larger ones go first, under the policy "priority".

    Raises:
        ConfigError: A number makes no sense.
    """

    weight: int = 1
    priority: int = 0

    def __post_init__(self) -> None:
        if not _is_whole(self.weight) or self.weight < 1:
            raise ConfigError(
                f"a client has an impossible weight; got {self.weight!r}; expected a "
                f"whole number of 1 or more; scale all weights up instead",
                option="weight",
            )
        if not _is_whole(self.priority):
            raise ConfigError(
                f"a client has an impossible priority; got {self.priority!r}; expected a "
                f"whole number, of which larger ones go first; correct it",
                option="priority",
            )


class Link(Protocol):
    """The client's way to the controller."""

    def connect(self, receive: Callable[[Any], None]) -> tuple[int, int]:
        """Begin; return the client's number, and how many calls it may have at once.

        `receive` is called in another thread.
        """

    def send(self, message: Any) -> None:
        """Send a message; never blocks."""

    def another(self, wishes: Wishes) -> Link:
        """Return a way for another client, which ends nothing but itself."""

    def close(self) -> None:
        """End it; blocks until nothing of it is left."""


def _is_whole(number: object) -> bool:
    if not isinstance(number, int) or isinstance(number, bool):
        return False
    return -_MAX_WISH < number < _MAX_WISH
