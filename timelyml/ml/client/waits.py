"""Waiting for values: until they are on their devices, or their elements are here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from timelyml.errors import DeadlineError
from timelyml.ml.client.ahead import Ahead
from timelyml.ml.client.handle import Handle
from timelyml.ml.client.inbox import Inbox
from timelyml.ml.client.requests import explained
from timelyml.ml.controller.messages import Fetch
from timelyml.ml.hosts.waiting import SMALL_BYTES

MOST_ASKED = 1024
"""Values that were put of which news are asked for at once."""


class Waits:
    """What handles wait with; from any thread.

    Args:
        ahead: Sends what is asked, after the calls that were collected.
        inbox: Takes what is heard.
        why: Returns what a buffer waits for.
    """

    def __init__(self, ahead: Ahead, inbox: Inbox, why: Callable[[int], str]) -> None:
        self._ahead = ahead
        self._inbox = inbox
        self._why = why

    def ask_news(self, handle: Handle) -> None:
        """Ask when a value that was put is on its devices, unless it was asked.

        Of what is computed news come by themselves.
        """
        if handle.is_unasked:
            handle.is_unasked = False
            self._inbox.asked(handle)
            self._ahead.send(Fetch(handle.buffer, is_notice=True))

    def _ask_all(self, handle: Handle) -> None:
        """Ask of a value, and of others that were put and nobody asked of.

        Who waits for a tree of them waits for one after the other, and each answer takes
        its time.
        """
        if handle.is_unasked:
            self.ask_news(handle)
            for each in self._inbox.unasked(MOST_ASKED):
                self.ask_news(each)

    def wait_ready(self, handle: Handle, timeout_s: float | None) -> None:
        """Wait until a value is on its devices, or raise why it never will be."""
        handle.check()
        self._ahead.flush()
        self._ask_all(handle)
        self._wait(handle.has_news, timeout_s, handle)
        handle.elements()  # or why there are none

    def value_of(self, handle: Handle, timeout_s: float | None) -> Any:
        """Wait for the elements of a value."""
        handle.check()
        self._ahead.flush()
        if _is_told(handle):
            self._wait(handle.has_news, timeout_s, handle)
        if not handle.is_known():
            self._fetch(handle)
            self._wait(handle.is_known, timeout_s, handle)
        return handle.elements()

    async def arrival(self, handle: Handle) -> None:
        """Wait in a coroutine until the elements are here, or will never be."""
        handle.check()
        self._ahead.flush()
        if _is_told(handle):
            await self._inbox.heard(handle.has_news)
        if not handle.is_known():
            self._fetch(handle)
            await self._inbox.heard(handle.is_known)

    def _wait(
        self, is_over: Callable[[], bool], timeout_s: float | None, handle: Handle
    ) -> None:
        try:
            self._inbox.wait(is_over, timeout_s, repr(handle))
        except DeadlineError as error:
            raise explained(error, partial(self._why, handle.buffer)) from None

    def _fetch(self, handle: Handle) -> None:
        if self._inbox.begin_fetch(handle):
            self._ahead.send(Fetch(handle.buffer))


def _is_told(handle: Handle) -> bool:
    """Whether the elements most likely come with the news that they are ready."""
    is_small = handle.nbytes <= SMALL_BYTES and not handle.was_put
    return is_small and not handle.is_known()
