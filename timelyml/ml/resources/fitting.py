"""Which devices a slice gets: the least loaded ones that fit, neighbours if possible.

Source:
    *Pathways* (Barham et al., MLSys 2022), section 4.1: computations are spread over
    the devices to balance load, under constraints of interconnect and memory. Slices
    share devices; the gang scheduler gives them time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from timelyml.ml.resources.inventory import Device
from timelyml.ml.resources.requests import SliceRequest

Load: TypeAlias = tuple[int, int]
"""Slices on a device, then bytes reserved on it: less is better, in this order."""


def pools(
    request: SliceRequest, devices: Iterable[Device]
) -> Iterator[tuple[Device, ...]]:
    """Yield the devices of one kind on one island, for each that the request allows.

    Of an island that forms anew, those of before and of after are apart.
    """
    found: dict[tuple[str, int, str], list[Device]] = {}
    for device in devices:
        is_wanted = request.kind in (None, device.kind)
        if is_wanted and request.island in (None, device.island):
            key = device.island, device.generation, device.kind
            found.setdefault(key, []).append(device)
    for _, pool in sorted(found.items()):
        yield tuple(sorted(pool, key=lambda device: device.coordinates))


def fit(
    request: SliceRequest,
    devices: Iterable[Device],
    load_of: Callable[[Device], Load],
) -> tuple[Device, ...] | None:
    """Choose devices for a request, in row-major order of its shape.

    Args:
        request: What is asked for.
        devices: Those that could be given now.
        load_of: What a device carries already.

    Returns:
        The devices whose most loaded one carries least, then with the least in all,
        then neighbours, then the lowest coordinates; None if none fit. Adjacency is
        looked for in boxes of the island's mesh: it wins where loads are equal, unless
        the request demands it.
    """
    best: tuple[tuple[object, ...], tuple[Device, ...]] | None = None
    for pool in pools(request, devices):
        for is_scattered, chosen in _candidates(request, pool, load_of):
            loads = [load_of(device) for device in chosen]
            rank = (
                max(loads),
                sum(n for n, _ in loads),
                is_scattered,
                chosen[0].island,
            )
            if best is None or rank < best[0]:
                best = (rank, chosen)
    return None if best is None else best[1]


def _candidates(
    request: SliceRequest, pool: Sequence[Device], load_of: Callable[[Device], Load]
) -> Iterator[tuple[bool, tuple[Device, ...]]]:
    if len(pool) < request.num_devices:
        return
    for box in boxes(request.sizes, pool):
        yield False, box
    if not request.is_adjacent:
        least = sorted(pool, key=lambda each: (load_of(each), each.coordinates))
        chosen = least[: request.num_devices]
        yield True, tuple(sorted(chosen, key=lambda each: each.coordinates))


def boxes(sizes: Sequence[int], pool: Sequence[Device]) -> Iterator[tuple[Device, ...]]:
    """Yield every box of the pool's mesh in which a slice of these sizes is one.

    Axes of the slice are laid along axes of the mesh, in every order; a slice of one
    axis may also wind through a box, each device beside the next.
    """
    at = {device.coordinates: device for device in pool}
    if not at:
        return
    rank = len(next(iter(at)))
    for layout in _layouts(tuple(sizes), rank):
        for corner in at:
            if _moved(corner, layout[-1]) not in at:
                continue  # seen at once, or 2,048 devices would take a minute
            places = [_moved(corner, offset) for offset in layout]
            if all(place in at for place in places):
                yield tuple(at[place] for place in places)


def _moved(corner: tuple[int, ...], offset: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(c + step for c, step in zip(corner, offset, strict=True))


def _layouts(sizes: tuple[int, ...], rank: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield offsets from a corner, in row-major order of the slice."""
    long = [axis for axis, size in enumerate(sizes) if size > 1]
    if len(long) <= rank:
        for places in itertools.permutations(range(rank), len(long)):
            yield [
                _offset(index, long, places, rank)
                for index in itertools.product(*map(range, sizes))
            ]
    if len(long) == 1 and rank > 1:
        yield from _windings(math.prod(sizes), rank)


def _offset(
    index: tuple[int, ...], long: list[int], places: tuple[int, ...], rank: int
) -> tuple[int, ...]:
    offset = [0] * rank
    for axis, place in zip(long, places, strict=True):
        offset[place] = index[axis]
    return tuple(offset)


def _windings(length: int, rank: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield paths through boxes of at least two long sides, step by step."""
    for sides in _factorings(length, rank):
        if sum(side > 1 for side in sides) > 1:
            yield _snake(sides)


def _factorings(length: int, rank: int) -> Iterator[tuple[int, ...]]:
    if rank == 1:
        yield (length,)
        return
    for side in range(1, length + 1):
        if length % side == 0:
            for rest in _factorings(length // side, rank - 1):
                yield (side, *rest)


def _snake(sides: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Walk through a box without a jump.

    >>> _snake((2, 3))
    [(0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0)]
    """
    if len(sides) == 1:
        return [(step,) for step in range(sides[0])]
    rest = _snake(sides[1:])
    return [
        (step, *place)
        for step in range(sides[0])
        for place in (rest if step % 2 == 0 else reversed(rest))
    ]
