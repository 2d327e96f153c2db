"""What a transport and its peers on the same host lend each other.

`shared_pool.py` says of what, `shared_views.py` how the borrower keeps account. The
descriptor of a pool is passed once, and with it one end of a pipe, the *tether*, which
the receiver keeps for as long as it has the memory mapped. So a lender that lost the link
to a receiver learns when nobody there can see its blocks any more, whether the process
let go of them or died: only then are they used again.

Nothing here waits. Where memory, descriptors or a taker are missing, nothing is lent, and
the transport sends what it has to send as it would have without.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from timelyml.exchange.datagrams import descriptor_path, send_descriptors
from timelyml.exchange.frames import OFFER, Kind, pack_returns, pack_table
from timelyml.exchange.garbled import garbled
from timelyml.exchange.shared_pool import Block, Bytes, SharedPool
from timelyml.exchange.shared_views import SharedViews

TRIM_S = 10.0
"""After so long without a loan, memory that is not in use goes back to the system."""


class Loans:
    """The blocks of a pool that one peer was lent, and whether it takes any.

    Attributes:
        is_taken: Whether the peer has the pool mapped.
    """

    def __init__(self, pool: SharedPool, tether: int) -> None:
        self.is_taken = False
        self._pool = pool
        self._tether = tether
        self._next = 0
        self._lent: dict[int, Block] = {}

    def lend(self, buffers: Sequence[Any]) -> bytes | None:
        """Return the table of a message with these buffers; None if the pool is full."""
        placed = self._pool.place(buffers)
        if placed is None:
            return None
        first = self._next
        for block, _ in placed:
            self._lent[self._next] = block
            self._next += 1
        return pack_table(first, [where for _, where in placed])

    def returned(self, body: Any) -> None:
        """Take back what the peer has no view of any more.

        Raises:
            WireError: It returns what it was not lent, or has returned before.
        """
        if len(body) % 8:
            raise garbled("a return of loans is cut short", f"{len(body)} bytes", "8n")
        for (number,) in struct.iter_unpack("<Q", body):
            block = self._lent.pop(number, None)
            if block is None:
                raise garbled("a loan comes back that is none", str(number), "one lent")
            self._pool.release([block])

    def settle(self) -> bool:
        """Take everything back if the peer, whose link is lost, has nothing mapped.

        False if it still has: then it has to be asked again.
        """
        if self._lent and self._is_held():
            return False
        self._pool.release(self._lent.values())
        self._lent.clear()
        self.close()
        return True

    def _is_held(self) -> bool:
        try:
            return bool(os.read(self._tether, 1))
        except BlockingIOError:
            return True

    def close(self) -> None:
        """Ask nobody any more."""
        os.close(self._tether)


class Lending:
    """The pool of one transport, made when it is first needed, and who takes of it.

    Args:
        index: The transport's index.
        token: Of the cluster.
        tell: Sends a frame of some kind to the transport of a peer.
        pool_bytes: The size of the pool.

    Attributes:
        views: What it is lent itself; None where it takes nothing.
    """

    def __init__(
        self,
        index: int,
        token: bytes,
        tell: Callable[[int, Kind, bytes], None],
        pool_bytes: int,
    ) -> None:
        self.views: SharedViews | None = None
        self._index = index
        self._token = token
        self._tell = tell
        self._pool_bytes = pool_bytes
        self._pool: SharedPool | None = None
        self._loans: dict[int, Loans] = {}
        self._offered: set[int] = set()
        self._has_takers = False
        self._left: list[Loans] = []  # of peers whose links are lost
        self._used_at = 0.0

    def lend(self, peer: int, control: str, buffers: Sequence[Any]) -> bytes | None:
        """Return the table of a message with these buffers; None if they are not lent.

        A peer that was not offered the pool yet, at its address of the control lane, is.
        """
        loans = self._loans.get(peer)
        if loans is None:
            if peer not in self._offered:
                self._offer(peer, control)
            return None
        if not loans.is_taken:
            return None
        self._used_at = time.monotonic()
        table = loans.lend(buffers)
        if table is None and self._settle():
            table = loans.lend(buffers)
        return table

    def empty(self, size_bytes: int) -> Bytes | None:
        """Return memory for an array that peers may be lent; None if there is none."""
        if self._pool is None or not self._has_takers:
            return None
        self._used_at = time.monotonic()
        found = self._pool.empty(size_bytes)
        if found is None and self._settle():
            found = self._pool.empty(size_bytes)
        return found

    def heed(self, peer: int, kind: int, body: Any) -> bool:
        """Act on what the transport of a peer tells; False if memory is refused.

        Raises:
            WireError: It is nothing that such a peer could have to tell.
        """
        if kind == Kind.OFFER:
            if self.views is None or not self.views.accept(peer, body):
                return False
            self._tell(peer, Kind.TAKEN, b"")
        elif kind == Kind.TAKEN and peer in self._loans:
            self._loans[peer].is_taken = self._has_takers = True
        elif kind == Kind.RETURNED and peer in self._loans:
            self._loans[peer].returned(body)
        elif peer not in self._offered:  # else its link was lost meanwhile
            raise garbled("a frame is out of place", f"kind {kind}", "a message")
        return True

    def return_loans(self, *, at_once: bool) -> None:
        """Tell lenders what has ended, once it is much, or all of it."""
        if self.views is not None and (at_once or self.views.dropped):
            for peer, loans in self.views.due(at_once=at_once):
                self._tell(peer, Kind.RETURNED, pack_returns(loans))

    def lose(self, peer: int) -> None:
        """Lend to a peer no more; what it has is used again once it cannot see it."""
        loans = self._loans.pop(peer, None)
        if loans is not None:
            self._left.append(loans)
            self._has_takers = any(loans.is_taken for loans in self._loans.values())

    def rest(self) -> None:
        """Do what can wait: return all, look who is gone, give back free memory."""
        self.return_loans(at_once=True)
        if self._pool is None:
            return
        self._settle()
        if self._used_at and time.monotonic() - self._used_at > TRIM_S:
            self._used_at = 0.0
            self._pool.trim()

    @property
    def used_bytes(self) -> int:
        """Bytes of the pool that somebody holds, here or elsewhere."""
        return 0 if self._pool is None else self._pool.used_bytes

    def close(self) -> None:
        """Lend nothing any more; what is lent stays with those who have it."""
        for loans in (*self._loans.values(), *self._left):
            loans.close()
        self._loans.clear()
        self._left.clear()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _offer(self, peer: int, control: str) -> None:
        self._offered.add(peer)
        path = descriptor_path(control)
        if path is None:
            return
        try:
            if self._pool is None:
                self._pool = SharedPool(self._pool_bytes)
            self._loans[peer] = _send(path, self._token, self._index, self._pool)
        except BlockingIOError:  # it has not taken those of others yet: offer it again
            self._offered.discard(peer)
            return
        except OSError:
            return
        self._tell(peer, Kind.OFFER, OFFER.pack(self._pool.size_bytes))

    def _settle(self) -> bool:
        """Take back what lost peers have no more; True if there was anything."""
        left = [loans for loans in self._left if not loans.settle()]
        is_less = len(left) < len(self._left)
        self._left = left
        return is_less


def _send(path: str, token: bytes, index: int, pool: SharedPool) -> Loans:
    """Send the pool and the far end of a tether.

    Raises:
        OSError: There is no descriptor for it, or nobody listens.
    """
    here, there = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        send_descriptors(path, token, index, [pool.fd, there])
    except OSError:
        os.close(here)
        raise
    finally:
        os.close(there)
    return Loans(pool, here)
