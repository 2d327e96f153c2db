"""Waiting for values: until they are on their devices, or their elements are here."""

from __future__ import annotations

from typing import Any

from timelyml.ml.client.ahead import Ahead
from timelyml.ml.client.handle import Handle
from timelyml.ml.client.inbox import Inbox
from timelyml.ml.controller.messages import Fetch
from timelyml.ml.hosts.waiting import SMALL_BYTES


class Waits:
    """What handles wait with; from any thread.

    Args:
        ahead: Sends what is asked, after the calls that were collected.
        inbox: Takes what is heard.
    """

    def __init__(self, ahead: Ahead, inbox: Inbox) -> None:
        self._ahead = ahead
        self._inbox = inbox

    def ask_news(self, handle: Handle) -> None:
        """Ask when a value that was put is on its devices, unless it was asked.

        Of what is computed news come by themselves.
        """
        if handle.is_unasked:
            handle.is_unasked = False
            self._ahead.send(Fetch(handle.buffer, is_notice=True))

    def wait_ready(self, handle: Handle, timeout_s: float | None) -> None:
        """Wait until a value is on its devices, or raise why it never will be."""
        handle.check()
        self._ahead.flush()
        self.ask_news(handle)
        self._inbox.wait(handle.has_news, timeout_s, repr(handle))
        handle.elements()  # or why there are none

    def value_of(self, handle: Handle, timeout_s: float | None) -> Any:
        """Wait for the elements of a value."""
        handle.check()
        self._ahead.flush()
        if _is_told(handle):
            self._inbox.wait(handle.has_news, timeout_s, repr(handle))
        if not handle.is_known():
            self._fetch(handle)
            self._inbox.wait(handle.is_known, timeout_s, repr(handle))
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

    def _fetch(self, handle: Handle) -> None:
        if self._inbox.begin_fetch(handle):
            self._ahead.send(Fetch(handle.buffer))


def _is_told(handle: Handle) -> bool:
    """Whether the elements most likely come with the news that they are ready."""
    is_small = handle.nbytes <= SMALL_BYTES and not handle.was_put
    return is_small and not handle.is_known()
