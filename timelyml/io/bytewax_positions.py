"""Where partitions are to be resumed: the state that connectors leave behind.

A position is asked of its partition at the moment when the state is exported, so it
costs nothing before that, and is never older than what was sent or written.
"""

from __future__ import annotations

from typing import Any

from timelyml.io.bytewax_shapes import close, noting, snapshot_of

POSITIONS = "positions"
"""Name of the state: from a partition's key to its `Position`."""


class Position:
    """The position of one partition; pickles as what `snapshot` says just then.

    Args:
        value: What it was when it was last known, to build the partition with.
    """

    def __init__(self, value: Any = None) -> None:
        self._value = value
        self._partition: Any = None

    def __reduce__(self) -> tuple[type[Position], tuple[Any]]:
        return Position, (self.value,)

    @property
    def value(self) -> Any:
        """The position now; None: from the beginning."""
        if self._partition is not None:
            self._value = snapshot_of(self._partition)
        return self._value

    def follow(self, partition: Any) -> None:
        """Be the position of `partition` from now on."""
        self._partition = partition

    def settle(self, what: str) -> None:
        """Remember where the partition ends, and close it."""
        if self._partition is None:
            return
        with noting(f"while {what} was closed"):
            _ = self.value  # never asked for after close
            partition, self._partition = self._partition, None
            close(partition)


class Live:
    """What a shard has open: no state, so nothing of it is exported."""

    def __reduce__(self) -> tuple[type[Live], tuple[()]]:
        return Live, ()
