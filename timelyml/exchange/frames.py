"""The frames of one message on the wire: a checked header, a body, raw buffers.

The first frame is a fixed header, the sizes of the buffers, and the codec's body;
each buffer follows as a frame of its own, however large: cutting 64 MiB into frames
of 4 MiB makes ZeroMQ a fifth faster, but joining them again costs twice that. Where the
buffers are lent in the sender's memory, a table of where they lie stands before the body
and no frame follows; they may overlap, as one block may go to many shards. What is not
from a peer of this cluster, of this version, and complete, is refused before anything is
decoded.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from hmac import compare_digest
from typing import Any, NamedTuple, TypeAlias

from timelyml.errors import WireError
from timelyml.exchange.garbled import garbled
from timelyml.progress import new_tuple

MAGIC = b"tmly"
VERSION = 2
TOKEN_BYTES = 16

# magic, version, lane, kind, sender, sequence, token, number of buffers
_HEADER = struct.Struct("<4sBBBiQ16sI")
HEADER_BYTES = _HEADER.size
_unpack = _HEADER.unpack_from


OFFER = struct.Struct("<Q")  # the size of the memory that is offered
_TABLE = struct.Struct("<IQ")  # the number of buffers, the number of the first loan
_RANGE_BYTES = 16
_NUM_LOANS = 1 << 64

Range: TypeAlias = tuple[int, int]
"""An offset into the sender's memory, and a size in bytes."""


class Kind(IntEnum):
    """What a frame is: a message, or what one transport has to tell another."""

    MESSAGE = 0
    FAREWELL = 1  # the last word of a peer on a lane
    LENT = 2  # a message whose buffers lie in its sender's shared memory
    OFFER = 3  # of that memory, which was sent beside the lanes
    TAKEN = 4  # it is mapped
    RETURNED = 5  # loans that have ended


class Received(NamedTuple):
    """What the frames of one message say, still encoded."""

    lane: int
    kind: int
    sender: int
    sequence: int
    body: Any  # a memoryview, as are the buffers: mypyc cannot name it here
    buffers: Sequence[Any]


def pack_frames(
    number: tuple[int, int, int, int],
    token: bytes,
    body: bytes,
    buffers: Sequence[Any],
) -> list[Any]:
    """Return the frames of one message; buffers are not copied.

    `number` is the lane, the kind, the sender, and the sequence on that link.
    """
    header = _HEADER.pack(MAGIC, VERSION, *number, token, len(buffers))
    if not buffers:
        return [header + body]
    sizes = struct.pack(f"<{len(buffers)}Q", *(len(buffer) for buffer in buffers))
    return [header + sizes + body, *buffers]


def read_frames(frames: Sequence[Any], token: bytes) -> Received:
    """Check the frames of one message and return its parts, as views of them.

    Raises:
        WireError: The frames are foreign, of another version, or incomplete; its
            `reason` is one word.
    """
    first = memoryview(frames[0])
    if len(first) < HEADER_BYTES:
        raise _refused("short", f"{len(first)} bytes", f"{HEADER_BYTES} or more")
    magic, version, lane, kind, sender, sequence, theirs, count = _unpack(first)
    if magic != MAGIC:
        raise _refused("magic", repr(magic), repr(MAGIC))
    if version != VERSION:
        raise _refused("version", str(version), str(VERSION))
    if not compare_digest(theirs, token):
        raise _refused("token", "another token", "the token of this cluster")
    if len(frames) != 1 + count:
        raise _refused("frames", f"{len(frames)} frames", f"{1 + count}")
    if not count:
        fields = (lane, kind, sender, sequence, first[HEADER_BYTES:], ())
        received: Received = new_tuple(Received, fields)
        return received
    start = HEADER_BYTES + 8 * count
    if len(first) < start:
        raise _refused("short", f"{len(first)} bytes", f"{start} or more")
    sizes = struct.unpack_from(f"<{count}Q", first, HEADER_BYTES)
    buffers = [memoryview(frame) for frame in frames[1:]]
    found = tuple(map(len, buffers))
    if found != sizes:
        raise _refused("frames", f"buffers of {found}"[:80], f"{sizes}"[:80])
    return Received(lane, kind, sender, sequence, first[start:], buffers)


def _refused(reason: str, got: str, expected: str) -> WireError:
    return WireError(
        f"a frame is refused ({reason}); got {got}; expected {expected}; check which "
        f"programs reach this address",
        reason=reason,
    )


def pack_table(first: int, ranges: Sequence[Range]) -> bytes:
    """Return what says where the buffers of a message lie; the body follows it."""
    flat = [number for found in ranges for number in found]
    return _TABLE.pack(len(ranges), first) + struct.pack(f"<{len(flat)}Q", *flat)


def read_table(body: Any) -> tuple[int, list[Range], Any]:
    """Return the first loan's number, where the buffers lie, and the codec's body.

    Raises:
        WireError: The table is cut short, or what it numbers cannot be returned.
    """
    if len(body) < _TABLE.size:
        raise garbled("a table of loans is short", f"{len(body)} bytes", "a table")
    count, first = _TABLE.unpack_from(body)
    stop = _TABLE.size + count * _RANGE_BYTES
    if first + count > _NUM_LOANS:
        raise garbled("loans have no numbers", f"{count} from {first}", "64 bits")
    if len(body) < stop:
        raise garbled("a table of loans is short", f"{len(body)} bytes", f"{stop}")
    flat = struct.unpack_from(f"<{2 * count}Q", body, _TABLE.size)
    return first, list(zip(flat[::2], flat[1::2], strict=True)), body[stop:]


def pack_returns(loans: Sequence[int]) -> bytes:
    """Return what tells a lender which of its loans ended."""
    return struct.pack(f"<{len(loans)}Q", *loans)
