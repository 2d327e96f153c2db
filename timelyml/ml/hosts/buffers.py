"""The buffers of a host: what is on its devices, what is promised, what is on its way."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from timelyml.errors import BufferLostError
from timelyml.ml.functions.types import dtype_named
from timelyml.ml.hosts.boxes import Box, size_of
from timelyml.ml.hosts.copies import HostCopy
from timelyml.ml.hosts.lost_peers import error_of
from timelyml.ml.hosts.messages import Expect, Gone, Piece, Pieces
from timelyml.ml.hosts.slices import HostSlice
from timelyml.runtime.failure import pack_error


class Buffer(NamedTuple):
    """An array on devices, perhaps still being computed, or its copy on the host.

    Attributes:
        slice: The name of the slice that it lies on.
        array: None if its computation could not even start, or it is spilled.
        error: Pickled, why its elements mean nothing.
        copy: What is there in place of the array, if it is spilled.
    """

    slice: str
    array: jax.Array | None
    error: bytes | None = None
    copy: HostCopy | None = None


@dataclass(slots=True)
class _Assembly:
    """A buffer of which not all pieces are there."""

    expect: Expect
    slice: HostSlice
    num_left: int
    parts: dict[Box, Any]
    error: bytes | None = None
    is_dropped: bool = False
    is_copy: bool = False


@dataclass(slots=True)
class BufferStore:
    """Buffers by number; owned by the thread that launches.

    Others may look which there are.

    A buffer is there, or promised by a launch that comes before whatever uses it, or
    expected in pieces.
    """

    _buffers: dict[int, Buffer] = field(default_factory=dict)
    _promised: set[int] = field(default_factory=set)
    _expected: dict[int, _Assembly] = field(default_factory=dict)
    _early: dict[int, list[Pieces]] = field(default_factory=dict)
    _taken: set[int] = field(default_factory=set)
    _lost: set[int] = field(default_factory=set)  # what still comes of it is dropped
    _gone: dict[int, Gone] = field(default_factory=dict)  # peers, and why
    giving: threading.Lock = field(default_factory=threading.Lock)
    """Held while a launch takes the memory of arguments, and to read what it may take."""

    def __contains__(self, buffer: object) -> bool:
        return buffer in self._buffers

    def __len__(self) -> int:
        return len(self._buffers) + len(self._expected)

    def get(self, buffer: int) -> Buffer | None:
        """Return a buffer that is there."""
        return self._buffers.get(buffer)

    def put(self, buffer: int, made: Buffer) -> None:
        """Keep what a launch made."""
        self.put_all((buffer,), (made,))

    def put_all(self, buffers: Sequence[int], made: Iterable[Buffer]) -> None:
        """Keep all that a launch made: a training step makes a hundred at once."""
        self._promised.difference_update(buffers)
        self._buffers.update(zip(buffers, made, strict=False))

    def promise(self, buffers: Iterable[int]) -> None:
        """Note results of a launch to come."""
        self._promised.update(buffers)

    def take(self, buffers: Iterable[int]) -> None:
        """Note arguments of a launch to come."""
        self._taken.update(buffers)

    def wanted(self, buffers: Iterable[int]) -> list[int]:
        """Return what may be asked for: what is there, and no launch to come takes."""
        there, taken = self._buffers, self._taken
        return [each for each in buffers if each in there and each not in taken]

    def not_at_hand(self, buffers: Iterable[int]) -> set[int]:
        """Return those that will not be there when a launch that uses them has its turn."""
        return set(buffers).difference(self._buffers).difference(self._promised)

    def coming(self, buffers: Iterable[int]) -> set[int]:
        """Return those of which pieces are missing."""
        return self._expected.keys() & set(buffers)

    def expect(self, expect: Expect, slice_: HostSlice) -> bool:
        """Note a buffer that comes in pieces; True if all of them came before."""
        shape = expect.type.shape
        boxes = set(slice_.own_boxes(expect.spec, shape))
        num_left = expect.num_elements
        if num_left is None:
            num_left = sum(map(size_of, boxes))
        parts = dict.fromkeys(boxes)
        assembly = _Assembly(expect, slice_, num_left, parts, is_copy=expect.is_copy)
        self._expected[expect.buffer] = assembly
        for pieces in self._early.pop(expect.buffer, []):
            _fill(assembly, pieces)
        gone = next((x for x in expect.senders if x in self._gone), None)
        if gone is not None and assembly.num_left > 0:
            return self._fail(assembly, self._gone[gone])
        return self._complete(expect.buffer)

    def add(self, pieces: Pieces) -> bool:
        """Take pieces; True if the buffer is there now."""
        assembly = self._expected.get(pieces.target)
        if pieces.target in self._lost:
            return False
        if assembly is None:  # the order to expect it takes another way
            self._early.setdefault(pieces.target, []).append(pieces)
            return False
        _fill(assembly, pieces)
        return self._complete(pieces.target)

    def spill(self, buffer: int, copy: HostCopy | None, error: bytes | None) -> None:
        """Keep a copy in place of the array of a buffer, or why there is none."""
        before = self._buffers[buffer]
        error = before.error or error
        self._buffers[buffer] = Buffer(before.slice, None, error, copy)
        if before.array is not None and not before.array.is_deleted():
            before.array.delete()

    def bring_back(self, buffers: Iterable[int]) -> None:
        """Put on devices again what is only on the host; what failed stays as it is."""
        for buffer in buffers:
            if (assembly := self._expected.get(buffer)) is not None:
                assembly.is_copy = False
            before = self._buffers.get(buffer)
            if before is not None and before.copy is not None:
                array = before.copy.to_devices()
                self._buffers[buffer] = Buffer(before.slice, array, before.error)

    def moved(self, slice_: HostSlice) -> None:
        """Have copies brought back to where their slice stands now."""
        for number, each in self._buffers.items():
            if each.slice == slice_.name and each.copy is not None:
                copy = each.copy.to_lie_on(slice_)
                self._buffers[number] = each._replace(copy=copy)

    def release(self, buffers: Iterable[int]) -> None:
        """Forget buffers; the pieces of one that is still to come are dropped."""
        numbers = tuple(buffers)
        self._taken.difference_update(numbers)
        self._promised.difference_update(numbers)
        for number in numbers:
            self._buffers.pop(number, None)
        if not (self._early or self._expected):
            return
        for number in numbers:
            self._early.pop(number, None)
            if (assembly := self._expected.get(number)) is not None:
                assembly.is_dropped = True

    def leave(self, buffers: Iterable[int]) -> None:
        """Forget buffers whose slice will stand elsewhere, or here anew.

        Pieces that came early are for there: they take another way than the order. What
        was lost on its way here may come again.
        """
        numbers = tuple(buffers)
        self._lost.difference_update(numbers)
        early = {each: self._early.pop(each) for each in numbers if each in self._early}
        self.release(numbers)
        self._early.update(early)

    def give_up(self, buffer: int, *, is_coming: bool) -> None:
        """Forget a buffer that was expected; `is_coming` if its pieces will come."""
        assembly = self._expected.get(buffer)
        if assembly is None:
            self._buffers.pop(buffer, None)
        elif is_coming:
            assembly.is_dropped = True
        else:
            del self._expected[buffer]

    def lost(self, gone: Gone) -> list[int]:
        """Go on without what a peer would have sent; return what of it."""
        self._gone[gone.host] = gone
        found = [x for x in self._expected.values() if gone.host in x.expect.senders]
        return [x.expect.buffer for x in found if self._fail(x, gone)]

    def _fail(self, assembly: _Assembly, gone: Gone) -> bool:
        """Go on without the pieces that are missing of a buffer."""
        self._lost.add(assembly.expect.buffer)
        assembly.error = assembly.error or pack_error(error_of(gone, assembly.expect))
        assembly.num_left = 0
        return self._complete(assembly.expect.buffer)

    def _complete(self, buffer: int) -> bool:
        assembly = self._expected[buffer]
        if assembly.num_left > 0:
            return False
        del self._expected[buffer]
        if assembly.is_dropped:
            return False
        expect = assembly.expect
        parts = {
            box: _room(expect, box) if part is None else part
            for box, part in assembly.parts.items()
        }
        slice_, error = assembly.slice, assembly.error
        if assembly.is_copy:
            copy = HostCopy.of_parts(expect.type, slice_.sharding(expect.spec), parts)
            self._buffers[buffer] = Buffer(slice_.name, None, error, copy)
        else:
            array = slice_.make_array(expect.type, expect.spec, parts)
            self._buffers[buffer] = Buffer(slice_.name, array, error)
        return True


def failure_of(code: object, buffers: Iterable[Buffer | None]) -> bytes | None:
    """Why a launch cannot start, on any host of its gang, if so."""
    if isinstance(code, bytes):
        return code
    for buffer in buffers:
        if buffer is None:
            return pack_error(
                BufferLostError("an argument is not there any more; got none of it")
            )
        if buffer.array is None:
            return buffer.error
    return None


def _fill(assembly: _Assembly, pieces: Pieces) -> None:
    assembly.error = assembly.error or pieces.error
    array_type = assembly.expect.type
    num_dims = len(array_type.shape)
    for piece in pieces.pieces:
        lengths = piece.array.shape[:num_dims]
        box = _box(piece.starts, lengths)
        if box in assembly.parts:
            assembly.parts[box] = piece.array
        else:
            _copy_into(assembly, piece, box)
        assembly.num_left -= size_of(box)


def _copy_into(assembly: _Assembly, piece: Piece, box: Box) -> None:
    for outer, part in assembly.parts.items():
        is_inside = all(
            a <= c and d <= b for (a, b), (c, d) in zip(outer, box, strict=True)
        )
        if is_inside:
            if part is None:
                part = _room(assembly.expect, outer)  # noqa: PLW2901 - made here
                assembly.parts[outer] = part
            part[
                tuple(
                    slice(c - a, d - a)
                    for (a, _), (c, d) in zip(outer, box, strict=True)
                )
            ] = piece.array
            return


def _room(expect: Expect, box: Box) -> np.ndarray[Any, Any]:
    """Return room for a box; what does not come of it has to be zeros."""
    physical = expect.type.physical
    words = physical.shape[len(expect.type.shape) :]
    lengths = tuple(stop - start for start, stop in box)
    make = np.empty if expect.num_elements is None else np.zeros
    return make((*lengths, *words), dtype_named(physical.dtype))


def _box(starts: Sequence[int], lengths: Sequence[int]) -> Box:
    return tuple(
        (start, start + length) for start, length in zip(starts, lengths, strict=True)
    )
