"""How columns get to other shards, and how their cotangents come back.

Each transfer is linear, and holds both itself and its transpose: `send` and `receive`
one way, `send_back` and `receive_back` the other. Between the two, either side keeps a
record of where rows went or came from, so the way back is the recorded permutation and
nothing is decided twice. Blocks are taken by the number of the shard that sent them:
floats are added in the same order whoever was faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from timelyml.errors import InvariantError
from timelyml.graph import Broadcast, Direct, Gather, Pact
from timelyml.ml.firing import Blocks, Firing

Array: TypeAlias = NDArray[Any]
Arrays: TypeAlias = tuple[Array, ...]


class Places(NamedTuple):
    """Where rows go: their slots by destination shard, and within it in order.

    A row that goes to several shards has a slot for each; `row * copies + copy`.
    """

    order: NDArray[np.intp]
    destinations: NDArray[Any]
    shape: tuple[int, ...]
    """`(rows,)` or `(rows, copies)`."""

    @classmethod
    def of(cls, to: Array, where: Array | None = None) -> Places:
        """Sort slots by destination, stably.

        >>> Places.of(np.array([[1, 0], [1, 2]])).order.tolist()
        [1, 0, 2, 3]
        """
        flat = np.asarray(to).ravel()
        sent = (
            np.arange(flat.shape[0])
            if where is None
            else np.flatnonzero(np.asarray(where).ravel())
        )
        keys = flat[sent]
        if keys.size and keys.min() >= 0 and keys.max() < 1 << 16:
            keys = keys.astype(np.uint16)  # sorted by radix
        order = sent[np.argsort(keys, kind="stable")]
        return cls(order, flat[order], np.shape(to))

    @property
    def rows(self) -> NDArray[np.intp]:
        """The row of each slot, in order."""
        copies = self.shape[1] if len(self.shape) > 1 else 1
        return self.order // copies

    def placed(self, who: str, rows: Array) -> Array:
        """Put rows that are in order at their slots, and zeros at all others."""
        if len(rows) != len(self.order):
            raise InvariantError(
                f"{who} got rows of other slots; got {len(rows)}; expected "
                f"{len(self.order)}, each slot exactly once; a block is missing or was "
                "counted twice"
            )
        size = int(np.prod(self.shape))
        make = np.empty if len(self.order) == size else np.zeros
        flat = make((size, *rows.shape[1:]), rows.dtype)
        flat[self.order] = rows
        return flat.reshape(*self.shape, *rows.shape[1:])

    def ordered(self, placed: Array) -> Array:
        """Take rows from their slots; undoes `placed`."""
        flat = placed.reshape(-1, *placed.shape[len(self.shape) :])
        return flat[self.order]


class Transfer(Protocol):
    """One kind of move; see the module."""

    @property
    def is_dense(self) -> bool:
        """Whether every sender sends to every receiver."""
        ...

    def pact(self, *, is_back: bool, is_dense: bool) -> Pact:
        """Give the pact of the edge, one way or the other."""
        ...

    def send(self, firing: Firing, output: int, payload: Arrays, guides: Arrays) -> Any:
        """Send columns; give the sender's record."""
        ...

    def receive(
        self, blocks: Blocks, like: Arrays, receipts: Arrays
    ) -> tuple[Arrays, Any]:
        """Give what arrived, and the receiver's record.

        Args:
            blocks: By sender.
            like: Arrays of the types of the payload, for where nothing came.
            receipts: The receiver's own columns that tell rows their places.
        """
        ...

    def send_back(
        self, firing: Firing, output: int, cotangents: Arrays, record: Any
    ) -> None:
        """Send cotangents of what was received, by the receiver's record."""
        ...

    def receive_back(self, blocks: Blocks, like: Arrays, record: Any) -> Arrays:
        """Give the cotangents of what was sent, by the sender's record."""
        ...


def joined(blocks: Blocks, like: Arrays) -> Arrays:
    """Join the rows of all blocks by sender; none of the right type where none came."""
    if not blocks:
        return tuple(each[:0] for each in like)
    rows: Arrays = blocks.rows
    return rows


def sources_of(blocks: Blocks) -> Array:
    """Give the sender of each row."""
    return np.repeat(np.asarray(blocks.sources, np.int32), blocks.counts)


def by_sender(blocks: Blocks, like: Arrays) -> tuple[Arrays, Array]:
    """Return rows by sender with who sent each as one more column, and that column."""
    sources = sources_of(blocks)
    return (*joined(blocks, like), sources), sources


def added(arrays: Sequence[Array]) -> Array:
    """Add arrays, one after the other."""
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total


@dataclass(frozen=True, slots=True)
class Exchange:
    """Each row to the shards that are named for it; guides: `to`, perhaps `where`.

    The last `num_tags` columns have a value for each slot instead of one for each row.
    """

    num_tags: int = 0

    @property
    def is_dense(self) -> bool:
        """Only shards that get rows hear of it."""
        return False

    def pact(self, *, is_back: bool, is_dense: bool) -> Pact:
        """Only shards that get rows hear of it."""
        del is_back, is_dense
        return Direct()

    def send(
        self, firing: Firing, output: int, payload: Arrays, guides: Arrays
    ) -> Places:
        """Send a copy of each row for each of its destinations."""
        places = Places.of(*guides)
        rows = places.rows
        split = len(payload) - self.num_tags
        sent = tuple(column[rows] for column in payload[:split])
        sent += tuple(places.ordered(tag) for tag in payload[split:])
        send_rows(firing, output, sent, places.destinations)
        return places

    def receive(
        self, blocks: Blocks, like: Arrays, receipts: Arrays
    ) -> tuple[Arrays, Array]:
        """Give rows by sender, and beside them who sent each."""
        del receipts
        return by_sender(blocks, like)

    def send_back(
        self, firing: Firing, output: int, cotangents: Arrays, record: Array
    ) -> None:
        """Send each row's cotangent to where the row came from."""
        send_rows(firing, output, cotangents, record)

    def receive_back(self, blocks: Blocks, like: Arrays, record: Places) -> Arrays:
        """Add up the cotangents of a row's copies, in the order of its destinations."""
        who = "exchange"
        placed = (record.placed(who, rows) for rows in joined(blocks, like))
        if len(record.shape) == 1:
            return tuple(placed)
        copies = range(record.shape[1])
        return tuple(added([each[:, copy] for copy in copies]) for each in placed)


@dataclass(frozen=True, slots=True)
class Return:
    """Rows to where an exchange took them from; guides: sources; receipts: its own."""

    @property
    def is_dense(self) -> bool:
        """Only shards that get rows hear of it."""
        return False

    def pact(self, *, is_back: bool, is_dense: bool) -> Pact:
        """Only shards that get rows hear of it."""
        del is_back, is_dense
        return Direct()

    def send(
        self, firing: Firing, output: int, payload: Arrays, guides: Arrays
    ) -> Array:
        """Send each row to its source."""
        (sources,) = guides
        send_rows(firing, output, payload, sources)
        return sources

    def receive(
        self, blocks: Blocks, like: Arrays, receipts: Arrays
    ) -> tuple[Arrays, Places]:
        """Give `(rows, copies, ...)`, zeros where nothing was sent."""
        places = Places.of(*receipts)
        rows = joined(blocks, like)
        return tuple(places.placed("return", each) for each in rows), places

    def send_back(
        self, firing: Firing, output: int, cotangents: Arrays, record: Places
    ) -> None:
        """Send cotangents as the exchange sent rows."""
        rows = tuple(record.ordered(each) for each in cotangents)
        send_rows(firing, output, rows, record.destinations)

    def receive_back(self, blocks: Blocks, like: Arrays, record: Array) -> Arrays:
        """Give cotangents in the order in which rows were returned."""
        places = Places.of(record)
        return tuple(places.placed("return", each) for each in joined(blocks, like))


@dataclass(frozen=True, slots=True)
class Spread:
    """All rows to every shard, or to the only one (`gathers`)."""

    gathers: bool = False

    @property
    def is_dense(self) -> bool:
        """Every sender sends."""
        return True

    def pact(self, *, is_back: bool, is_dense: bool) -> Pact:
        """Each sender sends one block to each receiver, and gets one back."""
        if is_back:
            return Direct(dense=is_dense)
        return Gather(dense=is_dense) if self.gathers else Broadcast(dense=is_dense)

    def send(
        self, firing: Firing, output: int, payload: Arrays, guides: Arrays
    ) -> None:
        """Send all rows."""
        del guides
        firing.send(output, payload)

    def receive(
        self, blocks: Blocks, like: Arrays, receipts: Arrays
    ) -> tuple[Arrays, Array]:
        """Give rows by sender, and beside them who sent each."""
        del receipts
        return by_sender(blocks, like)

    def send_back(
        self, firing: Firing, output: int, cotangents: Arrays, record: Array
    ) -> None:
        """Send each sender the cotangents of its own rows."""
        send_rows(firing, output, cotangents, record)

    def receive_back(self, blocks: Blocks, like: Arrays, record: None) -> Arrays:
        """Add up what all receivers make of the same rows."""
        del record
        if not blocks:
            return like
        return tuple(added(column) for column in zip(*blocks.payloads, strict=True))


@dataclass(frozen=True, slots=True)
class Total:
    """Arrays of one shape from all shards, added up for every shard."""

    @property
    def is_dense(self) -> bool:
        """Every sender sends."""
        return True

    def pact(self, *, is_back: bool, is_dense: bool) -> Pact:
        """Everybody tells everybody."""
        del is_back
        return Broadcast(dense=is_dense)

    def send(
        self, firing: Firing, output: int, payload: Arrays, guides: Arrays
    ) -> None:
        """Send the arrays, each as one row."""
        del guides
        firing.send(output, tuple(each[None] for each in payload))

    def receive(
        self, blocks: Blocks, like: Arrays, receipts: Arrays
    ) -> tuple[Arrays, None]:
        """Add up, in the order of shards."""
        del receipts
        return self._added(blocks, like), None

    def send_back(
        self, firing: Firing, output: int, cotangents: Arrays, record: None
    ) -> None:
        """Send cotangents to all: each shard has a part in every sum."""
        del record
        self.send(firing, output, cotangents, ())

    def receive_back(self, blocks: Blocks, like: Arrays, record: None) -> Arrays:
        """Add up, in the order of shards."""
        del record
        return self._added(blocks, like)

    @staticmethod
    def _added(blocks: Blocks, like: Arrays) -> Arrays:
        if not blocks:
            return like
        columns = zip(*blocks.payloads, strict=True)
        return tuple(added([each[0] for each in column]) for column in columns)


def send_rows(firing: Firing, output: int, rows: Arrays, shards: Array) -> None:
    """Send each row to the shard that is named for it."""
    firing.shard.output(output).send_rows(firing.time, rows, shards)
