"""Where a worker is in user code, in memory that outlives its process.

A worker notes operator, shard and time before each callback. It shares that memory with
who started its process, which can tell even after a kill or a crash of native code what
the process was doing: by then it says nothing any more, and the last sign of life may
have come before.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from mmap import mmap
from typing import Any

from timelyml.graph import Graph
from timelyml.progress import Timestamp

SIZE_BYTES = 256
_MOST_COORDINATES = 16  # of a time; of a deeper one they are the first
_HEAD = struct.Struct("=qqqq")  # generation, operator + 1, shard, number of coordinates
_PLACES = [struct.Struct(f"=qqqq{n}q") for n in range(_MOST_COORDINATES + 1)]
_PACK_INT: Any = _PLACES[1].pack_into  # looked up once; a note takes 0.25 us


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker was: in which operator of which run, and for what."""

    generation: int
    operator: int
    shard: int | None
    time: Timestamp | None

    def told(self, graph: Graph) -> tuple[str, dict[str, Any]]:
        """Return the place in words, and as values of an error."""
        name = graph.operators[self.operator].name
        where = f"operator {name!r}"
        if self.shard is not None:
            where += f", shard {self.shard}"
        if self.time is not None:
            where += f", at time {self.time!r}"
        return where, {"operator": name, "shard": self.shard, "time": self.time}


class Whereabouts:
    """What one worker notes for one run.

    Args:
        memory: Of at least `SIZE_BYTES`, shared by all runs of the worker; None where
            nobody else could read it.
        generation: Of the run.
    """

    __slots__ = ("_generation", "_memory")

    def __init__(self, memory: Any, generation: int) -> None:
        self._memory = memory
        self._generation = generation

    def enter(self, operator: int, shard: int, time: Timestamp | None) -> None:
        """Note that a callback of a shard is about to run; of none in particular, -1."""
        memory = self._memory
        if memory is None:
            return
        if isinstance(time, int):
            _PACK_INT(memory, 0, self._generation, operator + 1, shard, 1, time)
            return
        coordinates = (time or ())[:_MOST_COORDINATES]
        count = len(coordinates)
        head = (self._generation, operator + 1, shard, count)
        _PLACES[count].pack_into(memory, 0, *head, *coordinates)

    def leave(self) -> None:
        """Note that no callback runs."""
        if self._memory is not None:
            _HEAD.pack_into(self._memory, 0, self._generation, 0, -1, 0)


def place_in(memory: Any) -> Place | None:
    """Return where the worker is that notes it there; None if in no callback.

    >>> memory = bytearray(SIZE_BYTES)
    >>> Whereabouts(memory, 7).enter(2, 5, (3, 1))
    >>> place_in(memory)
    Place(generation=7, operator=2, shard=5, time=(3, 1))
    """
    generation, operator, shard, count = _HEAD.unpack_from(memory)
    if operator <= 0 or not 0 <= count <= _MOST_COORDINATES:
        return None
    coordinates = _PLACES[count].unpack_from(memory)[4:]
    time = None if not count else coordinates[0] if count == 1 else coordinates
    return Place(generation, operator - 1, None if shard < 0 else shard, time)


def new_memory() -> tuple[mmap, int]:
    """Return memory to share, and the descriptor by which a child gets at it."""
    descriptor = os.memfd_create("timelyml-whereabouts")
    os.ftruncate(descriptor, SIZE_BYTES)
    return mmap(descriptor, SIZE_BYTES), descriptor


def shared_memory(descriptor: int) -> mmap:
    """Return the memory behind the descriptor, which is closed."""
    memory = mmap(descriptor, SIZE_BYTES)
    os.close(descriptor)
    return memory
