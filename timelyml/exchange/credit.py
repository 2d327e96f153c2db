"""Credit: pure accounting of how many bytes may be under way.

A sender spends credit of an edge and a peer when a block leaves, and gets it back
when the block leaves the receiver's queue, not when its epoch closes. What a
receiver does with an edge that must never block is in `spilling.py`.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from timelyml.errors import InvariantError

T = TypeVar("T")


class CreditLedger:
    """Bytes that one sender has outstanding on one edge towards one peer.

    Outstanding bytes never exceed the limit, except for a single block that alone
    is larger: it may go when nothing else is outstanding, or it never could.

    >>> ledger = CreditLedger(100)
    >>> ledger.spend(60)
    >>> ledger.can_send(60), ledger.can_send(40)
    (False, True)
    >>> ledger.refund(60)
    >>> ledger.can_send(1000)
    True
    """

    __slots__ = ("limit_bytes", "outstanding_bytes")

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 1:
            raise InvariantError(
                f"a credit limit admits nothing; got {limit_bytes}; expected 1 or more; "
                f"check the options of the run",
                limit_bytes=limit_bytes,
            )
        self.limit_bytes = limit_bytes
        self.outstanding_bytes = 0

    def can_send(self, size_bytes: int = 1) -> bool:
        """Whether a block of that size may leave now."""
        outstanding = self.outstanding_bytes
        return not outstanding or outstanding + size_bytes <= self.limit_bytes

    def spend(self, size_bytes: int) -> None:
        """Count a block that leaves.

        Raises:
            InvariantError: There is no credit for it.
        """
        if size_bytes < 0 or not self.can_send(size_bytes):
            raise InvariantError(
                f"a block leaves without credit; got {size_bytes} bytes with "
                f"{self.outstanding_bytes} outstanding; expected at most "
                f"{self.limit_bytes} in all; ask can_send first",
                size_bytes=size_bytes,
                outstanding_bytes=self.outstanding_bytes,
                limit_bytes=self.limit_bytes,
            )
        self.outstanding_bytes += size_bytes

    def refund(self, size_bytes: int) -> None:
        """Count bytes that left the receiver's queue.

        Raises:
            InvariantError: More comes back than was spent.
        """
        if not 0 <= size_bytes <= self.outstanding_bytes:
            raise InvariantError(
                f"credit comes back that nobody spent; got {size_bytes} bytes; "
                f"expected at most {self.outstanding_bytes}; refund each block once",
                size_bytes=size_bytes,
                outstanding_bytes=self.outstanding_bytes,
            )
        self.outstanding_bytes -= size_bytes


class ReceiveQueue(Generic[T]):
    """Blocks that arrived on one edge, first in, first out, and what they owe.

    The credit of a block is owed to its sender from the moment the block leaves;
    `take_refunds` collects it, so that one message can return many blocks' credit.
    """

    __slots__ = ("_blocks", "_owed", "queued_bytes")

    def __init__(self) -> None:
        self._blocks: deque[tuple[int, T, int]] = deque()
        self._owed: dict[int, int] = {}
        self.queued_bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def push(self, peer: int, block: T, size_bytes: int) -> None:
        """Append a block from `peer`."""
        self._blocks.append((peer, block, size_bytes))
        self.queued_bytes += size_bytes

    def pop(self) -> T:
        """Remove the oldest block; IndexError if there is none."""
        peer, block, size_bytes = self._blocks.popleft()
        self.queued_bytes -= size_bytes
        self._owed[peer] = self._owed.get(peer, 0) + size_bytes
        return block

    def take_refunds(self, minimum_bytes: int = 0) -> dict[int, int]:
        """Return the bytes owed by peer, of those owed at least the minimum."""
        due = {p: owed for p, owed in self._owed.items() if owed >= minimum_bytes}
        for peer in due:
            del self._owed[peer]
        return due
