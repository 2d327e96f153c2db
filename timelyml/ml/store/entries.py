"""What is known of a logical buffer: who can ask for it, and what has become of it."""

from __future__ import annotations

from timelyml.ml.store.values import Buffer, BufferState

NOBODY = 0
"""The client of buffers that only a call needs; clients count from 1."""

# Most values have neither, and an empty set for each would have to be made and collected.
NO_NAMES: frozenset[str] = frozenset()
NO_WAITERS: frozenset[int] = frozenset()


class Entry:
    """A logical buffer and everybody who can ask for it.

    Attributes:
        number: Of the buffer.
        client: Who made it; `NOBODY` of those that only a call needs.
        producer: Name of the call that makes it.
        error: Pickled, if it failed.
        holders: How often each client was given it and has not let it go.
        names: Those under which it is published.
        num_uses: Calls under way that make or take it, and fetches of it.
        num_exports: Those of them that read it on the host, at a time of their own.
        readers: Calls that read it where it lies, and have no place in the order yet.
        waiters: Clients that are to hear when it is there.
        charged: The client whose call holds it between its parts, if one does.
    """

    __slots__ = (
        "buffer",
        "charged",
        "client",
        "error",
        "holders",
        "names",
        "num_exports",
        "num_uses",
        "number",
        "producer",
        "readers",
        "state",
        "waiters",
    )

    def __init__(self, buffer: Buffer, client: int, producer: str | None) -> None:
        self.buffer = buffer
        self.number = buffer.number
        self.client = client
        self.producer = producer
        self.state = BufferState.PENDING
        self.error: bytes | None = None
        self.holders: dict[int, int] = {}
        self.names: frozenset[str] = NO_NAMES
        self.num_uses = 0
        self.num_exports = 0
        self.readers: dict[str, None] | None = (
            None  # few are read before they are ready
        )
        self.waiters: frozenset[int] = NO_WAITERS
        self.charged = NOBODY

    @property
    def is_wanted(self) -> bool:
        """Whether anybody may still ask for it."""
        return bool(self.num_uses or self.holders or self.names)

    @property
    def num_references(self) -> int:
        """Handles, names, calls and fetches that keep it."""
        return sum(self.holders.values()) + len(self.names) + self.num_uses

    @property
    def owner(self) -> int:
        """The client that it is charged to; `NOBODY` once it belongs to a name or a call.

        That is its maker, or who opened it first of those that still hold it, or whose
        loop does.
        """
        if self.names:
            return NOBODY
        if not self.holders:
            return self.charged
        return self.client if self.client in self.holders else next(iter(self.holders))
