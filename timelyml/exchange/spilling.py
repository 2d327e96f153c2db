"""A queue for edges inside cycles: beyond its budget of memory it spills to disk.

Such edges must never block, or a cycle could wait for itself. Blocks that do not fit
are encoded and appended to unlinked temporary files, which the operating system
frees even after a crash; each file is freed once it has been read.
"""

from __future__ import annotations

import contextlib
import struct
import tempfile
from collections import deque
from pathlib import Path
from typing import IO, Any

from timelyml.errors import SpillError
from timelyml.exchange.codec import Codec

SEGMENT_BYTES = 64 << 20

_LENGTHS = struct.Struct("<QI")


class _Segment:
    """One temporary file of encoded blocks: written once, read once, in order."""

    def __init__(self, directory: Path) -> None:
        self.file: IO[bytes] = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        self.written = 0
        self.read = 0

    def append(self, body: bytes, buffers: list[Any]) -> None:
        sizes = struct.pack(f"<{len(buffers)}Q", *(len(b) for b in buffers))
        self.file.seek(self.written)
        for piece in (_LENGTHS.pack(len(body), len(buffers)), sizes, body, *buffers):
            self.file.write(piece)
        self.file.flush()  # so that a full disk shows here
        self.written = self.file.tell()

    def next(self) -> tuple[bytes, list[bytes]]:
        self.file.seek(self.read)
        body_bytes, count = _LENGTHS.unpack(self.file.read(_LENGTHS.size))
        sizes = struct.unpack(f"<{count}Q", self.file.read(8 * count))
        body = self.file.read(body_bytes)
        buffers = [self.file.read(size) for size in sizes]
        self.read = self.file.tell()
        return body, buffers


class SpillingQueue:
    """First in, first out; at most `budget_bytes` of it in memory.

    A single block larger than the budget stays in memory if nothing else is there.

    Args:
        budget_bytes: Memory for queued blocks.
        directory: Where the temporary files go.
        codec: Encodes spilled blocks; it must know, or be allowed to pickle, them.
        who: Whose queue it is, in errors.
    """

    def __init__(
        self,
        budget_bytes: int,
        directory: Path,
        codec: Codec,
        who: str = "a queue inside a loop",
    ) -> None:
        self.budget_bytes = budget_bytes
        self.memory_bytes = 0
        self.disk_bytes = 0
        self.spilled_blocks = 0  # in all, for metrics
        self._directory = directory
        self._codec = codec
        self._who = who
        self._memory: deque[tuple[Any, int]] = deque()
        self._segments: deque[_Segment] = deque()
        self._on_disk: deque[int] = deque()  # sizes, oldest first

    def __len__(self) -> int:
        return len(self._memory) + len(self._on_disk)

    @property
    def queued_bytes(self) -> int:
        """Bytes of all queued blocks, in memory and on disk."""
        return self.memory_bytes + self.disk_bytes

    def push(self, block: Any, size_bytes: int) -> None:
        """Append a block; to disk if memory is full or anything is there already.

        Raises:
            SpillError: The disk is full or the directory cannot be written.
        """
        fits = not self._memory or self.memory_bytes + size_bytes <= self.budget_bytes
        if fits and not self._on_disk:
            self._memory.append((block, size_bytes))
            self.memory_bytes += size_bytes
            return
        body, buffers = self._codec.encode(block)
        try:
            if not self._segments or self._segments[-1].written >= SEGMENT_BYTES:
                self._segments.append(_Segment(self._directory))
            self._segments[-1].append(body, buffers)
        except OSError as error:
            raise SpillError(
                f"{self._who} cannot spill what waits for it in a loop; got {error.strerror} in "
                f"{str(self._directory)!r}; expected room for {size_bytes} bytes; free "
                f"the disk or raise the memory budget of loops",
                path=str(self._directory),
                size_bytes=size_bytes,
            ) from error
        self._on_disk.append(size_bytes)
        self.disk_bytes += size_bytes
        self.spilled_blocks += 1

    def pop(self) -> Any:
        """Remove and return the oldest block; IndexError if there is none.

        Raises:
            UnreadableError: It was spilled, and a record of it does not unpickle.
        """
        if self._memory:
            block, size_bytes = self._memory.popleft()
            self.memory_bytes -= size_bytes
            return block
        self.disk_bytes -= self._on_disk.popleft()
        segment = self._segments[0]
        body, buffers = segment.next()
        if segment.read == segment.written:
            self._segments.popleft()
            segment.file.close()
        return self._codec.decode(body, buffers)

    def close(self) -> None:
        """Forget every block and free the disk."""
        self._memory.clear()
        self._on_disk.clear()
        self.memory_bytes = self.disk_bytes = 0
        while self._segments:
            with contextlib.suppress(OSError):  # what a full disk did not take
                self._segments.popleft().file.close()
