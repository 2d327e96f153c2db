"""Memory of one process that others on its host read: where large arrays are sent from.

An array that is sent to a process of the same host is copied once, by its sender, into
memory that the receiver has mapped, or was made there to begin with: rows are routed
straight into it. What travels is where it lies. Blocks are used again, so that their
pages stay mapped: fresh memory costs a page fault for each 4 KiB.

The memory has no name in any file system, and is gone with the last process that has
it mapped. It cannot be made smaller, so that nobody who has it mapped can be hurt.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias
from weakref import KeyedRef

import numpy as np
import numpy.typing as npt

from timelyml.errors import InvariantError
from timelyml.exchange.frames import Range

POOL_BYTES = 256 << 20
"""How much a process lends at most. What does not fit is sent as it is without."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""What nobody can do to the memory any more; receivers look whether it is so."""

_PAGE = mmap.PAGESIZE

Bytes: TypeAlias = npt.NDArray[np.uint8]


class Extents:
    """Free ranges of `size_bytes`; the lowest that fits is taken.

    So memory that was used before, whose pages are there, is used again first.

    >>> extents = Extents(100)
    >>> extents.take(60), extents.take(60), extents.take(40)
    (0, None, 60)
    >>> extents.give(0, 60)
    >>> extents.free()
    [(0, 60)]
    """

    def __init__(self, size_bytes: int) -> None:
        self._starts = [0]
        self._sizes = [size_bytes]

    def free(self) -> list[tuple[int, int]]:
        """Return start and size of each free range, ascending."""
        return list(zip(self._starts, self._sizes, strict=True))

    def take(self, size_bytes: int) -> int | None:
        """Return the start of a range that is free no more; None if none fits."""
        for index, free in enumerate(self._sizes):
            if free >= size_bytes:
                start = self._starts[index]
                if free == size_bytes:
                    del self._starts[index], self._sizes[index]
                else:
                    self._starts[index] = start + size_bytes
                    self._sizes[index] = free - size_bytes
                return start
        return None

    def give(self, start: int, size_bytes: int) -> None:
        """Count a range as free again, joined with what is free beside it.

        Raises:
            InvariantError: Some of it is free already.
        """
        starts, sizes = self._starts, self._sizes
        stop = start + size_bytes
        index = bisect_left(starts, start)
        before = starts[index - 1] + sizes[index - 1] if index else 0
        if before > start or (index < len(starts) and starts[index] < stop):
            raise InvariantError(
                f"memory is given back twice; got {start} to {stop}; expected a range "
                f"that was taken; give each back once",
                start=start,
                stop=stop,
            )
        if index < len(starts) and starts[index] == stop:
            size_bytes += sizes.pop(index)
            del starts[index]
        if index and before == start:
            sizes[index - 1] += size_bytes
        else:
            starts.insert(index, start)
            sizes.insert(index, size_bytes)


class Block:
    """A range of the pool, and how many hold it: an array here, and each loan."""

    __slots__ = ("num_holders", "size_bytes", "start")

    def __init__(self, start: int, size_bytes: int) -> None:
        self.start = start
        self.size_bytes = size_bytes
        self.num_holders = 0


class SharedPool:
    """Blocks of shared memory; owned by the thread that drives a transport.

    Arrays made here may be dropped by any thread.

    Raises:
        OSError: The system gives no such memory, or no descriptor for it.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._process = os.getpid()
        self.fd = os.memfd_create("timelyml", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self._memory = mmap.mmap(self.fd, size_bytes)
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise OSError(f"no shared memory of {size_bytes} bytes") from error
        self._address = _address_of(np.frombuffer(self._memory, np.uint8))
        self._extents = Extents(size_bytes)
        self._blocks: dict[int, Block] = {}
        self._starts: list[int] = []  # of the blocks, ascending
        self._arrays: dict[int, Any] = {}  # weak references, by the block's start
        self._dropped: deque[Any] = deque()  # of those that died
        self._high = 0  # beyond it no page was ever touched

    def empty(self, size_bytes: int) -> Bytes | None:
        """Return memory for an array, freed with the last view of it; None if full."""
        block = self._allocate(size_bytes)
        if block is None:
            return None
        array = self._view(block.start, size_bytes)
        block.num_holders = 1
        self._arrays[block.start] = KeyedRef(array, self._dropped.append, block.start)
        return array

    def place(self, buffers: Sequence[Any]) -> list[tuple[Block, Range]] | None:
        """Return where each buffer lies, each a holder of its block; None if full.

        Those that lie elsewhere are copied, all of them into one block.
        """
        placed: list[tuple[Block, Range] | None] = []
        missing = 0
        for buffer in buffers:
            found = self._find(buffer)
            placed.append(found)
            if found is None:
                missing += _rounded(len(buffer))
        block = self._allocate(missing) if missing else None
        if missing and block is None:
            return None
        start = 0 if block is None else block.start
        done: list[tuple[Block, Range]] = []
        for buffer, found in zip(buffers, placed, strict=True):
            place = found
            if place is None:
                assert block is not None  # noqa: S101  for the type checker
                size = len(buffer)
                self._view(start, size)[:] = np.frombuffer(buffer, np.uint8)
                place = block, (start, size)
                start += _rounded(size)
            place[0].num_holders += 1
            done.append(place)
        return done

    def release(self, blocks: Iterable[Block]) -> None:
        """Count one holder of each block less; a block without any is free."""
        for block in blocks:
            block.num_holders -= 1
            if not block.num_holders:
                start = block.start
                del self._blocks[start]
                self._starts.remove(start)
                self._extents.give(start, block.size_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks that somebody holds."""
        self._collect()
        return sum(block.size_bytes for block in self._blocks.values())

    def trim(self) -> None:
        """Give the pages of free memory back to the system."""
        if os.getpid() != self._process:
            return  # what was free when this was forked need not be any more
        self._collect()
        for start, size in self._extents.free():
            stop = min(start + size, self._high)
            if start < stop:
                with contextlib.suppress(OSError):  # a system that cannot
                    self._memory.madvise(mmap.MADV_REMOVE, start, stop - start)
        self._high = max(self._starts, default=0)
        if self._high:
            self._high += self._blocks[self._high].size_bytes

    def close(self) -> None:
        """Let go of the memory; arrays here and elsewhere keep it until they die.

        They keep no more than what they lie in: else a small one would keep it all.
        """
        self.trim()
        os.close(self.fd)

    def _allocate(self, size_bytes: int) -> Block | None:
        if os.getpid() != self._process:
            return None  # in a fork, which would write where its parent does
        self._collect()
        size_bytes = _rounded(size_bytes)
        start = self._extents.take(size_bytes)
        if start is None:
            return None
        block = self._blocks[start] = Block(start, size_bytes)
        insort(self._starts, start)
        self._high = max(self._high, start + size_bytes)
        return block

    def _collect(self) -> None:
        """Count arrays that died; that may happen in any thread, at any time."""
        while self._dropped:
            start = self._dropped.popleft().key
            del self._arrays[start]
            self.release([self._blocks[start]])

    def _find(self, buffer: Any) -> tuple[Block, Range] | None:
        offset = _address_of(np.frombuffer(buffer, np.uint8)) - self._address
        if not 0 <= offset < self.size_bytes:
            return None
        start = self._starts[bisect_right(self._starts, offset) - 1]
        return self._blocks[start], (offset, len(buffer))

    def _view(self, start: int, size_bytes: int) -> Bytes:
        return np.frombuffer(self._memory, np.uint8, size_bytes, start)


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE


def _address_of(array: Bytes) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
