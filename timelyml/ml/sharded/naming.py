"""What parameters and optimiser states are called in checkpoints.

Names are those that JAX gives to the leaves of the trees of the unsharded program. A leaf
of a state belongs to the parameter whose path ends its own, as in `[0].mu['down']`; if
that one is split and the leaf has its leading axis, shards hold parts of the leaf too.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from timelyml.errors import CheckpointError
from timelyml.ml.checkpoints import Arrays, Checkpoint
from timelyml.ml.sharded.optimisers import Owned
from timelyml.ml.sharded.parts import Parts, told
from timelyml.ml.sharded.structure import Structure

_FIRST = jax.tree_util.SequenceKey(0)


class Named(NamedTuple):
    """An array that a shard holds: whole, or a part along its leading axis."""

    name: str
    is_part: bool
    array: NDArray[Any]


def names_of(structure: Structure) -> list[str]:
    """Give the names of all parameters, by place."""
    return [
        jax.tree_util.keystr(path[1:])
        if path[0] == _FIRST
        else f"argument {jax.tree_util.keystr(path)}"
        for path in _paths_of(structure)
    ]


def restored(params: Any, checkpoint: Checkpoint) -> Any:
    """Give a tree like `params` with the arrays of a checkpoint.

    Raises:
        CheckpointError: It is of other parameters.
    """
    named, structure = jax.tree_util.tree_flatten_with_path(params)
    expected = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in named}
    _compare(checkpoint, "parameters", checkpoint.params, expected)
    return jax.tree.unflatten(structure, [checkpoint.params[name] for name in expected])


@dataclass(frozen=True, slots=True)
class Naming:
    """Names what one operator holds of the state of an optimiser."""

    owned: Owned
    split: Mapping[int, Parts]
    """By place of a parameter: how shards share it out, if they do."""

    def named(self, params: Mapping[int, Any], state: Any) -> list[Named]:
        """Give the leaves of a state; copies, for updates reuse its memory."""
        lengths = self._lengths(params)
        leaves, _ = jax.tree_util.tree_flatten_with_path(state)
        return [
            Named(self._name(path), parts is not None, told(leaf, parts))
            for path, leaf in leaves
            for parts in [self._parts(path, leaf, lengths)]
        ]

    def restored(
        self,
        params: Mapping[int, Any],
        state: Any,
        saved: Arrays,
        shard: int,
    ) -> Any:
        """Give a state like this one with the arrays of a checkpoint.

        Args:
            params: What the shard holds.
            state: The first state of the optimiser for them.
            saved: Whole arrays by name.
            shard: Its index.
        """
        lengths = self._lengths(params)

        def one(path: Any, leaf: Any) -> Any:
            array = saved[self._name(path)]
            parts = self._parts(path, leaf, lengths)
            return jax.numpy.array(array if parts is None else parts.held(array, shard))

        return jax.tree_util.tree_map_with_path(one, state)

    def names(self, state: Any) -> dict[str, Any]:
        """Give the leaves of a state by name."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(state)
        return {self._name(path): leaf for path, leaf in leaves}

    def _name(self, path: Any) -> str:
        """Leave out that parameters are the first argument of the step."""
        start = _start_of(path, _paths_of(self.owned.structure))
        return jax.tree_util.keystr((*path[:start], *path[start + 1 :]))

    def _lengths(self, params: Mapping[int, Any]) -> dict[Any, tuple[int, Parts]]:
        """Give the leading axis of what is held of each, by its parameter's path."""
        places = _paths_of(self.owned.structure)
        return {
            path: (len(params[place]), self.split[place])
            for path, place in places.items()
            if place in self.split and place in params
        }

    @staticmethod
    def _parts(
        path: Any, leaf: Any, lengths: Mapping[Any, tuple[int, Parts]]
    ) -> Parts | None:
        """Say how a leaf is shared out: as its parameter, if it has its leading axis."""
        end, shape = path[_start_of(path, lengths) :], np.shape(leaf)
        length, parts = lengths.get(end, (None, None))
        return parts if shape and length == shape[0] else None


def check_fits(
    checkpoint: Checkpoint, structure: Structure, params: Sequence[Any], owned: Owned
) -> list[NDArray[Any]]:
    """Give the parameters of a checkpoint in the order of their places.

    Args:
        checkpoint: Where to go on.
        structure: Of the parameters that are trained now.
        params: Their leaves; shapes and types count.
        owned: All that are trained, with the optimiser.

    Raises:
        CheckpointError: It is of other parameters or of another optimiser.
    """
    every = dict(zip(names_of(structure), params, strict=True))
    expected = {
        name: leaf
        for place, (name, leaf) in enumerate(every.items())
        if place in owned.trained or name in checkpoint.params
    }
    _compare(checkpoint, "parameters", checkpoint.params, expected)
    held = owned.chosen(dict(enumerate(params)))
    state = jax.eval_shape(owned.start, held)
    states = Naming(owned, {}).names(state)
    _compare(checkpoint, "states of the optimiser", checkpoint.state, states)
    return [checkpoint.params.get(name, leaf) for name, leaf in every.items()]


def _compare(
    checkpoint: Checkpoint, what: str, got: Arrays, expected: Mapping[str, Any]
) -> None:
    for name in sorted({*got, *expected}):
        found, wanted = (
            (each[name].dtype.name, tuple(each[name].shape)) if name in each else None
            for each in (got, expected)
        )
        if found != wanted:
            raise CheckpointError(
                f"checkpoint {checkpoint.source!r} has other {what}; got {found} for "
                f"{name or 'the only one'!r}; expected {wanted}; resume with the model "
                "that it is of",
                path=checkpoint.source,
            )


@functools.lru_cache(maxsize=8)
def _paths_of(structure: Structure) -> dict[Any, int]:
    """Give the places of parameters by path, in order."""
    numbered = structure.unflatten(range(structure.num_leaves))
    leaves, _ = jax.tree_util.tree_flatten_with_path(numbered)
    return dict(leaves)


def _start_of(path: Any, ends: Container[Any]) -> int:
    """Give where the longest path that ends this one begins, or its length."""
    found = (start for start in range(len(path)) if path[start:] in ends)
    return next(found, len(path))
