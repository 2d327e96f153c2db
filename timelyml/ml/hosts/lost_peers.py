"""Peers that went: what was to come of them is given up once it is known why.

Whoever shares a link with a process that dies notices first, or whoever computes with it;
the controller learns a moment later what became of it. A host waits for that, so that every
error says it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from timelyml.errors import BufferLostError
from timelyml.exchange import CONTROLLER
from timelyml.ml.functions import ArrayType
from timelyml.ml.hosts.messages import Expect, Export, Gone, Pieces
from timelyml.ml.hosts.slices import zeros
from timelyml.runtime.failure import pack_error

EXPLAINED_S = 2.0
"""By then the controller has said who died, if anybody did."""


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


def never_came(export: Export, host: str) -> tuple[int, Pieces]:
    """Return for whom they are, and what stands for pieces that a host never had.

    Those that clients put, and other hosts send, go another way than orders, and may come
    after a host was told to send them on, as its island is taken apart.
    """
    error = BufferLostError(
        f"{export.type} is lost on its way to host {host}; got the loss of another host of "
        f"its island before it had come; expected it to stay; put or compute it again",
        reason="its island was lost before it had come",
    )
    pieces = () if export.peer == CONTROLLER else zeros(export.type, export.boxes)
    return export.peer, Pieces(export.target, pieces, pack_error(error))


def given_up(name: str) -> bytes:
    """Return, pickled, the error of what runs on a slice whose island is taken apart."""
    return pack_error(
        BufferLostError(
            f"a computation on slice {name!r} was given up; got the loss of another host "
            "of its island before its end; expected it to stay; run it again",
            slice=name,
        )
    )


@dataclass(frozen=True, slots=True)
class Torn:
    """Pieces for a peer that a computation over several hosts failed to make.

    What its transport says of that names no process.
    """

    peer: int
    pieces: Pieces
    type: ArrayType


class TornPieces:
    """Holds pieces until it is known whether a host that computed them is gone.

    >>> torn = TornPieces(explained_s=2.0)
    >>> torn.add(Torn(3, Pieces(7, (), b"reset"), ArrayType((), "int32", 4)), now_s=1.0)
    >>> list(torn.due(now_s=2.0)), torn.next_due()
    ([], 3.0)
    >>> torn.explain(Gone(0, "island-0", "worker 0 was killed by SIGKILL"))
    >>> [(peer, b"SIGKILL" in pieces.error) for peer, pieces in torn.due(now_s=2.0)]
    [(3, True)]
    """

    def __init__(self, explained_s: float) -> None:
        self._explained_s = explained_s
        self._held: list[tuple[float, Torn]] = []
        self._gone: Gone | None = None

    def add(self, torn: Torn, now_s: float) -> None:
        """Hold pieces back."""
        self._held.append((now_s + self._explained_s, torn))

    def explain(self, gone: Gone) -> None:
        """Take note of the first host of the island that is gone."""
        self._gone = self._gone or gone

    def due(self, now_s: float) -> list[tuple[int, Pieces]]:
        """Return the pieces that are held no longer, by whom they are for."""
        gone = self._gone
        over = [each for each in self._held if gone is not None or now_s >= each[0]]
        self._held = [each for each in self._held if each not in over]
        return [(torn.peer, _explained(torn, gone)) for _, torn in over]

    def next_due(self) -> float | None:
        """Return when pieces are held no longer whatever the controller says."""
        return min((due_s for due_s, _ in self._held), default=None)


def _explained(torn: Torn, gone: Gone | None) -> Pieces:
    if gone is None:
        return torn.pieces
    error = BufferLostError(
        f"{torn.type} is lost with island {gone.island!r}; got {gone.reason}; expected "
        f"its devices to stay; compute it again",
        island=gone.island,
        reason=gone.reason,
    )
    return replace(torn.pieces, error=pack_error(error))
