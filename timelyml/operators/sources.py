"""Streams from data: an iterable, arrays, or a function that gives each shard its own.

A source never reads further than it may send: bounded batches while its turn lasts, no
epoch that the run's epoch credit does not allow, and nothing while a channel that
leaves it waits for credit.

Source:
    timely dataflow (iterator_source, to_stream), with epochs.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from typing import Any

import numpy as np

from timelyml.errors import ConfigError, GraphError, PayloadError
from timelyml.exchange import as_payload
from timelyml.graph import GraphBuilder, Placement, StreamRef
from timelyml.operators.asking import Asking
from timelyml.operators.checks import check_optional_count
from timelyml.operators.operator_builder import OperatorBuilder
from timelyml.operators.readers import (
    RECORDS_PER_BATCH,
    START,
    AsyncRecordReader,
    ColumnReader,
    FunctionReader,
    Piece,
    Pieces,
    Reader,
    RecordReader,
)
from timelyml.operators.schema import (
    SCHEMA,
    Guards,
    Schema,
    SchemaLike,
    as_schema,
    declare,
    shown_by,
)
from timelyml.progress import Capability
from timelyml.runtime.operator import Logic
from timelyml.runtime.shard import Shard


def source(
    flow: GraphBuilder,
    data: Iterable[Any] | Callable[[int, int], Iterable[Any]] | Any,
    *,
    batch_size: int | None = None,
    epoch_every: int | None = None,
    regular: bool = False,
    num_shards: int | None = None,
    placement: Placement | None = None,
    schema: SchemaLike | None = None,
    name: str | None = None,
) -> StreamRef:
    """Make a stream of data that is known, or can be asked for.

    `data` is one of

    - an iterable of records (a list, a range, an object with `__iter__` or
      `__aiter__`): shard 0 reads it, and `exchange` spreads it. Everything is epoch 0, unless
      `epoch_every` says otherwise.
    - arrays (one, or a pytree of them with equal leading axes): each shard sends a
      contiguous range of rows. Epochs as above, with each shard's own batches.
    - a function `data(shard_index, num_shards)`, called on every shard, that returns
      or yields payloads: each is one epoch, counted from 0. It may yield
      `(epoch, payload)` instead, with epochs that never decrease; such an epoch ends
      when a later one comes, or at the end. It may yield None for "nothing yet": the
      worker goes on with other work and asks again soon. An async generator function
      is read ahead, by a few payloads, on an asyncio loop in a thread of the worker.

    Args:
        flow: The dataflow.
        data: See above. It is shipped to the workers; a one-shot iterator cannot be.
        batch_size: Most records in one block. Default: 1,024 records of an iterable;
            about 4 MiB of arrays; what a function yields, as it is.
        epoch_every: Batches per epoch, each of `batch_size` records; only with
            `batch_size`, and not for a function. Default: one epoch holds all.
        regular: Every shard sends exactly one logical block per epoch, even an empty
            one, so that a dense edge may follow. Of arrays it is always true; of a
            function it is your promise that all shards yield the same epochs, once.
        num_shards: Default: the dataflow's.
        placement: Which worker holds which shard.
        schema: Its columns; default: those of the arrays, or of the first block that a
            shard reads.
        name: Shown in traces and errors; the key of its position.

    Raises:
        GraphError: `data` is none of the above.
        ConfigError: The options do not fit each other or `data`.
        PayloadError: Arrays do not fit together, or do not fit `schema`.
    """
    who = name or "source"
    check_optional_count(who, "batch_size", batch_size)
    check_optional_count(who, "epoch_every", epoch_every)
    reader = _reader_of(who, data, batch_size, epoch_every)
    if regular and isinstance(reader, (RecordReader, AsyncRecordReader)):
        raise ConfigError(
            f"source {who!r} cannot be regular; got an iterable, which one shard reads; "
            f"expected arrays or a function; pass one of them",
            source=who,
        )
    declared = as_schema(schema)
    if isinstance(reader, ColumnReader):
        if declared is not None:
            declared.check(f"source {who!r}", reader.columns)
        else:
            declared = shown_by(reader.columns)
    return read_from(
        flow,
        reader,
        regular=regular,
        num_shards=num_shards,
        placement=placement,
        schema=declared,
        name=name,
    )


def read_from(
    flow: GraphBuilder,
    reader: Reader,
    *,
    kind: str = "source",
    regular: bool = False,
    num_shards: int | None = None,
    placement: Placement | None = None,
    schema: Schema | None = None,
    name: str | None = None,
) -> StreamRef:
    """Make a stream of what a reader gives each shard.

    Args:
        flow: The dataflow.
        reader: Shipped to every worker.
        kind: What is read, in a word.
        regular: See `source`.
        num_shards: Default: the dataflow's.
        placement: Which worker holds which shard.
        schema: Its columns, if they are known.
        name: Shown in traces and errors; the key of its position.
    """
    builder = OperatorBuilder(
        flow,
        kind,
        name=name,
        is_source=True,
        states=("state", SCHEMA),
        num_shards=num_shards,
        regular=regular,
        placement=placement,
    )
    builder.add_output()
    (out,) = builder.build(_logic(reader, Guards(kind, schema)))
    return declare(out, schema)


class Cursor:
    """How far one shard has read; only the position is worth keeping.

    Args:
        position: Where to read on.
    """

    def __init__(self, position: tuple[int, int] = START) -> None:
        self.position = position
        self._pieces: Pieces | None = None
        self._next: Piece | None = None
        self.asking = Asking()

    def __reduce__(self) -> tuple[type[Cursor], tuple[tuple[int, int]]]:
        return Cursor, (self.position,)

    def look(self, reader: Reader, shard: Shard) -> Piece | None:
        """Return the next piece without taking it; None if there is none yet.

        Raises:
            StopIteration: There is none any more.
        """
        if self._next is None:
            if self._pieces is None:
                self._pieces = reader.pieces(shard, self.position)
            self._next = next(self._pieces)
        return self._next

    def take(self, piece: Piece) -> None:
        """Take the piece that `look` returned."""
        self.position = piece.position
        self._next = None

    def close(self) -> None:
        """Close what is being read, so that a generator can clean up."""
        if isinstance(self._pieces, Iterator) and hasattr(self._pieces, "close"):
            self._pieces.close()
        self._pieces = self._next = None


def _logic(reader: Reader, guards: Guards) -> Logic:
    def on_start(shard: Shard) -> None:
        shard.state.setdefault("cursor", Cursor())
        if "capability" not in shard.state:  # it may be there, with the cursor
            shard.state["capability"] = shard.initial_capability()
        shard.activate()

    def on_activate(shard: Shard) -> None:
        while send_next(shard):
            if not shard.may_go_on():
                shard.activate()
                return

    def send_next(shard: Shard) -> bool:
        """Send one piece, if there is one and its epoch may be opened."""
        capability: Capability | None = shard.state.get("capability")
        if capability is None:
            return False
        cursor: Cursor = shard.state["cursor"]
        piece = _next_piece(shard, cursor, reader)
        if piece is None:
            return False
        capability.downgrade(piece.epoch)  # or the own old epoch would use up credit
        if not shard.can_start_epoch(piece.epoch):
            return False
        cursor.take(piece)
        guards.of(shard).check(piece.payload)
        shard.output().send(piece.epoch, piece.payload, is_last=piece.is_last)
        capability.downgrade(piece.next_epoch)
        return True

    return Logic(
        on_start=on_start,
        on_activate=on_activate,
        on_message=_obey,
        on_close=reader.close,
    )


def _obey(shard: Shard, body: tuple[Any, ...]) -> None:
    match body:
        case ("stop", None):
            _close(shard)
        case ("stop", epoch):  # regular: every shard ends before the same epoch
            shard.state["stop_at"] = epoch
            shard.activate()


def _next_piece(shard: Shard, cursor: Cursor, reader: Reader) -> Piece | None:
    """Return what is next, without taking it; None if that is the end, or for now."""
    try:
        piece = cursor.look(reader, shard)
    except StopIteration:
        _close(shard)
        return None
    if piece is None:
        cursor.asking.ask_again(shard)
        return None
    stop_at = shard.state.get("stop_at")
    if stop_at is not None and piece.epoch >= stop_at:
        _close(shard)
        return None
    cursor.asking.found()
    return piece


def _close(shard: Shard) -> None:
    """Give up the right to send: the stream ends with what was sent."""
    capability = shard.state.pop("capability", None)
    if capability is not None:
        shard.state["cursor"].close()
        capability.release()


def _reader_of(
    who: str, data: Any, batch_size: int | None, epoch_every: int | None
) -> Reader:
    """Decide what `data` is."""
    if epoch_every is not None and batch_size is None:
        raise ConfigError(
            f"source {who!r} has epochs of no known size; got epoch_every="
            f"{epoch_every} alone; expected batch_size too; pass batch_size",
            source=who,
        )
    columns = _columns_of(data)
    if columns is not None:
        return ColumnReader(columns, batch_size, epoch_every)
    if isinstance(data, (str, bytes, bytearray)):
        raise _unreadable(who, data, "wrap it in a list, if it is one record")
    if isinstance(data, Iterator):
        raise _unreadable(
            who, data, "pass a list, or a function of (shard_index, num_shards)"
        )
    size = batch_size or RECORDS_PER_BATCH
    per_epoch = epoch_every and epoch_every * size
    if isinstance(data, Iterable):
        return RecordReader(data, size, per_epoch)
    if inspect.isasyncgen(data):
        raise _unreadable(who, data, "pass the generator function, not its result")
    if isinstance(data, AsyncIterable):
        return AsyncRecordReader(data, size, per_epoch)
    if not callable(data):
        raise _unreadable(who, data, "pass one of these")
    if epoch_every is not None:
        raise ConfigError(
            f"source {who!r} has two rules for epochs; got epoch_every={epoch_every} "
            f"with a function; expected none; yield (epoch, payload) instead",
            source=who,
        )
    _check_signature(who, data)
    return FunctionReader(who, data, batch_size)


def _columns_of(data: Any) -> Any | None:
    """Return `data` as columns, or None if it is something else."""
    if hasattr(data, "__array__") or isinstance(data, dict):
        return as_payload(data)
    if isinstance(data, tuple) or hasattr(data, "__dataclass_fields__"):
        try:
            return as_payload(data)
        except PayloadError:
            if any(isinstance(item, np.ndarray) for item in _items_of(data)):
                raise  # meant as columns
    return None


def _items_of(data: Any) -> Iterable[Any]:
    return data if isinstance(data, tuple) else vars(data).values()


def _check_signature(who: str, fn: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some callables of C do not tell
        return
    try:
        signature.bind(0, 1)
    except TypeError:
        raise GraphError(
            f"source {who!r} cannot call its function; got {who}{signature}; expected "
            f"one of (shard_index, num_shards); add the arguments",
            source=who,
        ) from None


def _unreadable(who: str, data: Any, remedy: str) -> GraphError:
    return GraphError(
        f"source {who!r} cannot read what it was given; got {type(data).__name__}; "
        f"expected an iterable of records, arrays, or a function; {remedy}",
        source=who,
        got=type(data).__name__,
    )
