"""Which host has what of a buffer."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from timelyml.errors import BufferLostError
from timelyml.ml.controller.records import SliceRecord
from timelyml.ml.hosts import HeldBox, Piece
from timelyml.ml.store import Buffer


def is_whole(slice_: SliceRecord, buffer: Buffer, hosts: Collection[int]) -> bool:
    """Whether these hosts have all of a buffer."""
    held = slice_.held(buffer.spec, buffer.type.shape)
    return {box for _, box in held} == {box for host, box in held if host in hosts}


def by_host(held: Iterable[HeldBox]) -> dict[int, list[Any]]:
    """Return the boxes of each host, each once."""
    found: dict[int, list[Any]] = {}
    for host, box in dict.fromkeys(held):
        found.setdefault(host, []).append(box)
    return found


def cut(array: Any, box: Any) -> Piece:
    """Return the piece of an array that a box is."""
    starts = tuple(start for start, _ in box)
    inner = tuple(slice(start, stop) for start, stop in box)
    return Piece(starts, array[(*inner, ...)])  # an array also without dimensions


def lost(buffer: Buffer, island: str, reason: str) -> BufferLostError:
    """Return the error of who holds a buffer that went with its devices."""
    return BufferLostError(
        f"{buffer.type} on slice {buffer.placement!r} is lost with island {island!r}; "
        f"got {reason}; expected its devices to stay; compute it again on another slice",
        slice=buffer.placement,
        island=island,
        reason=reason,
    )
