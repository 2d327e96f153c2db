"""Data-parallel training of a row of chunks: a replica on each slice, one program a step.

Within a slice XLA adds up the gradients of a chunk as the way back through it makes them.
Between slices they then go, while the way back goes on below; each slice adds those of all
replicas in the same order, so that replicas stay the same to the last bit, and updates the
weights that it has. The weights of a chunk are one vector, and so are its gradients: one
transfer in place of many.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from timelyml import ml

Chunk = Callable[[Any, Any], Any]
State = list[list[tuple[Any, Any]]]
"""Of each replica, the weights of each chunk as a vector, and the optimiser's state."""

AXIS = "data"


class Replicas:
    """Trains replicas of a model, one on each slice.

    Args:
        chunks: Pure functions `chunk(params, x) -> y` of batches, rows first.
        params: The weights of each, float32.
        loss_fn: `loss_fn(y, target) -> (sum, count)` over what counts.
        optimiser: One that treats each leaf alone.
        slices: With an axis "data", over which a replica's rows are cut; they may stand
            on islands of their own.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        params: Sequence[Any],
        loss_fn: Callable[[Any, Any], tuple[Any, Any]],
        optimiser: optax.GradientTransformation,
        slices: Sequence[ml.Slice],
    ) -> None:
        self.slices = tuple(slices)
        self._optimiser = optimiser
        pairs = [ravel_pytree(each) for each in params]
        self._first = [np.asarray(vector) for vector, _ in pairs]
        self._unravel = [unravel for _, unravel in pairs]
        on_vectors = [
            _on_vector(chunk, unravel)
            for chunk, (_, unravel) in zip(chunks, pairs, strict=True)
        ]
        self._losses = [self._loss(on_vectors, loss_fn, each) for each in slices]
        self._updates = [self._update(each) for each in slices]
        self._step = ml.program(self._both_ways)

    def init(self) -> State:
        """Bring the weights of all chunks to each slice, and begin the optimiser."""
        return [
            [self._placed(each, slice_) for each in self._first]
            for slice_ in self.slices
        ]

    def params(self, state: State, replica: int = 0) -> list[Any]:
        """Fetch the weights of each chunk, as they were given."""
        pairs = zip(self._unravel, state[replica], strict=True)
        return [
            unravel(jnp.asarray(np.asarray(vector))) for unravel, (vector, _) in pairs
        ]

    def put(self, *arrays: Any) -> list[tuple[Any, ...]]:
        """Cut a batch by rows: a part for each replica, over the devices of its slice."""
        num = len(self.slices)
        return [
            tuple(
                slice_.client.put(
                    each[index * len(each) // num : (index + 1) * len(each) // num],
                    slice_.sharding(P(AXIS)),  # type: ignore[no-untyped-call]  # JAX is typed in part
                )
                for each in arrays
            )
            for index, slice_ in enumerate(self.slices)
        ]

    def __call__(
        self, state: State, batch: Sequence[tuple[Any, Any]], count: Any
    ) -> tuple[State, list[Any]]:
        """Start a step; return the next state and the losses, which add up to the loss.

        Args:
            state: Destroyed.
            batch: Inputs and targets of each replica, as `put` returns them.
            count: How much counts in all of them, a float32.
        """
        new, losses = self._step(state, batch, count)
        return new, losses

    def _both_ways(self, state: Any, batch: Any, count: Any) -> Any:
        losses, gradients = [], []
        for replica, (loss, part) in enumerate(zip(self._losses, batch, strict=True)):
            params = [weights for weights, _ in state[replica]]
            value, found = ml.value_and_grad(loss)(params, *part, count)
            losses.append(value)
            gradients.append(found)
        new: list[list[Any]] = [[] for _ in self.slices]
        # Gradients of the last chunk come first, so it is updated first.
        for chunk in reversed(range(len(state[0]))):
            of_all = [each[chunk] for each in gradients]
            for replica, update in enumerate(self._updates):
                new[replica].insert(0, update(*state[replica][chunk], of_all))
        return new, losses

    def _loss(
        self, chunks: Sequence[Chunk], loss_fn: Callable[..., Any], slice_: ml.Slice
    ) -> Any:
        whole, cut = P(), P(AXIS)  # type: ignore[no-untyped-call]  # JAX is typed in part

        def part(number: int, chunk: Chunk) -> Any:
            def forward(params: Any, x: Any) -> Any:
                return chunk(params, x)

            forward.__name__ = forward.__qualname__ = f"chunk{number}"
            return ml.jit(
                forward, slice=slice_, in_shardings=(whole, cut), out_shardings=cut
            )

        def loss(params: Any, x: Any, target: Any, count: Any) -> Any:
            return loss_fn(chunks[-1](params, x), target)[0] / count

        loss.__name__ = loss.__qualname__ = f"chunk{len(chunks) - 1}"
        parts = [part(*each) for each in enumerate(chunks[:-1])]
        last = ml.jit(
            loss,
            slice=slice_,
            in_shardings=(whole, cut, cut, whole),
            out_shardings=whole,
        )

        def model(params: Any, x: Any, target: Any, count: Any) -> Any:
            for each, weights in zip(parts, params[:-1], strict=True):
                x = each(weights, x)
            return last(params[-1], x, target, count)

        return ml.program(model)

    def _update(self, slice_: ml.Slice) -> Any:
        def update(params: Any, state: Any, gradients: Sequence[Any]) -> Any:
            total = functools.reduce(operator.add, gradients)
            changes, state = self._optimiser.update(total, state, params)
            return optax.apply_updates(params, changes), state

        whole = P()  # type: ignore[no-untyped-call]  # JAX is typed in part
        return ml.jit(
            update,
            slice=slice_,
            in_shardings=whole,
            out_shardings=whole,
            donate_argnums=(0, 1),
        )

    def _placed(self, params: Any, slice_: ml.Slice) -> tuple[Any, Any]:
        whole = slice_.sharding(P())  # type: ignore[no-untyped-call]  # JAX is typed in part
        return slice_.client.put((params, self._optimiser.init(params)), whole)  # type: ignore[no-any-return]  # a tree as it was given


def _on_vector(chunk: Chunk, unravel: Callable[[Any], Any]) -> Chunk:
    def of_vector(vector: Any, x: Any) -> Any:
        return chunk(unravel(vector), x)

    return of_vector
