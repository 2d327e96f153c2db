"""How a client reaches the controller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from timelyml.errors import ConfigError


class Link(Protocol):
    """The client's way to the controller."""

    def connect(self, receive: Callable[[Any], None]) -> int:
        """Begin; return the client's number. `receive` is called in another thread."""

    def send(self, message: Any) -> None:
        """Send a message; never blocks."""

    def another(self, weight: int) -> Link:
        """Return a way for another client, which ends nothing but itself."""

    def close(self) -> None:
        """End it; blocks until nothing of it is left."""


def checked_weight(weight: int) -> int:
    """Return the weight of a client.

    Raises:
        ConfigError: It is no positive whole number.
    """
    if not isinstance(weight, int) or weight < 1:
        raise ConfigError(
            f"a client has an impossible weight; got {weight!r}; expected a whole number "
            f"of 1 or more; scale all weights up instead",
            option="weight",
        )
    return weight
