"""What other processes lend to this one: their memory, mapped, and views of it.

A loan ends when the last view of it died, in whatever thread: then its lender is told,
some loans at a time. What is mapped stays so until the last view of it died too,
whatever became of the lender.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections import deque
from typing import Any

import numpy as np

from timelyml.exchange.datagrams import DescriptorInbox, close_all
from timelyml.exchange.frames import OFFER, read_table
from timelyml.exchange.garbled import garbled
from timelyml.exchange.shared_pool import SEALS

_RETURN_BYTES = 1 << 20  # of ended loans that a lender may wait for
_RETURN_LOANS = 256
_NUM_DESCRIPTORS = 2  # the memory, and one end of the tether


class SharedViews:
    """The memory of each peer that offered it, and the loans that have views."""

    def __init__(self, descriptors: DescriptorInbox) -> None:
        self._descriptors = descriptors
        self._mapped: dict[int, mmap.mmap] = {}
        self._views: dict[tuple[int, int], Any] = {}  # weak, by lender and loan
        self.dropped: deque[Any] = deque()  # of those that died since the last look
        self._ended: dict[int, list[int]] = {}  # loans to be returned, by lender
        self._ended_bytes: dict[int, int] = {}
        _open.add(self)

    def accept(self, peer: int, body: Any) -> bool:
        """Map the memory that a peer offers; False if it cannot be had.

        Raises:
            WireError: The offer is garbled, or the second one.
        """
        if len(body) != OFFER.size or peer in self._mapped:
            raise garbled("an offer of memory is wrong", f"{len(body)} bytes", "one")
        (size,) = OFFER.unpack(body)
        descriptors = self._descriptors.take(peer)
        if len(descriptors) != _NUM_DESCRIPTORS:
            close_all(descriptors)
            return False
        memory, tether = descriptors
        try:
            mapped = _mapped(memory, size)
        except (OSError, ValueError, OverflowError):  # none such, or no room for it
            os.close(tether)
            return False
        finally:
            os.close(memory)
        weakref.finalize(mapped, os.close, tether).atexit = False
        self._mapped[peer] = mapped
        return True

    def read(self, peer: int, body: Any) -> tuple[Any, list[Any]]:
        """Return the codec's body of a message, and read-only views as its buffers.

        Raises:
            WireError: They lie outside of what the peer offered, or are on loan.
        """
        first, ranges, rest = read_table(body)
        mapped: Any = self._mapped.get(peer, b"")
        size = len(mapped)
        buffers = []
        for number, (start, length) in enumerate(ranges, first):
            if not (0 < length <= size and start <= size - length):
                raise garbled(
                    "a buffer lies outside of its sender's memory",
                    f"{length} bytes at {start}",
                    f"some of {size}",
                )
            if (peer, number) in self._views:
                raise garbled("a loan comes twice", str(number), "a new one")
            view = np.frombuffer(mapped, np.uint8, length, start)
            key = peer, number
            self._views[key] = weakref.KeyedRef(
                view, self.dropped.append, (key, length)
            )
            buffers.append(view)
        return rest, buffers

    def due(self, *, at_once: bool = False) -> list[tuple[int, list[int]]]:
        """Return lenders and their loans that ended, once there are enough of them."""
        while self.dropped:
            (peer, number), length = key = self.dropped.popleft().key
            if self._views.pop(key[0], None) is None:
                continue  # a fork may still have it
            self._ended.setdefault(peer, []).append(number)
            self._ended_bytes[peer] = self._ended_bytes.get(peer, 0) + length
        due = [
            peer
            for peer, loans in self._ended.items()
            if at_once
            or self._ended_bytes[peer] >= _RETURN_BYTES
            or len(loans) >= _RETURN_LOANS
        ]
        for peer in due:
            del self._ended_bytes[peer]
        return [(peer, self._ended.pop(peer)) for peer in due]

    def forget(self, peer: int) -> None:
        """Take no loans of a peer any more; its memory goes with the last view."""
        self._mapped.pop(peer, None)

    def keep_all(self) -> None:
        """Never return what is on loan now: a fork of this process has it as well."""
        gone = {ref.key[0] for ref in list(self.dropped)}
        for key in list(self._views):
            if key not in gone:
                self._views.pop(key, None)

    def close(self) -> None:
        """Take nothing any more; views stay valid."""
        _open.discard(self)
        self._mapped.clear()
        self._descriptors.close()


_open: weakref.WeakSet[SharedViews] = weakref.WeakSet()


def _keep_all() -> None:
    for views in list(_open):
        views.keep_all()


os.register_at_fork(before=_keep_all)


def _mapped(descriptor: int, size: int) -> mmap.mmap:
    """Map memory to be read.

    Raises:
        OSError: It is not what a pool is, or could become smaller while it is read.
    """
    is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
    if not is_sealed or os.fstat(descriptor).st_size != size:
        raise OSError("no memory of a pool")
    return mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
