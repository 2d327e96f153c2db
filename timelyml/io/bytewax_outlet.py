"""The end of a Bytewax dataflow that feeds timelyml, inside the Bytewax process.

A sink of Bytewax learns of epochs only by being asked for snapshots, after epochs in
which it wrote something. So each batch is boxed, the box is stamped with its epoch by
an inspector, which is told of it, and the sink writes boxes. A write waits for
credit, in the one thread that Bytewax works in: so its sources wait too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from timelyml.errors import PeerError
from timelyml.exchange import (
    CreditLedger,
    Endpoint,
    Lane,
    LinkFailure,
    ZmqTransport,
    as_payload,
    num_records,
    size_bytes,
    slice_rows,
)
from timelyml.io.bytewax_boot import GuestBoot
from timelyml.io.bytewax_messages import (
    GUEST,
    HOST,
    Arrived,
    Credit,
    FedBlock,
    GuestMessage,
    Passed,
    feed_codec,
)

PIECES_PER_CREDIT = 4
WAIT_S = 1.0


class Outlet:
    """Sends blocks to the worker, as far as there is credit; one thread at a time."""

    def __init__(self, boot: GuestBoot, host: Endpoint) -> None:
        self._boot = boot
        self._ledger = CreditLedger(boot.credit_bytes)
        self._piece_bytes = max(1, boot.credit_bytes // PIECES_PER_CREDIT)
        self._transport = ZmqTransport(
            GUEST,
            codec=feed_codec(),
            token=bytes.fromhex(boot.token),
            bind=boot.bind,
        )
        self._transport.connect(HOST, host)
        self.tell(Arrived(self._transport.endpoint))

    def tell(self, message: GuestMessage) -> None:
        """Send a message; none overtakes another."""
        self._transport.send(HOST, message, Lane.BULK)

    def send(self, epoch: int, payload: Any) -> None:
        """Send a payload, in pieces if it is large; blocks until there is credit.

        Raises:
            PeerError: The worker is gone.
        """
        for piece in pieces(payload, self._piece_bytes):
            self._send(epoch, piece, is_last=False)

    def send_whole(self, epoch: int, payload: Any) -> None:
        """Send all of an epoch, as `send` does, even if it is empty.

        Raises:
            PeerError: The worker is gone.
        """
        parts = list(pieces(payload, self._piece_bytes)) or [payload]
        for index, piece in enumerate(parts, start=1):
            self._send(epoch, piece, is_last=index == len(parts))

    def _send(self, epoch: int, piece: Any, *, is_last: bool) -> None:
        size = size_bytes(piece)
        self._hear()
        while not self._ledger.can_send(size):
            self._transport.wait(WAIT_S)
            self._hear()
        self._ledger.spend(size)
        self.tell(FedBlock(epoch, size, piece, is_last))

    def close(self) -> None:
        """Flush what was sent."""
        self._transport.close()

    def _hear(self) -> None:
        for _, message in self._transport.receive():
            if isinstance(message, Credit):
                self._ledger.refund(message.size_bytes)
            elif isinstance(message, LinkFailure):
                raise PeerError(
                    f"bytewax process {self._boot.process_index} of "
                    f"{self._boot.name!r} lost the worker that it feeds: "
                    f"{message.reason}",
                    reason=message.reason,
                )


def pieces(payload: Any, most_bytes: int) -> Iterator[Any]:
    """Cut a payload into pieces of about `most_bytes`, of one record at least.

    >>> [len(piece) for piece in pieces([b"x" * 944] * 10, 4000)]
    [4, 4, 2]
    """
    count = num_records(payload)
    size = size_bytes(payload)
    if size <= most_bytes or count <= 1:
        if count:
            yield payload
        return
    step = max(1, count * most_bytes // size)
    for start in range(0, count, step):
        yield slice_rows(payload, start, min(start + step, count))


class Box:
    """The items of one batch, and the epoch that they are of."""

    __slots__ = ("epoch", "items")

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.epoch = 0


class OutletSink:
    """The outlet in the shape of a partitioned sink; it has a partition here only."""

    def __init__(self, outlet: Outlet, boot: GuestBoot) -> None:
        self._outlet = outlet
        self._boot = boot

    def list_parts(self) -> list[str]:
        """Return this process's partition; names sort as their indices."""
        return [f"{self._boot.process_index:06}"]

    def part_fn(self, item_key: str) -> int:
        """Return the partition of the process that boxed an item."""
        return int(item_key)

    def build_part(self, *_: Any) -> OutletPartition:
        """Return the only partition."""
        return OutletPartition(
            self._outlet,
            has_columns=self._boot.has_columns,
            is_regular=self._boot.is_regular,
        )

    def box(self, items: list[Any]) -> list[tuple[str, Box]]:
        """Put a batch in a box that stays in this process."""
        return [(str(self._boot.process_index), Box(items))]

    @staticmethod
    def stamp(_step: str, item: tuple[str, Box], epoch: int, _worker: int) -> None:
        """Note the epoch of a box."""
        item[1].epoch = epoch


class OutletPartition:
    """Writes boxes in order of their epochs, and tells when an epoch is over."""

    def __init__(
        self, outlet: Outlet, *, has_columns: bool, is_regular: bool = False
    ) -> None:
        self._outlet = outlet
        self._has_columns = has_columns
        self._is_regular = is_regular
        self._epoch = 0  # of Bytewax
        self._num_items = 0

    def write_batch(self, boxes: list[Box]) -> None:
        """Send what is in the boxes; blocks until there is credit."""
        for box in boxes:
            self._epoch = box.epoch
            if self._is_regular:
                self._write_epochs(box.items)
            elif self._has_columns:
                for item in box.items:
                    self._outlet.send(box.epoch, as_payload(item))
            else:
                self._outlet.send(box.epoch, box.items)

    def _write_epochs(self, items: list[Any]) -> None:
        for item in items:
            payload = as_payload(item) if self._has_columns else [item]
            self._outlet.send_whole(self._num_items, payload)
            self._num_items += 1

    def snapshot(self) -> None:
        """Tell that the epoch is over, which is when Bytewax asks for this."""
        if not self._is_regular:  # there each item tells it
            self._outlet.tell(Passed(self._epoch + 1))

    def close(self) -> None:
        """Do nothing: the end of the dataflow is told once it has ended."""
