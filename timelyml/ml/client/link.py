"""How a client reaches the controller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from timelyml.ml.controller.clients import ClientOptions


class Link(Protocol):
    """The client's way to the controller."""

    @property
    def shares_process(self) -> bool:
        """Whether the controller is a thread of the client's process."""

    def connect(self, receive: Callable[[Any], None]) -> tuple[int, int]:
        """Begin; return the client's number, and how many calls it may have at once.

        `receive` is called in another thread.
        """

    def send(self, message: Any) -> None:
        """Send a message; never blocks."""

    def another(self, options: ClientOptions) -> Link:
        """Return a way for another client, which ends nothing but itself."""

    def close(self) -> None:
        """End it; blocks until nothing of it is left."""
