"""A gauge of device memory: the most that chosen values took at once, as the ledger says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from timelyml.ml.client.tracing import Ask
from timelyml.ml.controller.gauged import CountBuffers, Gauged, OpenGauge, ReadGauge
from timelyml.ml.controller.messages import Acknowledged


class MemoryGauge:
    """Counts values while they are on devices, by the controller's ledger of memory.

    A value counts from when the call that makes it is over, as far as the ledger has
    heard, until it is freed, taken over by a call that it is donated to, or spilled.
    Room for it is set aside earlier, when the call is admitted; that does not count.

    Args:
        ask: As of `Resources`.
        send: Sends what is not answered.
    """

    def __init__(self, ask: Ask, send: Callable[[Any], None]) -> None:
        self._ask = ask
        self._send = send
        opened: Acknowledged = ask(OpenGauge, "a gauge", None)
        self._number = opened.request

    def count(self, group: int, item: int, buffers: Iterable[int]) -> None:
        """Count values as parts of an item, which is there while any of them is.

        Args:
            group: What is counted apart from others; below 65,536.
            item: Of the group.
            buffers: Numbers of own values, as `Handle.buffer` has them; the gauge that a
                value was last given to counts it.
        """
        self._send(CountBuffers(self._number, group, item, tuple(buffers)))

    def peaks(self, *, ends: bool = False) -> dict[int, tuple[int, int]]:
        """Return the most items and bytes that each group had at once so far.

        Bytes are those on the device that holds most of a value.

        Args:
            ends: Whether it is over with this gauge.

        Raises:
            AdmissionError: It has ended, or the client has opened 16 newer ones.
        """
        found: Gauged = self._ask(
            lambda request: ReadGauge(request, self._number, ends), "a gauge", None
        )
        return {group: (items, size) for group, items, size in found.peaks}
