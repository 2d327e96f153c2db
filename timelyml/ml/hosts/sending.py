"""What hosts send each other of buffers."""

from __future__ import annotations

import time

from timelyml.ml.functions import run_failure
from timelyml.ml.hosts.buffers import Buffer
from timelyml.ml.hosts.lost_peers import Torn
from timelyml.ml.hosts.messages import Export, Piece, Pieces
from timelyml.ml.hosts.slices import gather, zeros
from timelyml.ml.jax_private import is_ready
from timelyml.runtime.failure import pack_error

QUICK_BYTES = 1 << 16
"""Of a buffer whose pieces are copied in less time than it takes to wake a thread."""


def is_quick(buffer: Buffer, export: Export) -> bool:
    """Whether the thread that launches may copy the pieces: they are there, and small."""
    array = buffer.array
    is_there = array is None or (not array.is_deleted() and is_ready(array))
    return is_there and export.type.size_bytes <= QUICK_BYTES


def pieces_for(buffer: Buffer, export: Export) -> Pieces:
    """Return what is asked for; waits until it is computed, if that failed too."""
    found = _pieces_there(buffer, export)
    if export.starts is None:
        return found
    pairs = zip(found.pieces, export.starts, strict=True)
    placed = tuple(Piece(tuple(starts), piece.array) for piece, starts in pairs)
    return Pieces(found.target, placed, found.error)


def _pieces_there(buffer: Buffer, export: Export) -> Pieces:
    """Return pieces of a buffer, each where it lies."""
    error = buffer.error
    if buffer.copy is not None and error is None:
        sent_ns = time.monotonic_ns()
        pieces = buffer.copy.pieces(export.boxes)
        return Pieces(export.target, pieces, sent_ns=sent_ns)
    if buffer.array is not None and error is None:
        try:
            buffer.array.block_until_ready()
        except Exception as raised:  # noqa: BLE001 - that of its computation
            error = pack_error(run_failure(f"that returned {export.type}", raised))
        else:
            sent_ns = time.monotonic_ns()
            pieces = gather(buffer.array, export.type, export.boxes)
            return Pieces(export.target, pieces, sent_ns=sent_ns)
    return Pieces(export.target, zeros(export.type, export.boxes), error)


def exported(buffer: Buffer, export: Export) -> tuple[int, Pieces] | Torn:
    """Return pieces of a buffer that is computed, or that they were torn by a failure."""
    pieces, array = pieces_for(buffer, export), buffer.array
    if pieces.error is None or buffer.error is not None or array is None:
        return export.peer, pieces
    if array.is_fully_addressable:
        return export.peer, pieces
    return Torn(export.peer, pieces, export.type)
