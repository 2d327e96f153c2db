"""Weights that several stages share: one of them owns it, the others hold a copy.

Each stage sums up the gradients of its own use. The owner adds them and updates the
weight with one optimiser state; the others get the new value once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from timelyml.errors import ConfigError

Place: TypeAlias = tuple[int, Any]
"""A stage, and the way to a weight in its tree: a key, or a tuple of keys."""


@dataclass(frozen=True, slots=True)
class Tie:
    """One shared weight: `(stage, position among its leaves)` of each use."""

    owner: tuple[int, int]
    others: tuple[tuple[int, int], ...]


def resolve_ties(
    tied: Sequence[Sequence[Place]], params: Sequence[Any]
) -> tuple[Tie, ...]:
    """Find the leaves that places name.

    Args:
        tied: Groups of places; the first of each owns the weight.
        params: The tree of each stage.

    Raises:
        ConfigError: A place names no leaf, one is named twice, or shapes differ.
    """
    ties, seen = [], set()
    for group in tied:
        found = [_leaf_at(place, params) for place in group]
        for place, leaf in zip(group, found, strict=True):
            if leaf in seen:
                raise _error(place, "it is named twice", "every leaf once")
            seen.add(leaf)
        shapes = {_shape(params, leaf) for leaf in found}
        if len(shapes) > 1 or len(found) < 2:
            raise _error(
                group[0], f"shapes {sorted(shapes)}", "two or more of one shape"
            )
        ties.append(Tie(found[0], tuple(found[1:])))
    return tuple(ties)


def borrowed(ties: Sequence[Tie], stage: int) -> set[int]:
    """Return the positions of the leaves that a stage holds and does not own."""
    return {leaf for tie in ties for s, leaf in tie.others if s == stage}


def without(tree: Any, positions: set[int]) -> Any:
    """Return the tree with None in place of some leaves, so that it has none there."""
    leaves, structure = jax.tree.flatten(tree)
    kept = [None if i in positions else leaf for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, kept)


def _leaf_at(place: Place, params: Sequence[Any]) -> tuple[int, int]:
    stage, path = place
    stage = stage + len(params) if stage < 0 else stage
    keys = path if isinstance(path, tuple) else (path,)
    if not 0 <= stage < len(params):
        raise _error(place, f"no stage {stage}", f"stages 0 to {len(params) - 1}")
    flat, _ = jax.tree_util.tree_flatten_with_path(params[stage])
    for position, (steps, _) in enumerate(flat):
        if tuple(map(_key_of, steps)) == keys:
            return stage, position
    known = ", ".join(jax.tree_util.keystr(steps) for steps, _ in flat)
    raise _error(place, "no such leaf", f"one of {known}")


def _key_of(step: Any) -> Any:
    for name in ("key", "idx", "name"):
        if hasattr(step, name):
            return getattr(step, name)
    return str(step)


def _shape(params: Sequence[Any], leaf: tuple[int, int]) -> tuple[int, ...]:
    stage, position = leaf
    return tuple(jax.tree.leaves(params[stage])[position].shape)


def _error(place: Place, got: str, expected: str) -> ConfigError:
    return ConfigError(
        f"weights cannot be tied at {place!r}; got {got}; expected {expected}; name "
        f"(stage, key), or (stage, (key, ...)) of a nested tree",
        option="tied",
    )
