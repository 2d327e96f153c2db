"""What a client asks the controller, and waits for; of what takes too long, also why."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from timelyml.errors import DeadlineError, TimelyError
from timelyml.ml.client.inbox import Inbox
from timelyml.ml.controller.explained import AskWhy, Why

EXPLAINED_S = 2.0
"""How long it may take to hear why something else did not come in time."""


class Requests:
    """Requests, each with a number under which it is answered.

    Args:
        send: Sends a message.
        inbox: Takes the answers.
    """

    def __init__(self, send: Callable[[Any], None], inbox: Inbox) -> None:
        self._send = send
        self._inbox = inbox
        self._numbers = itertools.count(1)

    def ask(
        self, make: Callable[[int], Any], what: str, timeout_s: float | None = None
    ) -> Any:
        """Send a request, made of its number, and wait for its answer.

        Raises:
            DeadlineError: It was not in time; it says which slices are not there.
            TimelyError: It was refused, or nothing is heard any more.
        """
        request = next(self._numbers)
        self._send(make(request))
        try:
            return self._inbox.answer_to(request, what, timeout_s)
        except DeadlineError as error:
            raise explained(error, partial(self.why, 0)) from None

    def why(self, buffer: int) -> str:
        """Return what a buffer waits for; of 0, which slices and islands do.

        Raises:
            TimelyError: Nobody answers.
        """
        request = next(self._numbers)
        self._send(AskWhy(request, buffer))
        answer: Why = self._inbox.answer_to(request, "an explanation", EXPLAINED_S)
        return answer.text


def explained(error: DeadlineError, why: Callable[[], str]) -> DeadlineError:
    """Add to an error who holds up what did not come."""
    try:
        text = why()
    except TimelyError as problem:
        text = f"the controller does not say why: {problem}"
    return DeadlineError(f"{error}; {text}", **error.values)
