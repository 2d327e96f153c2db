"""Peers that went: what was to come of them is given up once it is known why.

Whoever shares a link with a process that dies notices first; the controller learns a
moment later what became of it. A host waits for that, so that every error says it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from timelyml.errors import BufferLostError
from timelyml.ml.hosts.messages import Expect, Gone


@dataclass(slots=True)
class LostPeers:
    """Peers to which the link broke, or of which the controller said that they are gone.

    What a peer sent before it went may still be in the link, so one is lost only when
    the link broke too.

    Args:
        give_up_s: After so long without a word of the controller, what the link said is
            reason enough.

    >>> lost = LostPeers(give_up_s=10.0)
    >>> lost.broke(0, "reset by its peer", now_s=1.0)
    >>> list(lost.lost(now_s=2.0)), lost.next_due()
    ([], 11.0)
    >>> lost.explain(Gone(0, "island-0", "worker 0 was killed by SIGKILL"))
    >>> [(each.host, each.reason) for each in lost.lost(now_s=2.0)], lost.next_due()
    ([(0, 'worker 0 was killed by SIGKILL')], None)
    """

    give_up_s: float
    _broken: dict[int, tuple[float, str]] = field(default_factory=dict)
    _explained: dict[int, Gone] = field(default_factory=dict)

    def broke(self, peer: int, reason: str, now_s: float) -> None:
        """Take note that nothing comes over the link of a peer any more."""
        self._broken.setdefault(peer, (now_s + self.give_up_s, reason))

    def explain(self, gone: Gone) -> None:
        """Take the controller's word for what became of a peer."""
        self._explained.setdefault(gone.host, gone)

    def lost(self, now_s: float) -> list[Gone]:
        """Return, once for each, the peers of which nothing is to be waited for."""
        found = []
        for peer, (due_s, reason) in list(self._broken.items()):
            if peer in self._explained:
                found.append(self._explained.pop(peer))
            elif now_s >= due_s:
                found.append(Gone(peer, "", reason))
            else:
                continue
            del self._broken[peer]
        return found

    def next_due(self) -> float | None:
        """Return when a peer is lost whatever the controller says, if any will be."""
        return min((due_s for due_s, _ in self._broken.values()), default=None)


def error_of(gone: Gone, expect: Expect) -> BufferLostError:
    """Return the error of what was to come from a host that is gone."""
    island = f"island {gone.island!r}" if gone.island else f"host {gone.host}"
    return BufferLostError(
        f"{expect.type} that host {gone.host} was to send to slice {expect.slice!r} is "
        f"lost with {island}; got {gone.reason}; expected it to stay; compute it again",
        slice=expect.slice,
        island=gone.island,
        reason=gone.reason,
    )
