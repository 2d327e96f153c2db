"""Adds up the gradients of a stage over its replicas: rings of slices.

The gradients of each replica are cut into as many chunks as there are replicas. Chunks go
round a ring, and each slice adds its own to what comes (reduce-scatter), until every slice
has one whole sum; then the sums go round (all-gather). So each of n slices receives
2(n-1)/n of the gradients' bytes, whatever n is, in place of n-1 times them.

Where several islands have equally many replicas, the sums of an island's chunks go round a
second ring from island to island before they go round within: n replicas on each of k
islands receive 2(k-1)/k of one n-th from there. Otherwise one ring goes through all, from
island to island as seldom as it can.

Each chunk is added up in the order of its ring, which is that in which replicas were given,
and every replica gets a copy of the same sum. So all stay the same to the last bit, and runs
repeat each other. XLA's own all-reduce over the devices of all replicas adds in another order
where the same devices belong to other processes, and would hold them all until the slowest
has come.

Source:
    The ring of Patarasuk and Yuan (2009); rings over the dimensions of a torus as in Ying
    et al., Image Classification at Supercomputer Scale (2018).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from timelyml.ml.client.slices import Slice
from timelyml.ml.functions import JitFunction, jit
from timelyml.ml.pipeline.chunking import Chunk, Chunking
from timelyml.ml.pipeline.updating import added

Ring: TypeAlias = list[int]
"""Replicas, each of which sends to the next, and the last to the first."""


def rings_of(slices: Sequence[Slice]) -> tuple[list[Ring], list[Ring]]:
    """Return the rings within islands, and those between them.

    A replica is part of one ring within and of one between; the ring between that has the
    replica at some position within has those at the same position on other islands.

    Args:
        slices: Where the replicas are.
    """
    by_island: dict[str, Ring] = {}
    for replica, slice_ in enumerate(slices):
        by_island.setdefault(slice_.island, []).append(replica)
    within = list(by_island.values())
    if len(set(map(len, within))) > 1:
        within = [[replica for ring in within for replica in ring]]
    return within, [list(ring) for ring in zip(*within, strict=True)]


class AllReduce:
    """Adds up what the replicas of one stage have.

    Args:
        slices: Where they are. Rings are laid by the islands of the moment; wherever
            slices move later, sums are the same bits.
        chunking: Of what they have, one chunk for each.
        once: Returns what was made for a key, or makes it.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        chunking: Chunking,
        once: Callable[[Any, Callable[[], Any]], Any],
    ) -> None:
        self._slices = slices
        self._chunking = chunking
        self._once = once
        self._within, self._between = rings_of(slices)

    def __call__(self, gradients: Sequence[Any], shared: Sequence[Any]) -> list[Any]:
        """Return for each replica the chunks of the sum, to be given to `Chunking.joined`.

        Args:
            gradients: Of each replica.
            shared: Of each replica, lists of what is to be added to leaves, by their
                positions.
        """
        if not self._chunking.groups:
            return [() for _ in self._slices]
        held: list[dict[int, Chunk]] = [
            dict(enumerate(self._cut(replica)(*given)))
            for replica, given in enumerate(zip(gradients, shared, strict=True))
        ]
        per_part, num_parts = len(self._within), len(self._between)
        numbers = range(per_part * num_parts)
        parts = [numbers[i * per_part :][:per_part] for i in range(num_parts)]
        for ring in self._within:
            self._reduce_scatter(ring, parts, held)
        for position, ring in enumerate(self._between):
            own = parts[(position + 1) % num_parts]
            singles = [own[i : i + 1] for i in range(per_part)]
            self._reduce_scatter(ring, singles, held)
            self._all_gather(ring, singles, held, is_last=num_parts == 1)
        for ring in self._within:
            self._all_gather(ring, parts, held, is_last=True)
        return [tuple(chunks[i] for i in numbers) for chunks in held]

    def _reduce_scatter(
        self, ring: Ring, parts: Sequence[range], held: list[dict[int, Chunk]]
    ) -> None:
        """Leave each replica the sum of the part after the one of its position."""
        for step in range(len(ring) - 1):
            for position, sender in enumerate(ring):
                receiver = ring[(position + 1) % len(ring)]
                numbers = parts[(position - step) % len(ring)]
                came, own = ([held[r][i] for i in numbers] for r in (sender, receiver))
                sums = self._add(receiver, len(numbers))(came, own)
                held[receiver].update(zip(numbers, sums, strict=True))

    def _all_gather(
        self,
        ring: Ring,
        parts: Sequence[range],
        held: list[dict[int, Chunk]],
        *,
        is_last: bool,
    ) -> None:
        """Give every replica all parts, each from the one before it in the ring.

        Args:
            ring: Of replicas as `_reduce_scatter` leaves them.
            parts: Of each position.
            held: Changed.
            is_last: Whether what comes is sent on to nobody outside the ring; then what
                nobody in it needs either stays at its sender until it is used.
        """
        for step in range(len(ring) - 1):
            is_end = is_last and step == len(ring) - 2
            for position, sender in enumerate(ring):
                receiver = ring[(position + 1) % len(ring)]
                numbers = parts[(position + 1 - step) % len(ring)]
                came = [held[sender][i] for i in numbers]
                if not is_end:
                    came = self._pass_on(receiver, len(numbers))(came)
                held[receiver].update(zip(numbers, came, strict=True))

    def _cut(self, replica: int) -> JitFunction:
        chunking = self._chunking

        def cut(gradients: Any, shared: Any) -> list[Chunk]:
            return chunking.cut(added(gradients, shared))

        return self._made(cut, replica, chunking.num_chunks)

    def _add(self, replica: int, num_chunks: int) -> JitFunction:
        def add(came: Any, own: Any) -> Any:
            return jax.tree.map(operator.add, came, own)

        return self._made(add, replica, num_chunks, donate_argnums=1)

    def _pass_on(self, replica: int, num_chunks: int) -> JitFunction:
        def pass_on(came: Any) -> Any:
            return came

        return self._made(pass_on, replica, num_chunks)

    def _made(
        self, function: Any, replica: int, num_chunks: int, **options: Any
    ) -> JitFunction:
        """Return a function on the slice of a replica that returns so many chunks."""
        slice_ = self._slices[replica]
        specs = [self._chunking.specs] * num_chunks
        key = function.__name__, slice_.name, self._chunking, num_chunks
        made: JitFunction = self._once(
            key, lambda: jit(function, slice=slice_, out_shardings=specs, **options)
        )
        return made
