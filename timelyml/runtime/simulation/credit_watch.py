"""Back-pressure, watched from outside: bytes under way and queued, per edge and pair.

Counts what is sent and what receivers give back, as both pass the network; knows
nothing of ledgers.
"""

from __future__ import annotations

from timelyml.graph import Graph
from timelyml.runtime.messages import CreditMessage, DataMessage
from timelyml.runtime.simulation.violation import Violation

Link = tuple[int, int, int, int]
"""A generation, a channel, the sender of its data and their receiver."""


class CreditWatch:
    """Checks that no edge has more outstanding than its run allows."""

    def __init__(self) -> None:
        self._outstanding: dict[Link, int] = {}
        self._limits: dict[int, int] = {}
        self._cyclic: dict[int, set[int]] = {}

    def expect(self, generation: int, graph: Graph, limit_bytes: int) -> None:
        """Watch a run from now on."""
        self._limits[generation] = limit_bytes
        self._cyclic[generation] = {c.index for c in graph.channels if c.is_cyclic}

    def on_send(self, sender: int, receiver: int, message: object, _: int) -> None:
        """Take note of a message.

        Raises:
            Violation: More is outstanding than allowed, or less than nothing.
        """
        match message:
            case DataMessage(generation, blocks):
                for block in blocks:
                    if block.channel in self._cyclic[generation]:
                        continue
                    link = (generation, block.channel, sender, receiver)
                    for part in block.parts:
                        self._spend(link, part.size_bytes)
            case CreditMessage(generation, refunds):
                for channel, size_bytes in refunds:
                    link = (generation, channel, receiver, sender)
                    self._refund(link, size_bytes)

    def _spend(self, link: Link, size_bytes: int) -> None:
        before = self._outstanding.get(link, 0)
        limit = self._limits[link[0]]
        if before and before + size_bytes > limit:
            raise Violation(
                "credit",
                f"channel {link[1]} of run {link[0]} from worker {link[2]} to "
                f"{link[3]}: {size_bytes} bytes leave with {before} outstanding of "
                f"{limit}",
            )
        self._outstanding[link] = before + size_bytes

    def _refund(self, link: Link, size_bytes: int) -> None:
        left = self._outstanding.get(link, 0) - size_bytes
        if left < 0:
            raise Violation(
                "credit",
                f"channel {link[1]} of run {link[0]}: worker {link[3]} gives back "
                f"{-left} bytes that worker {link[2]} never sent",
            )
        self._outstanding[link] = left
