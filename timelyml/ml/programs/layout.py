"""How an array is cut over a mesh, and which pieces go where when that changes.

Everything is arithmetic on the axes of the mesh, a dimension at a time: to say what one
shard holds, or which shards of another layout it meets, costs nothing that grows with
the number of shards. A move is described by its two ends, and each host works out its
own pieces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from timelyml.ml.functions import LogicalMesh, Spec
from timelyml.ml.functions.specs import axes_of, num_pieces
from timelyml.ml.programs.places import Place

Index: TypeAlias = tuple[tuple[int, int], ...]
"""A block of an array: start and stop in each dimension."""


@dataclass(frozen=True)  # no slots: what follows from it is kept
class Layout:
    """An array of a shape, cut over a mesh as a spec says.

    Each dimension is cut into as many equal parts as its axes have devices; a shard
    holds one *block*, named by its number in each dimension. Devices that differ only in
    axes of no dimension hold *replicas* of the same block.

    >>> layout = Layout(LogicalMesh(("a", "b"), (2, 3)), ("b",), (6, 4))
    >>> layout.block_of(4), layout.index(layout.block_of(4))
    ((1, 0), ((2, 4), (0, 4)))
    >>> [layout.shard(layout.block_of(4), replica) for replica in (0, 1)]
    [1, 4]
    """

    mesh: LogicalMesh
    spec: Spec
    shape: tuple[int, ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Into how many parts each dimension is cut."""
        return num_pieces(self.mesh, self.spec, len(self.shape))

    @cached_property
    def num_replicas(self) -> int:
        """How many shards hold each block."""
        return self.mesh.size // math.prod(self.counts)

    @cached_property
    def _strides(self) -> dict[str, int]:
        """How far apart neighbours along an axis are in the order of devices."""
        sizes = self.mesh.axis_sizes
        return {
            name: math.prod(sizes[position + 1 :])
            for position, name in enumerate(self.mesh.axis_names)
        }

    @cached_property
    def _free_axes(self) -> tuple[str, ...]:
        used = {axis for entry in self.spec for axis in axes_of(entry)}
        return tuple(name for name in self.mesh.axis_names if name not in used)

    def block_of(self, shard: int) -> tuple[int, ...]:
        """Return the block that a shard holds."""
        found = [self._number(axes_of(entry), shard) for entry in self.spec]
        return (*found, *(0,) * (len(self.shape) - len(found)))

    def shard(self, block: Sequence[int], replica: int) -> int:
        """Return the shard that holds this replica of a block."""
        found = self._offset(self._free_axes, replica)
        for entry, number in zip(self.spec, block, strict=False):
            found += self._offset(axes_of(entry), number)
        return found

    def index(self, block: Sequence[int]) -> Index:
        """Return where in the array a block is."""
        return tuple(
            (number * (length // count), (number + 1) * (length // count))
            for number, length, count in zip(
                block, self.shape, self.counts, strict=True
            )
        )

    def meeting(self, index: Index) -> Iterator[tuple[int, ...]]:
        """Return the blocks that share elements with a part of the array."""
        spans = []
        for (start, stop), length, count in zip(
            index, self.shape, self.counts, strict=True
        ):
            if start >= stop:
                return
            part = length // count
            spans.append(range(start // part, (stop - 1) // part + 1))
        yield from itertools.product(*spans)

    def _number(self, axes: Sequence[str], shard: int) -> int:
        """Where a device is along several axes, the first the slowest."""
        sizes = self.mesh.sizes
        number = 0
        for axis in axes:
            number = number * sizes[axis] + shard // self._strides[axis] % sizes[axis]
        return number

    def _offset(self, axes: Sequence[str], number: int) -> int:
        sizes = self.mesh.sizes
        offset = 0
        for axis in reversed(axes):
            number, coordinate = divmod(number, sizes[axis])
            offset += coordinate * self._strides[axis]
        return offset


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of elements that one shard sends and shards of one host receive.

    Typed keys have one more dimension in memory, for their words, which is never cut.

    Attributes:
        source: The shard that sends it.
        targets: The shards that get it, replicas of one block, all on one host.
        source_index: Where it is within the shard that sends.
        target_index: Where it goes within the shards that receive.
    """

    source: int
    targets: tuple[int, ...]
    source_index: Index
    target_index: Index


@dataclass(frozen=True)  # no slots: what follows from it is kept
class Move:
    """An array that goes from one layout and place to another.

    Each element reaches each host that needs it once, from one of the shards that have
    it: one on the host itself if there is one, else one chosen by the number of the
    host, so that replicas share the work. Both ends work that out
    alone, in the same order.
    """

    source: Layout
    source_place: Place
    target: Layout
    target_place: Place

    def receives(self, host: str) -> dict[str, tuple[Piece, ...]]:
        """Return what a host gets, by the host that it comes from; itself included."""
        own = self._own_sources(host)
        found: dict[str, list[Piece]] = {}
        for block, targets in self._targets(host).items():
            whole = self.target.index(block)
            for met in self.source.meeting(whole):
                shard = self._sender(met, host, own)
                piece = self._piece(met, shard, whole, targets)
                found.setdefault(self.source_place.hosts[shard], []).append(piece)
        return _ordered(found)

    def sends(self, host: str) -> dict[str, tuple[Piece, ...]]:
        """Return what a host sends, by the host that it goes to; not to itself."""
        found: dict[str, list[Piece]] = {}
        for shard in self.source_place.shards_by_host.get(host, ()):
            block = self.source.block_of(shard)
            for met in self.target.meeting(self.source.index(block)):
                whole = self.target.index(met)
                for other, targets in self._holders(met).items():
                    if other == host:
                        continue
                    own = self._own_sources(other)
                    if self._sender(block, other, own) == shard:
                        piece = self._piece(block, shard, whole, targets)
                        found.setdefault(other, []).append(piece)
        return _ordered(found)

    def _targets(self, host: str) -> dict[tuple[int, ...], tuple[int, ...]]:
        """The blocks that a host is to hold, each with its shards there."""
        found: dict[tuple[int, ...], list[int]] = {}
        for shard in self.target_place.shards_by_host.get(host, ()):
            found.setdefault(self.target.block_of(shard), []).append(shard)
        return {block: tuple(shards) for block, shards in found.items()}

    def _holders(self, block: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The hosts that are to hold a block, each with its shards of it."""
        found: dict[str, list[int]] = {}
        for replica in range(self.target.num_replicas):
            shard = self.target.shard(block, replica)
            found.setdefault(self.target_place.hosts[shard], []).append(shard)
        return {host: tuple(sorted(shards)) for host, shards in found.items()}

    def _own_sources(self, host: str) -> dict[tuple[int, ...], int]:
        """The blocks that a host has already, each with the first shard of it."""
        shards = self.source_place.shards_by_host.get(host, ())
        return {self.source.block_of(shard): shard for shard in reversed(shards)}

    @cached_property
    def _host_numbers(self) -> dict[str, int]:
        return {host: i for i, host in enumerate(self.target_place.shards_by_host)}

    def _sender(
        self, block: tuple[int, ...], host: str, own: dict[tuple[int, ...], int]
    ) -> int:
        if block in own:
            return own[block]
        num_hosts, num_replicas = len(self._host_numbers), self.source.num_replicas
        spread = max(num_replicas, num_hosts) // num_hosts
        replica = self._host_numbers[host] * spread % num_replicas
        return self.source.shard(block, replica)

    def _piece(
        self,
        block: tuple[int, ...],
        shard: int,
        whole: Index,
        targets: tuple[int, ...],
    ) -> Piece:
        source = self.source.index(block)
        shared = tuple(
            (max(mine[0], theirs[0]), min(mine[1], theirs[1]))
            for mine, theirs in zip(source, whole, strict=True)
        )
        return Piece(shard, targets, _within(shared, source), _within(shared, whole))


def _ordered(found: dict[str, list[Piece]]) -> dict[str, tuple[Piece, ...]]:
    """In an order on which both ends agree, so that pieces need no names."""
    return {
        host: tuple(sorted(pieces, key=lambda piece: (piece.source, piece.targets)))
        for host, pieces in found.items()
    }


def _within(inner: Index, outer: Index) -> Index:
    return tuple(
        (start - base, stop - base)
        for (start, stop), (base, _) in zip(inner, outer, strict=True)
    )
