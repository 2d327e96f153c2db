"""Credit: pure accounting of how many bytes may be under way.

A sender spends credit of an edge and a peer when a block leaves, and gets it back
when the block leaves the receiver's queue, not when its epoch closes. What a
receiver does with an edge that must never block is in `spilling.py`.
"""

from __future__ import annotations

from timelyml.errors import InvariantError


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

    __slots__ = ("limit_bytes", "outstanding_bytes", "peak_bytes")

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 1:
            raise InvariantError(
                f"a credit limit admits nothing; got {limit_bytes}; expected 1 or more; "
                f"check the options of the run",
                limit_bytes=limit_bytes,
            )
        self.limit_bytes = limit_bytes
        self.outstanding_bytes = 0
        self.peak_bytes = 0  # the most that was outstanding at any time

    def can_send(self, size_bytes: int = 1) -> bool:
        """Whether a block of that size may leave now."""
        outstanding = self.outstanding_bytes
        return not outstanding or outstanding + size_bytes <= self.limit_bytes

    def spend(self, size_bytes: int) -> None:
        """Count a block that leaves.

        Raises:
            InvariantError: There is no credit for it.
        """
        outstanding = self.outstanding_bytes
        if size_bytes < 0 or (
            outstanding and outstanding + size_bytes > self.limit_bytes
        ):
            raise InvariantError(
                f"a block leaves without credit; got {size_bytes} bytes with "
                f"{self.outstanding_bytes} outstanding; expected at most "
                f"{self.limit_bytes} in all; ask can_send first",
                size_bytes=size_bytes,
                outstanding_bytes=self.outstanding_bytes,
                limit_bytes=self.limit_bytes,
            )
        outstanding += size_bytes
        self.outstanding_bytes = outstanding
        self.peak_bytes = max(self.peak_bytes, outstanding)

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
