"""The format of captured streams: data and progress of one shard, in order.

A tape starts with a magic number and the version of the format. What follows are
frames: the length of a body, the lengths of buffers, then the body and the buffers, each
padded to 16 bytes. Body and buffers are those of the codec; arrays are views of what
was read. The first message says whose tape it is. Its frontier starts with one at the
minimum, and ends empty.

Source:
    timely dataflow (capture: messages and progress changes, as one stream).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from timelyml.errors import TapeError, WireError
from timelyml.exchange import Codec
from timelyml.runtime.events import EVENT_TYPES
from timelyml.runtime.shipping import dumps

MAGIC = b"timelyml tape\n"
VERSION = 1
PREAMBLE = MAGIC + struct.pack("<H", VERSION)

_HEAD = struct.Struct("<II")  # length of the body, number of buffers
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 16
_MAX_BODY_BYTES = 1 << 31
_MAX_BUFFERS = 1 << 20

Frames: TypeAlias = list[Any]
"""Things with the buffer protocol, to be written one after the other."""


@dataclass(frozen=True, slots=True)
class Label:
    """The first message of a tape: whose it is; and how many come the same way."""

    shard: int
    num_shards: int
    num_tapes_here: int


@dataclass(frozen=True, slots=True)
class Data:
    """One block, as it came."""

    time: int
    payload: Any


@dataclass(frozen=True, slots=True)
class Progress:
    """Changes of the frontier: epochs and differences."""

    changes: tuple[tuple[int, int], ...]


Event: TypeAlias = Label | Data | Progress


def tape_codec(*, allow_pickle: bool) -> Codec:
    """Return the codec of tapes.

    Args:
        allow_pickle: Whether records that only pickle can express may be read: reading
            them runs code.
    """
    types = [Label, Data, Progress, *EVENT_TYPES]
    return Codec(types, allow_pickle=allow_pickle, dumps=dumps)


def pack(codec: Codec, event: Event) -> Frames:
    """Return an event as frames; arrays in it are not copied."""
    body, buffers = codec.encode(event)
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    head = _HEAD.pack(len(body), len(views))
    lengths = b"".join(_LENGTH.pack(view.nbytes) for view in views)
    frames: Frames = [head, lengths, _padding(len(head) + len(lengths))]
    for part in (body, *views):
        frames += [part, _padding(len(part))]
    return [frame for frame in frames if len(frame)]


class Unpacker:
    """Events of a tape whose bytes come piece by piece.

    Args:
        codec: See `tape_codec`.
        where: The tape, for errors.
    """

    def __init__(self, codec: Codec, where: str) -> None:
        self._codec = codec
        self._where = where
        self._pieces: list[bytes] = []
        self._size = 0
        self._wanted = len(PREAMBLE)  # bytes before a look is worth while
        self._has_preamble = False

    @property
    def is_between_events(self) -> bool:
        """Whether nothing is left over of an event that has not come whole."""
        return self._has_preamble and not self._size

    def feed(self, data: bytes) -> Iterator[Event]:
        """Take the next bytes; yields the events that are whole now.

        Raises:
            TapeError: They are no tape of this version.
        """
        self._pieces.append(data)
        self._size += len(data)
        if self._size < self._wanted:
            return
        whole = b"".join(self._pieces)
        self._pieces, self._size = [], 0
        position = 0
        if not self._has_preamble:
            self._check_preamble(whole)
            position = len(PREAMBLE)
        while True:
            end, lengths = self._measure(whole, position)
            if lengths is None or end > len(whole):
                break
            yield self._decode(whole, position, lengths)
            position = end
        if position < len(whole):
            self._pieces = [whole[position:]]
            self._size = len(whole) - position
        self._wanted = end - position

    def _check_preamble(self, data: bytes) -> None:
        if data[: len(MAGIC)] != MAGIC:
            raise self._error(f"{data[:16]!r} at its start; expected {MAGIC!r}")
        (version,) = struct.unpack_from("<H", data, len(MAGIC))
        if version != VERSION:
            raise self._error(f"format {version}; expected format {VERSION}")
        self._has_preamble = True

    def _measure(self, data: bytes, start: int) -> tuple[int, list[int] | None]:
        """Return the end of the frame at `start` and the lengths of its parts.

        The lengths are None, and the end is that of what has to come first, as long as
        they are not known.
        """
        position = start + _HEAD.size
        if position > len(data):
            return position, None
        body, number = _HEAD.unpack_from(data, start)
        if body > _MAX_BODY_BYTES or number > _MAX_BUFFERS:
            raise self._error(f"a frame of {body} bytes and {number} buffers")
        position += number * _LENGTH.size
        if position > len(data):
            return position, None
        lengths = [body] + [
            _LENGTH.unpack_from(data, start + _HEAD.size + index * _LENGTH.size)[0]
            for index in range(number)
        ]
        position += len(_padding(position - start))
        return position + sum(_padded(length) for length in lengths), lengths

    def _decode(self, data: bytes, start: int, lengths: Sequence[int]) -> Event:
        position = start + _padded(_HEAD.size + (len(lengths) - 1) * _LENGTH.size)
        parts = []
        for length in lengths:
            parts.append(memoryview(data)[position : position + length])
            position += _padded(length)
        try:
            event = self._codec.decode(parts[0], parts[1:])
        except WireError as error:
            hint = "pickled code" in str(error)
            remedy = "; pass allow_pickle=True for a tape of your own" if hint else ""
            raise self._error(f"{error}{remedy}") from error
        if not isinstance(event, (Label, Data, Progress)):
            raise self._error(f"a message of kind {type(event).__name__}")
        return event

    def _error(self, got: str) -> TapeError:
        return TapeError(
            f"tape {self._where} cannot be read; got {got}; capture it again, or read it "
            f"with the version of timelyml that wrote it",
            tape=self._where,
        )


def _padded(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _padding(length: int) -> bytes:
    return bytes(_padded(length) - length)
