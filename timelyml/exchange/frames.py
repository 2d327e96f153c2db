"""The frames of one message on the wire: a checked header, a body, raw buffers.

The first frame is a fixed header, the sizes of the buffers, and the codec's body;
each buffer follows in frames of at most 4 MiB. What is not from a peer of this
cluster, of this version, and complete, is refused before anything is decoded.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from timelyml.errors import WireError
from timelyml.exchange.arrays import aligned_bytes

MAGIC = b"tmly"
VERSION = 1
TOKEN_BYTES = 16
CHUNK_BYTES = 4 << 20

# magic, version, lane, sender, sequence, token, number of buffers
_HEADER = struct.Struct("<4sBBiQ16sI")
HEADER_BYTES = _HEADER.size


class Received(NamedTuple):
    """What the frames of one message say, still encoded."""

    lane: int
    sender: int
    sequence: int
    body: memoryview
    buffers: list[memoryview]


def pack_frames(
    link: tuple[int, int, int], token: bytes, body: bytes, buffers: Sequence[Any]
) -> list[Any]:
    """Return the frames of one message; buffers are not copied.

    `link` is the lane, the sender and the sequence number.
    """
    header = _HEADER.pack(MAGIC, VERSION, *link, token, len(buffers))
    if not buffers:
        return [header + body]
    sizes = struct.pack(f"<{len(buffers)}Q", *(len(buffer) for buffer in buffers))
    frames: list[Any] = [header + sizes + body]
    for buffer in buffers:
        if len(buffer) <= CHUNK_BYTES:
            frames.append(buffer)
        else:
            view = memoryview(buffer)
            frames += [
                view[start : start + CHUNK_BYTES]
                for start in range(0, len(view), CHUNK_BYTES)
            ]
    return frames


def read_frames(frames: Sequence[Any], token: bytes) -> Received:
    """Check the frames of one message and return its parts.

    A buffer that came in one frame is a view of it; one that came in several is
    copied once, into aligned memory.

    Raises:
        WireError: The frames are foreign, of another version, or incomplete; its
            `reason` is one word.
    """
    first = memoryview(frames[0])
    if len(first) < HEADER_BYTES:
        raise _refused("short", f"{len(first)} bytes", f"{HEADER_BYTES} or more")
    magic, version, lane, sender, sequence, theirs, count = _HEADER.unpack_from(first)
    if magic != MAGIC:
        raise _refused("magic", repr(magic), repr(MAGIC))
    if version != VERSION:
        raise _refused("version", str(version), str(VERSION))
    if not hmac.compare_digest(theirs, token):
        raise _refused("token", "another token", "the token of this cluster")
    if not count:
        if len(frames) != 1:
            raise _refused("frames", f"{len(frames)} frames", "1")
        return Received(lane, sender, sequence, first[HEADER_BYTES:], [])
    start = HEADER_BYTES + 8 * count
    if len(first) < start:
        raise _refused("short", f"{len(first)} bytes", f"{start} or more")
    sizes = struct.unpack_from(f"<{count}Q", first, HEADER_BYTES)
    return Received(lane, sender, sequence, first[start:], _buffers(frames, sizes))


def _buffers(frames: Sequence[Any], sizes: Sequence[int]) -> list[memoryview]:
    views = [memoryview(frame) for frame in frames[1:]]
    if sum(sizes) != sum(map(len, views)):
        raise _refused("frames", f"{sum(map(len, views))} bytes", f"{sum(sizes)}")
    buffers, position = [], 0
    for size in sizes:
        if size <= CHUNK_BYTES:
            chunks = views[position : position + 1]
        else:
            chunks = views[position : position - (-size // CHUNK_BYTES)]
        position += len(chunks)
        if sum(map(len, chunks)) != size or not chunks:
            raise _refused("frames", "frames of other sizes", f"{size} bytes")
        buffers.append(chunks[0] if len(chunks) == 1 else _joined(chunks, size))
    if position != len(views):
        raise _refused("frames", f"{len(views)} buffers", str(position))
    return buffers


def _joined(chunks: Sequence[memoryview], size: int) -> memoryview:
    whole = aligned_bytes(size)
    position = 0
    for chunk in chunks:
        whole[position : position + len(chunk)] = chunk
        position += len(chunk)
    return whole.toreadonly()


def _refused(reason: str, got: str, expected: str) -> WireError:
    return WireError(
        f"a frame is refused ({reason}); got {got}; expected {expected}; check which "
        f"programs reach this address",
        reason=reason,
    )
